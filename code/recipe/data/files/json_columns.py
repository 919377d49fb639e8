"""JSON documents of columns, {"text": [...], "label": [...]}, some rows at a time."""

from __future__ import annotations

import contextlib
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TextIO

import datasets

from recipe.data.files.part import open_text

_WORTH = 1 << 20
"""Bytes of a file that is read so: it is written once more, a file for each column."""
_CHARACTERS_AT_ONCE, _ROWS_AT_ONCE = 1 << 22, 10_000


class NoColumns(Exception):
    """A document is no object whose values are all lists of one length, or not a whole one."""


@contextlib.contextmanager
def columns(path: Path, encoding: str) -> Iterator[Callable[[], Iterator[list[dict[str, Any]]]]]:
    """What gives all rows from the first one on, some at a time, each time it is called in the
    block; the same as the whole document would give.

    Raises:
        NoColumns: it is another document, or small, or the disk has no room for its columns.
    """
    if path.stat().st_size < _WORTH:
        raise NoColumns
    with contextlib.ExitStack() as stack:
        try:
            with open_text(path, encoding) as stream:
                of_columns = _spilled(_Scanner(stream), stack)
        except OSError as error:
            raise NoColumns from error

        def rows() -> Iterator[list[dict[str, Any]]]:
            with contextlib.ExitStack() as opened:
                # Opened anew: who began before may go on.
                lines = [
                    opened.enter_context(Path(f"/proc/self/fd/{file.fileno()}").open())
                    for file in of_columns.values()
                ]
                of_rows = zip(*lines, strict=True)
                while some := list(itertools.islice(of_rows, _ROWS_AT_ONCE)):
                    yield [
                        dict(zip(of_columns, map(json.loads, cells), strict=True)) for cells in some
                    ]

        yield rows


def _spilled(scanner: _Scanner, stack: contextlib.ExitStack) -> dict[str, IO[str]]:
    """The columns, each a file with a value on each line."""
    files: dict[str, IO[str]] = {}
    counts: set[int] = set()
    folder = Path(datasets.config.HF_DATASETS_CACHE)
    folder.mkdir(parents=True, exist_ok=True)
    scanner.take("{")
    while True:
        key = scanner.value()
        scanner.take(":")
        if not isinstance(key, str) or key in files or scanner.next() != "[":
            raise NoColumns
        own = tempfile.TemporaryFile("w+", dir=folder)  # noqa: SIM115
        file = stack.enter_context(own)
        count = records = 0
        for value in scanner.items():
            file.write(json.dumps(value) + "\n")
            count += 1
            records += isinstance(value, dict)
        if count == records:
            raise NoColumns  # a list of rows
        file.flush()
        files[key] = file
        counts.add(count)
        if scanner.next() == "}":
            break
        scanner.take(",")
    scanner.take("}")
    if scanner.next() or len(counts) > 1 or counts == {1}:
        raise NoColumns
    return files


class _Scanner:
    """A document that is looked at from its beginning to its end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._text, self._at = stream, "", 0
        self._decode = json.JSONDecoder().raw_decode

    def _more(self) -> bool:
        """Read more of it, as much again as is there: a value may be long."""
        rest = self._text[self._at :]
        read = self._stream.read(max(_CHARACTERS_AT_ONCE, len(rest)))
        self._text, self._at = rest + read, 0
        return bool(read)

    def next(self) -> str:
        """The next character that is no space; nothing at the end."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in " \t\n\r":
                    return self._text[self._at]
                self._at += 1
            if not self._more():
                return ""

    def take(self, character: str) -> None:
        """Go behind the next character that is no space."""
        if self.next() != character:
            raise NoColumns
        self._at += 1

    def value(self) -> Any:
        """The next value, of which more may have to be read."""
        self.next()
        while True:
            begin = self._at
            try:
                value, end = self._decode(self._text, begin)
            except json.JSONDecodeError as error:
                if not self._more():
                    raise NoColumns from error
                continue
            except (RecursionError, ValueError) as error:
                raise NoColumns from error
            # A number may go on; other values have an end.
            if end < len(self._text):
                self._at = end
                return value
            if not self._more():
                self._at = end - begin
                return value

    def items(self) -> Iterator[Any]:
        """The values of a list."""
        self.take("[")
        if self.next() == "]":
            self.take("]")
            return
        while True:
            yield self.value()
            if self.next() == "]":
                break
            self.take(",")
        self.take("]")
