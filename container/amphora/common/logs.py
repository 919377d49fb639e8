"""Configures logging, and masks secrets in everything that the container prints.

A secret is recognised by name (the value of a hyperparameter or variable such as HF_TOKEN, see
`remember`) or by shape (see `secret_rules`).
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TextIO, cast
from urllib.parse import quote

from amphora.common.secret_rules import MASK, is_secret_name, mask_shapes

# Shorter values would mask ordinary words and numbers.
MIN_SECRET_CHARS = 6

_known: list[str] = []
"""Values to mask, longest first, so that a secret that contains another one is masked whole."""


def secret_values(items: Mapping[str, object]) -> set[str]:
    """Return the values in `items`, at any depth, whose name is that of a secret."""
    values: set[str] = set()
    for name, value in items.items():
        if isinstance(value, Mapping):
            values |= secret_values(value)
        elif isinstance(value, str) and is_secret_name(name):
            values.add(value)
    return values


def remember(values: Iterable[str]) -> None:
    """Mask these values from now on, also as JSON, as repr and percent-encoded."""
    spellings = {
        spelling
        for value in values
        for line in {value, *value.splitlines()}
        if len(line.strip()) >= MIN_SECRET_CHARS
        for spelling in (
            line,
            json.dumps(line)[1:-1],
            quote(line, safe="", errors="surrogateescape"),
            repr(line)[1:-1],
        )
    }
    _known[:] = sorted({*_known, *spellings}, key=len, reverse=True)


def mask(text: str) -> str:
    """Replace every known or recognisable secret in `text` with asterisks."""
    line = text.rstrip("\n")  # A mask must not join this line and the next one.
    end = text[len(line) :]
    for value in _known:
        if value in line:
            line = line.replace(value, MASK)
    return mask_shapes(line) + end


def count_unfinished(text: str) -> int:
    """Count the last characters of `text` that may be the beginning of a known secret."""
    longest = max((len(value) for value in _known), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        if any(value.startswith(tail) for value in _known):
            return length
    return 0


class MaskedStream:
    """Wraps a text stream and masks what is written to it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(mask(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def configure(level: int | str = logging.INFO) -> None:
    """Send the log lines of amphora and of the recipe to stderr in one format, secrets masked."""
    handler = logging.StreamHandler(cast(TextIO, MaskedStream(sys.stderr)))
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    for name in ("amphora", "recipe"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False


def mask_printing() -> None:
    """Mask what this process writes to sys.stdout and sys.stderr from now on."""
    sys.stdout = cast(TextIO, MaskedStream(sys.stdout))
    sys.stderr = cast(TextIO, MaskedStream(sys.stderr))
