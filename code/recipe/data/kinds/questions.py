"""From a job's channels to questions about contexts, with the words of these that answer them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data import held_out, values
from recipe.data.evidence import Evidence, Recognised
from recipe.data.files.part import Part
from recipe.data.layout import channels as layout
from recipe.data.reading import read_parts
from recipe.errors import DataError, Problems
from recipe.hyperparameters import Hyperparameters

ID, QUESTION, CONTEXT, ANSWERS, STARTS = "id", "question", "context", "answers", "starts"
_QUESTIONS, _CONTEXTS = ("question", "query"), ("context", "passage", "paragraph", "document")
_TEXTS = ("answers.text", "answer.text", "answer_text", "answers", "answer", "answer_texts")
_STARTS = (
    *("answers.answer_start", "answers.start", "answer.answer_start", "answer.start"),
    *("answer_start", "answer_starts", "start", "starts", "start_position", "start_char"),
)
_NONE_THERE = ("is_impossible", "is_unanswerable")
_LOOKED_AT = 100
_KINDS = {
    ID: pa.string(),
    QUESTION: pa.large_string(),
    CONTEXT: pa.large_string(),
    ANSWERS: pa.list_(pa.string()),
    STARTS: pa.list_(pa.int64()),
}
_Row = tuple[str, str, str, list[str], list[int]]


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Data sets with the columns `id`, `question`, `context`, `answers` (their texts, none where
    the context has no answer) and `starts` (the character of the context that each begins at)."""

    train: datasets.Dataset
    evaluation: datasets.Dataset
    test: datasets.Dataset | None
    has_unanswerable: bool
    """Whether the training data has questions without an answer."""
    found: list[str]
    """What was detected, one line each."""


def recognise(evidence: Evidence) -> Recognised | None:
    """Whether these are SQuAD's rows: nested, or a question, a context and an answer's start."""
    if evidence.part is None:
        return None
    if (nested := _nested_column(evidence.part)) is not None:
        return Recognised(reason=f"column {nested} holds contexts with questions, as SQuAD's files")
    question, context = evidence.named(_QUESTIONS), evidence.named(_CONTEXTS)
    start, answers = evidence.named(_STARTS), evidence.named(("answers", "answer"))
    if question is None or context is None:
        return None
    if start is not None and evidence.named(_TEXTS) is not None:
        return Recognised(reason=f"column {start} says where in {context} an answer begins")
    if answers is not None and any(
        "answer_start" in str(value) for value in evidence.values(answers)[:_LOOKED_AT]
    ):
        return Recognised(reason=f"column {answers} says where in {context} an answer begins")
    return None


def load(channels: Mapping[str, Path], hyperparameters: Hyperparameters) -> Questions:
    """Read and split the questions of a job's channels.

    Raises:
        DataError: names the channel, file, row or column that cannot be used, and the remedy.
    """
    places = layout.find(channels, hyperparameters.dataset_config_name)
    notes = list(places.notes)
    rows: dict[str, list[_Row]] = {}
    columns_of_split: dict[str, list[str]] = {}
    problems = Problems()
    for split, part in read_parts(places, notes):
        with problems.noted():
            of_part, mended = _rows(part)
            rows.setdefault(split, []).extend(of_part)
            columns_of_split.setdefault(split, []).append(
                f"{len(of_part)} questions from {part.path}"
            )
            if mended:
                notes.append(
                    f"{mended} answers of {part.path} begin elsewhere than their start says: the "
                    "nearest place where their text stands is taken."
                )
    problems.check()
    built = {}
    findings = []
    for split, of_split in rows.items():
        ids = [each[0] for each in of_split]
        if len(set(ids)) < len(ids):
            of_split = [(str(at), *row[1:]) for at, row in enumerate(of_split)]
            notes.append(f"{split} data: some questions share an id: they are numbered instead.")
        columns = list(zip(*of_split, strict=True)) or [()] * len(_KINDS)
        built[split] = datasets.Dataset(
            pa.table({
                name: pa.array(list(column), kind)
                for (name, kind), column in zip(_KINDS.items(), columns, strict=True)
            })
        )  # fmt: skip
        unanswered = sum(not each[3] for each in of_split)
        findings.append(
            f"{split} data: {'; '.join(columns_of_split[split])}; {unanswered} without an answer"
        )
    train, evaluation, test, rule = held_out.assign(built, None, hyperparameters)
    if not any(train[ANSWERS]):
        raise DataError(
            "No question of the training data has an answer.",
            'Give answers as {"text": ["Ada"], "answer_start": [0]}.',
        )
    return Questions(
        train=train,
        evaluation=evaluation,
        test=test,
        has_unanswerable=not all(train[ANSWERS]),
        found=[*notes, *findings, rule],
    )


