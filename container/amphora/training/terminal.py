"""Shows a job's output on a terminal: progress lines as one bar, warnings and errors in colour."""

from __future__ import annotations

import re
import sys
from typing import BinaryIO

from tqdm import tqdm

VARIABLE = "AMPHORA_TERMINAL"
"""Tells the recipe that a person watches, so that it logs its progress more often."""
_PROGRESS = re.compile(r"([a-z]+):? (\d+) of (\d+) (.*?)\(\d+ %\)(.*)\n")
_TIME = re.compile(r"[a-z ]+: \d+ s so far\n")
_WARNING, _ERROR = re.compile(r"\bWARNING\b|^warn(ing:)? "), re.compile(r"\bERROR\b|^\w+Error: ")
_YELLOW, _RED, _PLAIN = "\033[33m", "\033[31m", "\033[0m"


def is_watched() -> bool:
    """Return whether both streams of this process are a terminal."""
    return sys.stdout.isatty() and sys.stderr.isatty()


def is_progress(line: str) -> bool:
    """Return whether a line of the recipe's log says how far a phase is."""
    return bool(_PROGRESS.fullmatch(line) or _TIME.fullmatch(line))


def colored(line: str) -> str:
    """Return a line in yellow if it is a warning, in red if it is an error."""
    color = _RED if _ERROR.search(line) else _YELLOW if _WARNING.search(line) else ""
    return f"{color}{line}{_PLAIN}" if color else line


class Screen:
    """The sink of the relayed streams of a job on a terminal."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._bar: tqdm[None] | None = None

    def write(self, text: bytes) -> None:
        """Write whole lines, or the part of a line that a program leaves without an end."""
        for line in text.decode("utf-8", "replace").splitlines(keepends=True):
            match = _PROGRESS.fullmatch(line)
            if match is None:
                self._hide()
                shown = f"{colored(line[:-1])}\n" if line.endswith("\n") else line
                self._stream.write(shown.encode("utf-8"))
            else:
                self._draw(*match.groups())

    def flush(self) -> None:
        """Flush the terminal."""
        self._stream.flush()

    def _draw(self, what: str, done: str, total: str, unit: str, rest: str) -> None:
        if self._bar is not None and (self._bar.desc, self._bar.total) != (what, int(total)):
            self._hide()
        if self._bar is None:
            layout = "{desc} {percentage:3.0f} % |{bar}| {n}/{total}{unit}{postfix}"
            self._bar = tqdm(
                desc=what, total=int(total), unit=f" {unit}".rstrip(), file=sys.stderr, leave=False,
                bar_format=layout, miniters=0, mininterval=0, dynamic_ncols=True,
            )  # fmt: skip
        self._bar.n = int(done)
        self._bar.set_postfix_str(rest.strip(", "), refresh=True)

    def _hide(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
