"""Sections that tasks add to a report: a figure, a table, a line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Section:
    """The content under one heading."""

    title: str
    note: str = ""
    """Lines above the table, or instead of it."""
    figure: Callable[[], Any] | None = None
    """Draws a matplotlib Figure."""
    columns: Sequence[str] = ()
    """The headings of the table."""
    rows: Sequence[Sequence[Any]] = ()
    """The cells: texts, of which the page shows the beginning, and numbers."""
