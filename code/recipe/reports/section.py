"""A part of a report that a task adds: a figure, a table, a line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

NUMBER, LABEL, TEXT = "number", "label", "text"
"""How a column is set: to the right, on one line, or as it was written."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """What stands under one heading."""

    title: str
    note: str = ""
    """A line above the table, or in its place."""
    figure: tuple[str, Callable[[], Any]] | None = None
    """The name of its PNG, and what draws it (a matplotlib Figure)."""
    columns: Sequence[tuple[str, str]] = ()
    """Heading and kind (NUMBER, LABEL or TEXT) of each column of the table."""
    rows: Sequence[Sequence[str]] = ()
    """Cells; a line that is only `RULE` in one is drawn as a line across it."""


def texts(*headings: str) -> list[tuple[str, str]]:
    """Return columns of texts."""
    return [(heading, TEXT) for heading in headings]


def numbers(*headings: str) -> list[tuple[str, str]]:
    """Return columns of numbers."""
    return [(heading, NUMBER) for heading in headings]


RULE = "\u2029"
"""Between the two texts of a pair."""
_SHOWN_CHARS = 280


def beginning(text: str) -> str:
    """Return as much of a text as a cell shows."""
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]} ..."
