"""A model's last answers: what a report, predictions.jsonl and mistakes.csv take from them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe.console import say
from recipe.data.held_out import DataSets
from recipe.reports.section import MISTAKES, Section
from recipe.storage import atomic

PREDICTIONS = "predictions.jsonl"
_SHOWN, _MOST, _SHOWN_CHARS = 30, 10_000, 280


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What answers without a model score."""

    what: str
    """Such as: always answering 'a', the most frequent class."""
    score: float


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A wrong answer."""

    row: int
    """Its number in the split."""
    text: str
    """Empty if another host has it."""
    true: str
    predicted: str
    measure: float


@dataclass(frozen=True, kw_only=True)
class PredictedAnswers:
    """A model's answers to the rows of a split."""

    split: str = "evaluation"

    @property
    def measure(self) -> str:
        """Return what sorts mistakes: the heading of `Mistake.measure`."""
        return "confidence"

    def __len__(self) -> int:
        """Return the number of answers."""
        return 0

    def sections(self) -> Sequence[Section]:
        """Return the report's sections on them, except mistakes."""
        return ()

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the entry of each row, as JSON values; `row` is its number in the split."""
        yield from ()

    def mistakes(self, most: int) -> tuple[int, list[Mistake]] | None:
        """Return how many answers are wrong, and `most` of these, worst first; None if an answer
        is not right or wrong."""
        return None

    def baseline(self, score: str) -> Baseline | None:
        """Return what the usual answer would score."""
        return None

    def never_predicted(self) -> Sequence[str]:
        """Return the classes that rows have and no answer has."""
        return ()

    def class_count(self) -> int:
        """Return the number of classes."""
        return 0


def write(answers: PredictedAnswers, data: DataSets, folder: Path, remedy: str) -> None:
    """Write a JSON line for each row, with its file and line, in the order of the data."""
    located = ({**data.entry(answers.split, row.pop("row")), **row} for row in answers.lines())
    lines = [json.dumps(row, ensure_ascii=False) for row in located]
    _write(folder, PREDICTIONS, "\n".join(lines) + "\n", remedy)
    say(f"{len(lines)} predictions for the {answers.split} data written to {folder}/{PREDICTIONS}")


def write_mistakes(
    answers: PredictedAnswers, data: DataSets, folder: Path, remedy: str
) -> Section | None:
    """Write mistakes.csv, worst first, and return its beginning for the report; None if an answer
    is not right or wrong."""
    if (result := answers.mistakes(_MOST)) is None:
        return None
    count, mistakes = result
    entries = [data.entry(answers.split, mistake.row) for mistake in mistakes]
    unit = next((name for entry in entries[:1] for name in entry if name != "file"), "line")
    stream = io.StringIO()
    table = csv.writer(stream)
    table.writerow(["file", unit, "true", "predicted", answers.measure, "text"])
    for mistake, entry in zip(mistakes, entries, strict=True):
        number = next((value for name, value in entry.items() if name != "file"), "")
        cells = [entry.get("file", ""), number, mistake.true, mistake.predicted]
        table.writerow([*cells, f"{mistake.measure:.6g}", mistake.text])
    _write(folder, MISTAKES, stream.getvalue(), remedy)
    rows = []
    for mistake, entry in zip(mistakes[:_SHOWN], entries, strict=False):
        location = " ".join(
            str(value) if name == "file" else f"{name} {value}" for name, value in entry.items()
        )
        text = mistake.text
        text = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
        rows.append([text, mistake.true, mistake.predicted, mistake.measure, location])
    note = f"{count:,} of {len(answers):,} answers are wrong. "
    note += f"The first {len(mistakes):,} are in {MISTAKES}." if count > len(mistakes) else ""
    note += f"All are in {MISTAKES}." if _SHOWN < count <= len(mistakes) else ""
    return Section(
        title=f"Mistakes, {answers.split} data",
        note=note.strip() if count else f"None of {len(answers):,} answers is wrong.",
        columns=("text", "true", "predicted", answers.measure, "where"),
        rows=rows,
    )


def _write(folder: Path, name: str, text: str, remedy: str) -> None:
    with atomic.results(name, folder, len(text.encode(errors="backslashreplace")), remedy) as aside:
        (aside / name).write_text(text, encoding="utf-8", errors="backslashreplace", newline="")
