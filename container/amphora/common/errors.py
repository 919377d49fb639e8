"""Defines errors that a user can act on: key, value and remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AmphoraError(Exception):
    """Reports what the user can correct. Shown without a traceback.

    Args:
        message: What is wrong: it names the key (or file) and the value.
        remedy: What to do instead, as a sentence; empty if the message says it.
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(f"{message} {remedy}".strip())


class ConfigError(AmphoraError):
    """Reports a missing or wrong configuration, in /opt/ml/input or the environment."""


class CodeError(AmphoraError):
    """Reports code that cannot be found, downloaded, unpacked or installed."""


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a sentence with similar names (' Did you mean a or b?'), or ''."""
    matches = difflib.get_close_matches(name, list(known), n=3, cutoff=cutoff)
    return f" Did you mean {' or '.join(matches)}?" if matches else ""
