"""Load questions about contexts, with the words of the contexts that answer them."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from recipe.data import held_out, values
from recipe.data.column_names import ADDRESS
from recipe.data.files.part import Part
from recipe.data.files.spool import spooled_rows
from recipe.data.held_out import DataSets
from recipe.data.reading import ReadFile, read_columns
from recipe.errors import DataError, Problems
from recipe.settings import DataSettings
from recipe.task_table import TASKS

ID, QUESTION, CONTEXT, ANSWERS, STARTS = "id", "question", "context", "answers", "starts"
NESTED, IMPOSSIBLE = "articles", "is_impossible"
_NONE_THERE = ("is_impossible", "is_unanswerable")
_WHOLE = re.compile(r"\d+(\.0+)?")
_SCHEMA = pa.schema([
    (ID, pa.string()),
    (QUESTION, pa.large_string()),
    (CONTEXT, pa.large_string()),
    (ANSWERS, pa.list_(pa.string())),
    (STARTS, pa.list_(pa.int64())),
    (ADDRESS, pa.int64()),
])  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Questions(DataSets):
    """Data sets with the columns `id`, `question`, `context`, `answers` (their texts, none where
    the context has no answer) and `starts` (the character of the context that each begins at)."""

    has_unanswerable: bool
    """Whether the training data has questions without an answer."""


def load(channels: Mapping[str, Path], settings: DataSettings) -> Questions:
    """Read and split the questions of a job's channels.

    Raises:
        DataError: names the channel, file, row or column that cannot be used, and the remedy.
    """
    notes: list[str] = []
    reading = read_columns(channels, TASKS["question-answering"], settings, notes)
    tables = reading.converted(lambda file: _questions(file, notes))

    def count(table: pa.Table) -> str:
        unanswered = (pc.list_value_length(table[ANSWERS]).to_numpy() == 0).sum()
        return f"{table.num_rows} questions ({unanswered} without an answer)"

    uses, findings = held_out.build(reading, tables, settings, "question", count)
    answers = pc.list_value_length(pa.concat_tables(tables["train"])[ANSWERS])
    fewest, most = pc.min_max(answers).as_py().values()
    if not most:
        raise DataError(
            "No question of the training data has an answer.",
            'Give answers as {"text": ["Ada"], "answer_start": [0]}.',
        )
    return Questions(**uses, has_unanswerable=fewest == 0, notes=[*notes, *findings])


def _questions(file: ReadFile, notes: list[str]) -> pa.Table:
    """Return the questions of a file; a note counts answers whose start was corrected."""
    part, corrected, unplaced = file.part, 0, 0
    problems = Problems()

    def questions() -> Iterator[dict[str, Any]]:
        nonlocal corrected, unplaced
        for number, (row, cells) in enumerate(_records(file)):
            with problems.noted():
                for role in (QUESTION, CONTEXT):
                    if not isinstance(cells[role], str) or not cells[role].strip():
                        raise _wrong(part, row, f"has no {role}")
                texts, starts = _answers(file, row, cells)
                if None in starts:
                    starts = [_only_place(cells[CONTEXT], text) for text in texts]
                    if None in starts:
                        unplaced += 1
                        continue
                right = [
                    _position(part, row, cells[CONTEXT], text, start)
                    for text, start in zip(texts, starts, strict=True)
                ]
                corrected += sum(map(operator.ne, right, starts))
                name = cells.get(ID)
                yield {ID: str(number if name is None else name), QUESTION: cells[QUESTION],
                       CONTEXT: cells[CONTEXT], ANSWERS: texts, STARTS: right,
                       ADDRESS: part.address(row)}  # fmt: skip

    table = spooled_rows(_SCHEMA, questions())
    problems.check()
    if unplaced:
        what = (
            f"{unplaced} questions of {part.path} have no answer_start, and an answer that does "
            "not occur exactly once in its context"
        )
        if unplaced >= table.num_rows:
            raise DataError(f"{what}.", "Give the character from 0 at which each answer begins.")
        notes.append(f"{what}: they are not used.")
    if corrected:
        notes.append(
            f"{corrected} answers of {part.path} are not at their start: the only place where "
            "their text occurs is used."
        )
    return table


def _records(file: ReadFile) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of the row of each question, and its cells by their roles."""
    columns = file.columns
    for first, batch in file.part.batches(list(dict.fromkeys(columns.names))):
        for row, cells in enumerate(batch.to_pylist(), first):
            if NESTED not in columns:
                yield row, {role: cells[columns[role]] for role in columns.columns}
                continue
            cell = cells[columns[NESTED]]
            articles = cell if columns[NESTED] == "data" else [{"paragraphs": cell}]
            for paragraph in [one for article in articles or [] for one in article["paragraphs"]]:
                for question in paragraph.get("qas") or []:
                    is_impossible = any(question.get(name) is True for name in _NONE_THERE)
                    yield row, {
                        QUESTION: None, **question, CONTEXT: paragraph.get("context"),
                        IMPOSSIBLE: is_impossible, STARTS: None,
                    }  # fmt: skip


