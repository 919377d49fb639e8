"""Errors a user can act on. Each message names the key, the value and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AmphoraError(Exception):
    """Something the user can mend. Shown without a traceback.

    Args:
        message: What is wrong: it names the key (or file) and the value.
        remedy: What to do instead, as a sentence; empty where the message says it.
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(f"{message} {remedy}".strip())


class ConfigError(AmphoraError):
    """The job's configuration under /opt/ml/input, or the environment, is missing or wrong."""


class CodeError(AmphoraError):
    """The user's code cannot be found, fetched, unpacked or installed."""


def near(name: str, known: Iterable[str]) -> str:
    """A sentence naming what `name` may have been meant to be: ' Did you mean a or b?', or ''."""
    matches = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(matches)}?" if matches else ""
