"""Sections that tasks add to a report: a figure, a table, a line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

NUMBER, LABEL, TEXT = "number", "label", "text"
"""How a column is formatted: right-aligned, on one line, or with its line breaks."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """The content under one heading."""

    title: str
    note: str = ""
    """Lines above the table, or instead of it."""
    figure: tuple[str, Callable[[], Any]] | None = None
    """The name of its PNG, and the function that draws it (a matplotlib Figure)."""
    columns: Sequence[tuple[str, str]] = ()
    """Heading and kind (NUMBER, LABEL or TEXT) of each column of the table."""
    rows: Sequence[Sequence[str]] = ()
    """The cells; a line that is only `RULE` is drawn as a line across the cell."""


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
    """Return the beginning of a text that a cell shows."""
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]} ..."
