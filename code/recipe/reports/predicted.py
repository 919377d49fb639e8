"""Write predictions.jsonl for `do_predict`, a line for each evaluated row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from recipe.console import say
from recipe.reports.section import Section
from recipe.storage import atomic

NAME = "predictions.jsonl"


class PredictedAnswers(Protocol):
    """A model's answers to the rows of a split."""

    @property
    def split(self) -> str: ...

    def sections(self) -> Sequence[Section]:
        """Return the report's sections on them."""

    def lines(self) -> Iterator[Mapping[str, Any]]:
        """Return the entry of each row, as JSON values."""


def write(answers: PredictedAnswers, folder: Path, remedy: str) -> None:
    """Write a JSON line for each row, in the order of the data."""
    lines = [json.dumps(row, ensure_ascii=False) for row in answers.lines()]
    text = "\n".join(lines) + "\n"
    with atomic.results(NAME, folder, len(text.encode()), remedy) as aside:
        (aside / NAME).write_text(text, encoding="utf-8", errors="backslashreplace")
    say(f"{len(lines)} predictions for the {answers.split} data written to {folder}/{NAME}")
