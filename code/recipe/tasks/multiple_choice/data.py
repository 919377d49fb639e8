"""Questions with choices, one of which is right: SWAG's endings, or a column of lists."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data import held_out, labels
from recipe.data.column_content import same_classes
from recipe.data.column_names import plain
from recipe.data.columns import Role, check_parts, choose, first_known, several_labels
from recipe.data.evidence import DECODER, WRITER, Evidence, Recognised
from recipe.data.files.part import Part, is_list, is_string
from recipe.data.files.spool import spooled
from recipe.data.held_out import DataSets
from recipe.data.layout import channels as layout
from recipe.data.reading import describe, read_parts
from recipe.errors import DataError, Problems
from recipe.settings import DataSettings

CONTEXT, QUESTION, CHOICES, ANSWER = "context", "question", "choices", "answer"
_ENDING, _LABELS = re.compile(r"ending_?(\d+)"), "choices.label"
_CHOICES = Role(CHOICES, ("choices.text", "choices", "question.choices", "options", "endings"))
_CONTEXT = Role(
    CONTEXT,
    ("sent1", "context", "article", "passage", "paragraph", "support"),
    is_optional=True,
)
_QUESTION = Role(
    QUESTION,
    ("sent2", "question", "question.stem", "question_stem", "query", "startphrase", "ctx"),
    "text_column",
)
_ANSWER = Role(
    ANSWER,
    ("label", "answerkey", "answer_key", "answer_idx", "answer_index", "answer", "gold"),
    "label_column",
)
_PARTS = (*_CONTEXT.names[1:], "question_stem", "query")
"""What columns are called that belong to a question."""
_ROWS_AT_ONCE = 2_000
_SCHEMA = pa.schema([
    (CONTEXT, pa.large_string()),
    (QUESTION, pa.large_string()),
    (CHOICES, pa.list_(pa.large_string())),
    (ANSWER, pa.int64()),
])  # fmt: skip
EXAMPLE = '{"question": "Where does the sun rise?", "choices": ["east", "west"], "answer": "A"}'


@dataclass(frozen=True)
class _Row:
    """A row before its answer is looked up."""

    context: str
    question: str
    choices: list[str]
    labels: list[str]
    answer: str


def recognise(evidence: Evidence) -> Recognised | None:
    """Return that the first rows have choices and say which one is right.

    Not recognised are rows whose text column is named, and models without a head for choices.
    """
    part, settings = evidence.part, evidence.settings
    if part is None or settings.text_column or evidence.model in (DECODER, WRITER):
        return None
    try:
        columns = _choose(part, settings)
    except DataError:
        return None
    choices = _choices(columns)
    shown = " to ".join(dict.fromkeys((choices[0], choices[-1])))
    return Recognised(reason=f"{shown} hold choices, and column {columns[ANSWER]} the right one")


def load(channels: Mapping[str, Path], settings: DataSettings) -> DataSets:
    """Read and split the questions of a job's channels.

    Returns:
        Data sets with the columns `context` (may be empty), `question`, `choices` (a list of texts)
        and `answer` (the position of the right one).

    Raises:
        DataError: names the file, row or column that cannot be used, and the remedy.
    """
    places = layout.find(channels, settings.dataset_config_name)
    notes = list(places.notes)
    parts: list[tuple[str, Part, dict[str, str]]] = []
    like: dict[str, str] | None = None
    problems = Problems()
    for split, part in read_parts(places, notes):
        with problems.noted():
            if split == "test" and like is not None and not (
                like[ANSWER] in part.table.column_names or first_known(part, _ANSWER.names)
            ):  # fmt: skip
                notes.append(f"{part.path} has no column of answers and is not used.")
                continue
            columns = _choose(part, settings, like)
            like = like or columns
            if split != "train" and labels.is_unlabelled(part, columns[ANSWER]):
                notes.append(f"{part.path} has no answers and is not used.")
                continue
            parts.append((split, part, columns))
    problems.check()
    kind = _kind_of_answers([(part, columns) for split, part, columns in parts if split == "train"])
    tables: dict[str, list[pa.Table]] = {}
    found: list[str] = []
    for split, part, columns in parts:
        with problems.noted():
            table = spooled(_SCHEMA, _tables(part, columns, kind))
            tables.setdefault(split, []).append(table)
            read = ", ".join(f"{what} {name!r}" for what, name in columns.items())
            count = f"{table.num_rows} rows"
            found.append(describe(split, [part], count, f"{read} ({kind})", columns.values()))
    problems.check()
    built = {split: held_out.data_set(of_split) for split, of_split in tables.items()}
    splits, rule = held_out.assign(built, settings)
    return DataSets(**splits, found=[*notes, *found, rule])


def _choose(
    part: Part, given: DataSettings, like: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the columns of a part: a list of choices, or a column for each of them.

    Raises:
        DataError: some are not known, or not of lists; two may hold the answers; or one that
            belongs to a question would not be read.
    """
    names = part.table.column_names
    numbers = {plain(name): int(match[1]) for name in like or names
               if (match := _ENDING.fullmatch(plain(name)))}  # fmt: skip
    endings = sorted(numbers, key=numbers.__getitem__)
    first = min(numbers.values(), default=0)
    if first > 1 or sorted(numbers.values()) != [*range(first, first + len(numbers))]:
        raise DataError(
            f"{part.path} has the columns of choices {', '.join(endings)}.",
            "Number them from 0 or from 1, without a gap.",
        )
    roles = [_CONTEXT, _QUESTION, *(Role(name, (name,)) for name in endings), _ANSWER]
    if not endings:
        roles[2:2] = [_CHOICES, Role(_LABELS, (_LABELS,), is_optional=True)]
    chosen = choose(part, [roles], given, like)
    if not endings and not _holds_choices(part, chosen[CHOICES]):
        raise DataError(
            f"Column {chosen[CHOICES]!r} of {part.path} does not hold lists of texts.",
            f"Write rows as {EXAMPLE}.",
        )
    answer = chosen[ANSWER]
    if is_list(part.table.schema.field(answer).type):
        raise DataError(
            f"Column {answer!r} of {part.path} holds lists.",
            "Name the column of the right choice in label_column.",
        )
    rivals = [name for name in names if name != answer and plain(name) in _ANSWER.names]
    rivals = [name for name in rivals if not same_classes(part, name, answer)]
    if given.label_column is None and like is None and rivals:
        raise several_labels(part, [answer, *rivals])
    if given.text_column is None:
        check_parts(part, chosen.values(), _PARTS, f"text_column={chosen[QUESTION]}")
    return chosen