def _rows(part: Part) -> tuple[list[_Row], int]:
    """The questions of a part, and how many answers' starts were mended."""
    question_rows: list[_Row] = []
    mended = 0
    problems = Problems()
    nested = _nested_column(part)
    records = _flat(part) if nested is None else _nested(part, nested)
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
                place = _place(context, text, start)
                if place is None:
                    what = f"has the answer {str(text)[:60]!r}, which is not in its context"
                    raise _wrong(part, row, what)
                mended += place != start
                right.append(place)
            question_rows.append(
                (str(number if name is None else name), question, context, texts, right)
            )
    problems.check()
    return question_rows, mended


def _place(context: str, text: Any, start: Any) -> int | None:
    """Where an answer begins: at `start`, else where its text stands nearest to that."""
    if not isinstance(text, str) or not text.strip() or not isinstance(start, int):
        return None
    if start >= 0 and context.startswith(text, start):
        return start
    before, after = (
        context.rfind(text, 0, max(0, start) + len(text)),
        context.find(text, max(0, start)),
    )
    places = [place for place in (before, after) if place >= 0]
    return min(places, key=lambda place: abs(place - start)) if places else None


def _nested_column(part: Part) -> str | None:
    """The column of SQuAD's paragraphs; or of articles with these, where a file holds one only."""
    return next(
        (
            name
            for name in ("paragraphs", "data")
            if name in part.table.column_names and "qas" in str(part.table.schema.field(name).type)
        ),
        None,
    )


def _nested(part: Part, column: str) -> Iterator[tuple[int, Any, Any, Any, list[Any], list[Any]]]:
    for row, cell in enumerate(part.table[column].to_pylist()):
        articles = cell if column == "data" else [{"paragraphs": cell}]
        for paragraph in [each for article in articles or [] for each in article["paragraphs"]]:
            for question in paragraph.get("qas") or []:
                answers = question.get("answers") or []
                if any(question.get(name) is True for name in _NONE_THERE):
                    answers = []
                texts = [answer.get("text") for answer in answers]
                starts = [answer.get("answer_start") for answer in answers]
                yield row, question.get("id"), question.get("question"), paragraph.get("context"), \
                    texts, starts  # fmt: skip


def _flat(part: Part) -> Iterator[tuple[int, Any, Any, Any, list[Any], list[Any]]]:
    by_plain = {name.strip().lower().replace(" ", "_"): name for name in part.table.column_names}

    def column(known: Sequence[str]) -> list[Any] | None:
        name = next((by_plain[each] for each in known if each in by_plain), None)
        return None if name is None else part.table[name].to_pylist()

    questions, contexts, texts = column(_QUESTIONS), column(_CONTEXTS), column(_TEXTS)
    if questions is None or contexts is None or texts is None:
        raise DataError(
            f"{part.path} has the columns {', '.join(part.table.column_names)}: questions, "
            "contexts or answers are not among them.",
            "Give question, context and answers (text, answer_start), or SQuAD's own files.",
        )
    starts, ids = column(_STARTS), column(("id", "guid", "qid", "question_id"))
    impossible = column(_NONE_THERE)
    for row, (question, context, text) in enumerate(zip(questions, contexts, texts, strict=True)):
        parsed, start = _parsed(text), None if starts is None else _parsed(starts[row])
        if isinstance(parsed, dict):  # a record that was written as JSON
            start = parsed.get("answer_start", parsed.get("start"))
            parsed = parsed.get("text")
        elif isinstance(parsed, list) and parsed and isinstance(parsed[0], dict):
            start = [item.get("answer_start", item.get("start")) for item in parsed]
            parsed = [item.get("text") for item in parsed]
        listed = parsed if isinstance(parsed, list) else [] if parsed in (None, "") else [parsed]
        first = start if isinstance(start, list) else [start] * len(listed)
        if impossible is not None and str(impossible[row]).lower() in ("true", "1"):
            listed, first = [], []
        if listed and None in first and len(first) == len(listed):
            raise _wrong(part, row, "does not say where its answer begins (answer_start)")
        whole = [int(each) if isinstance(each, (float, str)) else each for each in first]
        name = None if ids is None else ids[row]
        yield row, name, question, context, listed, whole


def _parsed(value: Any) -> Any:
    """What a string holds that is a list or a record; all else as it is."""
    if not isinstance(value, str):
        return value
    if value.strip()[:1] in ("[", "{"):
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
        + ", with empty lists where there is no answer.",
    )  # fmt: skip
