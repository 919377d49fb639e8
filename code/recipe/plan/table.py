"""Collect the decisions on a job and their reasons, for the log, doctor and the model card."""

from __future__ import annotations

from collections.abc import Callable

from recipe.tasks.base import OK, Finding


class Table:
    """Collects decisions in the order in which they are made.

    Args:
        log: Called with each decision.
    """

    def __init__(self, log: Callable[[Finding], None] = lambda decision: None) -> None:
        self.rows: list[Finding] = []
        self._log = log

    def add(self, what: str, detail: str, reason: str = "") -> None:
        """Add a decision."""
        self.append(Finding(level=OK, what=what, detail=detail, reason=reason))

    def append(self, decision: Finding) -> None:
        """Add a decision or a finding."""
        self.rows.append(decision)
        self._log(decision)
