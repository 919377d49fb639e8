"""Sections that tasks add to a report: a figure, a table, a line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MISTAKES = "mistakes.csv"
"""The file of wrong answers next to the report."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """The content under one heading."""

    title: str
    note: str = ""
    """Lines above the table, or instead of it."""
    figure: Callable[[], Any] | None = None
    """Draws a matplotlib Figure, or returns HTML."""
    columns: Sequence[str] = ()
    """The headings of the table."""
    rows: Sequence[Sequence[Any]] = ()
    """The cells: texts, of which the page shows the beginning, and numbers."""

    @property
    def is_text(self) -> bool:
        """Return whether the table has long texts: on narrow screens, each row is a block."""
        cells = [cell for row in self.rows for cell in row[1:]]
        return any(isinstance(cell, str) for cell in cells)


def spread_rows(count: int, most: int) -> list[int]:
    """Return at most `most` of the numbers below `count`, evenly spread, the same each time."""
    rows: list[int] = np.linspace(0, count - 1, min(most, count)).astype(int).tolist()
    return rows