def _answers(file: ReadFile, row: int, cells: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the texts of the answers to a question, and their starts as they are given."""
    part = file.part
    answers, starts = _parsed(cells.get(ANSWERS)), _parsed(cells.get(STARTS))
    if isinstance(answers, dict):  # a record that was written as JSON
        starts = answers.get("answer_start", answers.get("start"))
        answers = answers.get("text")
    elif isinstance(answers, list) and answers and isinstance(answers[0], dict):
        starts = [item.get("answer_start", item.get("start")) for item in answers]
        answers = [item.get("text") for item in answers]
    if not isinstance(answers, list):
        answers = [] if answers in (None, "") else [answers]
    starts = starts if isinstance(starts, list) else [starts] * len(answers)
    starts = [int(float(str(s))) if _WHOLE.fullmatch(str(s)) else s for s in starts]
    impossible = cells.get(IMPOSSIBLE)
    mark = "" if impossible is None else str(impossible).strip().lower()
    if mark in values.TRUE:
        return [], []
    if mark not in {*values.FALSE, ""}:
        raise _wrong(part, row, f"has {impossible!r} in column {file.columns[IMPOSSIBLE]!r}")
    if len(answers) != len(starts):
        raise _wrong(part, row, f"has {len(answers)} answers and {len(starts)} starts")
    return answers, starts


def _position(part: Part, row: int, context: str, text: Any, start: Any) -> int:
    """Return the start of an answer, or the only position of its text in the context."""
    if not isinstance(text, str):
        raise _wrong(part, row, f"has the answer {json.dumps(text)[:60]}, which is not a text")
    is_text = bool(text.strip())
    if is_text and isinstance(start, int) and start >= 0 and context.startswith(text, start):
        return start
    if is_text and text in context and context.find(text) == context.rfind(text):
        return context.find(text)
    count = len(re.findall(f"(?={re.escape(text)})", context))
    what = f"has the answer {text[:60]!r}, which does not begin at "
    raise _wrong(part, row, f"{what}{start!r} and occurs {count} times in its context")


def _only_place(context: str, text: object) -> int | None:
    """Return where a text begins in a context; None unless it occurs once."""
    is_once = isinstance(text, str) and text.strip() and context.count(text) == 1
    return context.index(str(text)) if is_once else None


def _parsed(value: Any) -> Any:
    """Return the list or record that a string holds; other values unchanged."""
    if isinstance(value, str) and value.strip()[:1] in ("[", "{"):
        parsed = values.container(value)
        return value if parsed is None else parsed
    return value


def _wrong(part: Part, row: int, what: str) -> DataError:
    return DataError(
        f"{part.where(row)} {what}.",
        "Write rows as "
        + json.dumps({
            "question": "Who was here?", "context": "Ada was here.",
            "answers": {"text": ["Ada"], "answer_start": [0]},
        })
        + ", with empty lists if there is no answer. Starts are characters from 0, as in Python.",
    )  # fmt: skip