def _holds_choices(part: Part, name: str) -> bool:
    """Return whether a column holds lists of texts, or of records with a text."""
    kind = part.table.schema.field(name).type
    if not is_list(kind):
        return False
    inner = kind.value_type
    has_text = pa.types.is_struct(inner) and inner.get_field_index("text") >= 0
    return bool(is_string(inner) or has_text)


def _choices(columns: Mapping[str, str]) -> list[str]:
    """Return the column of the lists of choices, or the column of each choice."""
    others = (CONTEXT, QUESTION, _LABELS, ANSWER)
    return [name for what, name in columns.items() if what not in others]


def _position(texts: Sequence[str], text: str) -> int | None:
    return texts.index(text) if texts.count(text) == 1 else None


def _numbered_from(first: int) -> Callable[[_Row], int | None]:
    def position(row: _Row) -> int | None:
        if not re.fullmatch(r"\d+(\.0)?", row.answer):
            return None
        number = int(float(row.answer)) - first
        return number if 0 <= number < len(row.choices) else None

    return position


def _lettered(row: _Row) -> int | None:
    letters = [chr(ord("A") + at) for at in range(len(row.choices))]
    return _position(letters, row.answer.upper())


_OF_LABELS = "labels of the choices"
_KINDS: Mapping[str, Callable[[_Row], int | None]] = {
    _OF_LABELS: lambda row: _position(row.labels, row.answer),
    "letters": _lettered,
    "numbers from 0": _numbered_from(0),
    "numbers from 1": _numbered_from(1),
    "texts of the choices": lambda row: _position(row.choices, row.answer),
}
"""How answers name a choice: each function returns its position, or None."""


