"""Questions with choices, one of which is right: SWAG's endings, or a column of lists."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data import held_out
from recipe.data.column_names import ADDRESS
from recipe.data.columns import ColumnSelection
from recipe.data.files.part import Part, is_list, is_string
from recipe.data.files.spool import spooled_rows
from recipe.data.held_out import DataSets
from recipe.data.reading import ReadFile, describe_files, read_columns
from recipe.data.relevance import QUERY, SCHEMA, SCORES, TEXTS
from recipe.errors import DataError
from recipe.settings import DataSettings
from recipe.task_table import TASKS
from recipe.tasks.multiple_choice.model import pairs_of

_CONTEXT, _QUESTION, _CHOICES, _ANSWER = "context", "question", "choices", "answer"
_ENDINGS, _LABELS = "endings", "choices.label"
_NUMBER = re.compile(r"\d+$")
_LABEL_NAME = re.compile(r"((?<!val)id|label|key|letter|marker|number)$", re.IGNORECASE)
EXAMPLE = '{"question": "Where does the sun rise?", "choices": ["east", "west"], "answer": "A"}'


@dataclass(frozen=True)
class _Row:
    """A row before its answer is looked up."""

    query: str
    texts: list[str]
    """What the model reads for each choice, after the query."""
    choices: list[str]
    labels: list[str]
    answer: str


def load(channels: Mapping[str, Path], settings: DataSettings) -> DataSets:
    """Read and split the questions of a job's channels.

    Returns:
        Data sets with the columns of `relevance.SCHEMA`: the score of the right choice is 1, and
        that of others 0.

    Raises:
        DataError: names the file, row or column that cannot be used, and the remedy.
    """
    notes: list[str] = []
    reading = read_columns(channels, TASKS["multiple-choice"], settings, notes)
    reading.converted(_check_columns)
    kind = _answer_kind(reading.files_of("train"))

    def answered(file: ReadFile) -> pa.Table:
        def rows() -> Iterator[dict[str, Any]]:
            for number, row in _rows(file.part, file.columns):
                scores = [0.0] * len(row.choices)
                scores[_positions(file.part, number, row, [kind])[kind]] = 1.0
                address = file.part.address(number)
                yield {QUERY: row.query, TEXTS: row.texts, SCORES: scores, ADDRESS: address}

        table = spooled_rows(SCHEMA, rows())
        shown = f"{file.columns.describe()} ({kind})"
        notes.append(describe_files([file], f"{table.num_rows} rows", shown))
        return table

    tables = reading.converted(answered)
    built = {split: held_out.data_set(split_tables) for split, split_tables in tables.items()}
    splits, rule = held_out.assign(built, reading, settings)
    return DataSets(**splits, notes=[*notes, rule])


def sort_endings(endings: Sequence[str]) -> list[str]:
    """Return columns of choices by their numbers or letters."""
    return sorted(endings, key=lambda name: (len(name), name.lower()))


def _check_columns(file: ReadFile) -> None:
    """Raise DataError if the choices are not lists, or their columns are not numbered in order."""
    part, columns = file.part, file.columns
    numbers = [int(match[0]) for name in columns.columns.get(_ENDINGS, ())
               if (match := _NUMBER.search(name))]  # fmt: skip
    first = min(numbers, default=0)
    if first > 1 or sorted(numbers) != [*range(first, first + len(numbers))]:
        raise DataError(
            f"{part.path} has the columns of choices {', '.join(columns.columns[_ENDINGS])}.",
            "Number them from 0 or from 1, without a gap.",
        )
    if _CHOICES in columns:
        kind = part.table.schema.field(columns[_CHOICES]).type
        inner = kind.value_type if is_list(kind) else pa.null()
        if not is_string(inner) and not _keys_of_choices(inner):
            raise DataError(
                f"Column {columns[_CHOICES]!r} of {part.path} does not hold lists of texts.",
                f"Write rows as {EXAMPLE}.",
            )
    if is_list(part.table.schema.field(columns[_ANSWER]).type):
        raise DataError(
            f"Column {columns[_ANSWER]!r} of {part.path} holds lists.",
            "Name the column of the right choice in label_column.",
        )


def _keys_of_choices(kind: pa.DataType) -> Sequence[str]:
    """Return the keys of text and label in records of choices: `text` and `label`, or those of a
    string and another value with the name of a label, as HEAD-QA's `atext` and `aid`; none of other
    cells."""
    fields = (
        {field.name: is_string(field.type) for field in kind} if pa.types.is_struct(kind) else {}
    )
    if "text" not in fields and sorted(fields.values()) == [False, True]:
        text, label = sorted(fields, key=lambda name: not fields[name])
        return (text, label) if _LABEL_NAME.search(label) else ()
    return ("text", "label") if "text" in fields else ()


_CHOICE_LABELS = "labels of the choices"


def _positions(part: Part, number: int, row: _Row, kinds: Sequence[str] = ()) -> dict[str, int]:
    """Return the position of the choice that the answer names, by each kind of answers that fits.

    Args:
        number: Of the row.
        kinds: The kinds that may fit; by default all.

    Raises:
        DataError: none fits.
    """
    count, answer = len(row.choices), row.answer.strip()
    digits = int(float(answer)) if re.fullmatch(r"\d+(\.0)?", answer) else -1
    is_exact = row.answer in row.choices
    texts = row.choices if is_exact else [choice.strip() for choice in row.choices]
    names: dict[str, tuple[Sequence[Any], Any]] = {
        _CHOICE_LABELS: (row.labels, answer),
        "letters": ([chr(ord("A") + index) for index in range(count)], answer.upper()),
        "numbers from 0": (range(count), digits),
        "numbers from 1": (range(1, count + 1), digits),
        "texts of the choices": (texts, row.answer if is_exact else answer),
    }
    kinds = kinds or list(names)
    fitting = {kind: choices.index(name) for kind, (choices, name) in names.items()
               if kind in kinds and choices.count(name) == 1}  # fmt: skip
    if not fitting:
        what = f"has the answer {answer!r}, which is not exactly one of its {count} choices"
        raise _wrong(part, number, f"{what} (read as {' or '.join(kinds)})")
    return fitting


def _answer_kind(files: Sequence[ReadFile]) -> str:
    """Return the only kind of answers by which each of the training data names a choice.

    Raises:
        DataError: an answer names none, or several kinds fit and name different choices.
    """
    possible: list[str] = []
    differ = False
    for file in files:
        for number, row in _rows(file.part, file.columns):
            positions = _positions(file.part, number, row, possible)
            possible = list(positions)
            differ |= len({*positions.values()}) > 1
    if differ and len(possible) > 1 and _CHOICE_LABELS not in possible:
        raise DataError(
            f"The answers in column {files[0].columns[_ANSWER]!r} can be {' or '.join(possible)}, "
            "and no row of the training data shows which.",
            "Give the letter of the right choice: A for the first, B for the second.",
        )
    return possible[0]


def _rows(part: Part, columns: ColumnSelection) -> Iterator[tuple[int, _Row]]:
    """Yield the rows of a part with their numbers.

    Raises:
        DataError: a question or a choice is missing.
    """
    names = part.class_names.get(columns[_ANSWER])
    keys: Sequence[str] = ()
    if _CHOICES in columns:
        keys = _keys_of_choices(part.table.schema.field(columns[_CHOICES]).type.value_type)
    choice_columns = sort_endings(columns.columns.get(_ENDINGS, ()))
    for first, batch in part.batches(list(dict.fromkeys(columns.names))):
        for number, cells in enumerate(batch.to_pylist(), first):
            if _CHOICES in columns:
                choices = cells[columns[_CHOICES]] or []
            else:
                choices = [cells[name] for name in choice_columns]
            marks = cells[columns[_LABELS]] if _LABELS in columns else None
            if keys:
                choices, marks = ([(choice or {}).get(key) for choice in choices] for key in keys)
            answer = cells[columns[_ANSWER]]
            if names is not None and isinstance(answer, int) and 0 <= answer < len(names):
                answer = names[answer]
            question = cells[columns[_QUESTION]]
            if not isinstance(question, str) or not question.strip():
                raise _wrong(part, number, f"has no text in column {columns[_QUESTION]!r}")
            if len(choices) < 2 or not all(isinstance(c, str) and c.strip() for c in choices):
                raise _wrong(part, number, "has fewer than two choices, or an empty one")
            if answer in (None, "", -1):
                raise _wrong(part, number, f"has no answer in column {columns[_ANSWER]!r}")
            context = str((cells[columns[_CONTEXT]] if _CONTEXT in columns else None) or "")
            (query, *_), texts = zip(*pairs_of(context, question, choices), strict=True)
            labels = [str(mark) for mark in marks or ()]
            yield number, _Row(query, list(texts), choices, labels, str(answer))


def _wrong(part: Part, number: int, what: str) -> DataError:
    return DataError(f"{part.where(number)} {what}.", f"Write rows as {EXAMPLE}.")
