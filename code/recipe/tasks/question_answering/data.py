"""Load questions about contexts, with the words of the contexts that answer them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from recipe.data import held_out, values
from recipe.data.columns import Selection
from recipe.data.files.part import Part
from recipe.data.files.spool import spooled_rows
from recipe.data.held_out import DataSets
from recipe.data.reading import FALSE, TRUE, Read, describe_files, read_columns
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
])  # fmt: skip
_ROLES = (QUESTION, CONTEXT, ANSWERS, STARTS, ID, IMPOSSIBLE)
_Row = tuple[int, Any, Any, Any, list[Any], list[Any]]
"""Number of the row, id, question, context, texts of the answers and their starts."""


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
    built, findings, unanswered = {}, [], {}
    for split, tables in reading.converted(lambda file: _questions(file, notes)).items():
        table = pa.concat_tables(tables)
        if not table.num_rows:
            raise DataError(f"The {split} data has no question.", "Give some, or leave it out.")
        built[split] = held_out.data_set([table])
        counts = pc.list_value_length(table[ANSWERS])
        unanswered[split] = int((counts.to_numpy() == 0).sum())
        count = f"{table.num_rows} questions ({unanswered[split]} without an answer)"
        findings.append(describe_files(reading.files_of(split), count))
    if unanswered["train"] == len(built["train"]):
        raise DataError(
            "No question of the training data has an answer.",
            'Give answers as {"text": ["Ada"], "answer_start": [0]}.',
        )
    uses, rule = held_out.assign(built, settings)
    notes = [*notes, *findings, rule]
    return Questions(**uses, has_unanswerable=unanswered["train"] > 0, notes=notes)


def _questions(file: Read, notes: list[str]) -> pa.Table:
    """Return the questions of a file; a note counts answers whose start was corrected."""
    part, columns, mended = file.part, file.columns, 0
    problems = Problems()

    def questions() -> Iterator[dict[str, Any]]:
        nonlocal mended
        records = _nested(part, columns[NESTED]) if NESTED in columns else _flat(part, columns)
        for number, (row, name, question, context, texts, starts) in enumerate(records):
            with problems.noted():
                if not isinstance(question, str) or not question.strip():
                    raise _wrong(part, row, "has no question")
                if not isinstance(context, str) or not context.strip():
                    raise _wrong(part, row, "has no context")
                if len(texts) != len(starts):
                    raise _wrong(part, row, f"has {len(texts)} answers and {len(starts)} starts")
                right = []
                for text, start in zip(texts, starts, strict=True):
                    position, is_text = -1, isinstance(text, str) and text.strip()
                    is_start = isinstance(start, int) and start >= 0
                    if is_text and is_start and context.startswith(text, start):
                        position = start
                    elif is_text and context.find(text) == context.rfind(text):
                        position = context.find(text)
                    if position < 0:
                        what = f"has the answer {str(text)[:60]!r}, which does not begin at "
                        count = len(re.findall(f"(?={re.escape(str(text))})", context))
                        what += f"{start!r} and occurs {count} times in its context"
                        raise _wrong(part, row, what)
                    mended += position != start
                    right.append(position)
                name = str(number if name is None else name)
                yield {ID: name, QUESTION: question, CONTEXT: context, ANSWERS: texts,
                       STARTS: right}  # fmt: skip

    table = spooled_rows(_SCHEMA, questions())
    problems.check()
    if mended:
        notes.append(
            f"{mended} answers of {part.path} are not at their start: the only place where their "
            "text occurs is used."
        )
    return table


def _nested(part: Part, column: str) -> Iterator[_Row]:
    cells = (cell for _, batch in part.batches([column]) for cell in batch[column].to_pylist())
    for row, cell in enumerate(cells):
        articles = cell if column == "data" else [{"paragraphs": cell}]
        for paragraph in [one for article in articles or [] for one in article["paragraphs"]]:
            for question in paragraph.get("qas") or []:
                answers = question.get("answers") or []
                if any(question.get(name) is True for name in _NONE_THERE):
                    answers = []
                texts = [answer.get("text") for answer in answers]
                starts = [answer.get("answer_start") for answer in answers]
                yield row, question.get("id"), question.get("question"), paragraph.get("context"), \
                    texts, starts  # fmt: skip


def _flat(part: Part, columns: Selection) -> Iterator[_Row]:
    names = [columns.get(role) for role in _ROLES]
    rows = (row for _, batch in part.batches(list(dict.fromkeys(columns.names)))
            for row in batch.to_pylist())  # fmt: skip
    for row, cells in enumerate(rows):
        question, context, answers, start, name, impossible = map(cells.get, names)
        answers, start = _parsed(answers), _parsed(start)
        if isinstance(answers, dict):  # a record that was written as JSON
            start = answers.get("answer_start", answers.get("start"))
            answers = answers.get("text")
        elif isinstance(answers, list) and answers and isinstance(answers[0], dict):
            start = [item.get("answer_start", item.get("start")) for item in answers]
            answers = [item.get("text") for item in answers]
        if not isinstance(answers, list):
            answers = [] if answers in (None, "") else [answers]
        starts = start if isinstance(start, list) else [start] * len(answers)
        starts = [int(float(str(s))) if _WHOLE.fullmatch(str(s)) else s for s in starts]
        mark = "" if impossible is None else str(impossible).strip().lower()
        if mark in TRUE:
            answers, starts = [], []
        elif mark not in {*FALSE, ""}:
            raise _wrong(part, row, f"has {impossible!r} in column {columns[IMPOSSIBLE]!r}")
        if answers and None in starts and len(starts) == len(answers):
            raise _wrong(part, row, "does not say where its answer begins (answer_start)")
        yield row, name, question, context, answers, starts


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