def _kind_of_answers(parts: Sequence[tuple[Part, Mapping[str, str]]]) -> str:
    """Return the only one of `_KINDS` by which every answer of the training data names a choice.

    Raises:
        DataError: an answer names none, or several kinds fit and name different choices.
    """
    possible = list(_KINDS)
    differ = False
    for part, columns in parts:
        for number, row in _rows(part, columns):
            positions = {kind: _KINDS[kind](row) for kind in possible}
            possible = [kind for kind, position in positions.items() if position is not None]
            if not possible:
                raise _no_choice(part, number, row, list(positions))
            differ |= len({positions[kind] for kind in possible}) > 1
    if _OF_LABELS in possible:
        return _OF_LABELS
    if differ and len(possible) > 1:
        raise DataError(
            f"The answers in column {parts[0][1][ANSWER]!r} can be {' or '.join(possible)}, and no "
            "row of the training data decides it.",
            "Give the letter of the right choice: A for the first, B for the second.",
        )
    return possible[0]


def _tables(part: Part, columns: Mapping[str, str], kind: str) -> Iterator[pa.Table]:
    """Return the rows of a part, some at a time."""

    def rows() -> Iterator[dict[str, Any]]:
        for number, row in _rows(part, columns):
            answer = _KINDS[kind](row)
            if answer is None:
                raise _no_choice(part, number, row, [kind])
            yield {CONTEXT: row.context, QUESTION: row.question, CHOICES: row.choices,
                   ANSWER: answer}  # fmt: skip

    remaining = rows()
    while some := list(itertools.islice(remaining, _ROWS_AT_ONCE)):
        yield pa.Table.from_pylist(some, schema=_SCHEMA)


def _rows(part: Part, columns: Mapping[str, str]) -> Iterator[tuple[int, _Row]]:
    """Return each row of a part with its number.

    Raises:
        DataError: a question or a choice is missing.
    """
    names, of_choices = part.class_names.get(columns[ANSWER]), _choices(columns)
    for first, batch in part.batches([*columns.values()]):
        for number, cells in enumerate(batch.to_pylist(), first):
            lists = [cells[name] for name in of_choices]
            choices = (lists[0] or []) if CHOICES in columns else lists
            marks = cells[columns[_LABELS]] if _LABELS in columns else None
            if choices and isinstance(choices[0], dict):
                marks = [choice.get("label") for choice in choices]
                choices = [choice.get("text") for choice in choices]
            answer = cells[columns[ANSWER]]
            if names is not None and isinstance(answer, int) and 0 <= answer < len(names):
                answer = names[answer]
            question = cells[columns[QUESTION]]
            if not isinstance(question, str) or not question.strip():
                raise _wrong(part, number, f"has no text in column {columns[QUESTION]!r}")
            if len(choices) < 2 or not all(isinstance(c, str) and c.strip() for c in choices):
                raise _wrong(part, number, "has fewer than two choices, or an empty one")
            if answer in (None, "", -1):
                raise _wrong(part, number, f"has no answer in column {columns[ANSWER]!r}")
            context = (cells[columns[CONTEXT]] if CONTEXT in columns else None) or ""
            yield number, _Row(
                str(context), question, choices, [str(mark) for mark in marks or ()],
                str(answer).strip(),
            )  # fmt: skip


def _no_choice(part: Part, number: int, row: _Row, kinds: Sequence[str]) -> DataError:
    count = len(row.choices)
    what = f"has the answer {row.answer!r}, which is not exactly one of its {count} choices"
    return _wrong(part, number, f"{what} (read as {' or '.join(kinds)})")


def _wrong(part: Part, number: int, what: str) -> DataError:
    return DataError(f"{part.where(number)} {what}.", f"Write rows as {EXAMPLE}.")
