"""Reads the records that the hook (hook/sitecustomize.py) wrote when exceptions ended processes."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amphora.common.logs import mask

MAX_ASIDE, MAX_LINES = 240, 12
# Exceptions of torchrun: its workers failed, or it received a signal.
_LAUNCHER_ERRORS = ("ChildFailedError", "SignalException")
# How a rank notices that another one has gone: a consequence if any cause is known.
PEER_LOST = (
    r"RuntimeError: (?s:.*)(?:\bgloo\b|\bnccl|NCCL|Connection (?:closed|reset) by peer)"
    r"|\bDist(?:Backend|Network|Store)Error\b"
)
_FRAME_LINES = r'(?m)^ *File "(.+)", line (\d+), in (.+)\n +(.+)$'


@dataclass(frozen=True)
class Raised:
    """Holds an exception that the hook recorded."""

    type: str
    message: str
    frames: Sequence[Sequence[Any]] = ()
    """File, line number, function and source line of each."""

    @property
    def text(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type

    def innermost(self) -> Raised:
        """Return the first exception of a traceback within the message, or this exception.

        Data loader workers, pools and mp.spawn pass their exceptions on as text.
        """
        parts = self.message.split("Traceback (most recent call last):\n")
        while len(parts) > 2 and "direct cause of the following exception" in parts[-2]:
            parts.pop()
        # torchrun indents what its ranks have raised.
        indent = len(parts[-1]) - len(parts[-1].lstrip(" ")) - 2
        lines = [line[max(0, indent) :] for line in parts[-1].splitlines()]
        ends = [line for line in lines if line and not line[0].isspace()]
        if len(parts) == 1 or not ends:
            return self
        kind, _, message = ends[0].partition(": ")
        frames = [(f[0], int(f[1]), f[2], f[3]) for f in re.findall(_FRAME_LINES, parts[-1])]
        return Raised(kind, message, frames)


@dataclass(frozen=True, kw_only=True)
class Worker:
    """Describes a rank that its launcher saw fail."""

    rank: int | str
    exit_code: int
    pid: int = 0
    time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Record:
    """Holds the exception that ended a process of the script."""

    time: float
    pid: int
    parents: Sequence[tuple[int, Sequence[str]]] = ()
    """The process and its ancestors: ids and command lines."""
    rank: str | None
    host: str | None
    script_dir: str = ""
    errors: Sequence[Raised]
    """From the exception that was raised to its innermost cause."""
    handled: Raised | None = None
    """The exception that was being handled when the innermost one was raised."""
    command: str | Sequence[str] = ""
    """The command whose failure is the innermost cause."""
    traceback: str
    workers: Sequence[Worker] = ()

    @classmethod
    def read(cls, path: Path) -> Record:
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields["errors"] = [Raised(**error) for error in fields["errors"]]
        fields["handled"] = fields["handled"] and Raised(**fields["handled"])
        fields["workers"] = [Worker(**worker) for worker in fields["workers"]]
        return cls(**fields)

    @property
    def is_launcher(self) -> bool:
        return self.errors[0].type.endswith(_LAUNCHER_ERRORS)

    @property
    def lost_a_peer(self) -> bool:
        return any(re.search(PEER_LOST, error.text) for error in self.errors)

    @property
    def ancestors(self) -> list[int]:
        """Return the ids of the ancestors, the parent first."""
        return [pid for pid, _ in self.parents[1:]]

    @property
    def headline(self) -> str:
        """Return the innermost cause, its lines shortened; the last ones say what to do."""
        lines = self.errors[-1].innermost().text.strip().split("\n")
        cut = [*lines[: MAX_LINES - 5], "...", *lines[-5:]] if len(lines) > MAX_LINES else lines
        return "\n".join(map(shorten, cut))

    @property
    def lines(self) -> list[str]:
        """Return the cause, the nearest frame of the script, and what it was raised as."""
        causes = [error.innermost() for error in reversed(self.errors)]
        script_frames = [
            frame
            for error in (*causes, *reversed(self.errors))
            for frame in reversed(error.frames)
            # Its path may be relative; code without a source is that of exec().
            if frame[3] and Path(self.script_dir, frame[0]).is_relative_to(self.script_dir)
        ]
        lines = [self.headline]
        for file, line, function, source in [*script_frames, *causes[0].frames[-1:]][:1]:
            lines.append(f"  at {file}:{line} in {function}: {source or ''}".rstrip(": ")[:300])
        if causes[-1].text != causes[0].text:
            lines.append(shorten(f"raised as {causes[-1].text}", MAX_ASIDE))
        if self.handled is not None:
            lines.append(shorten(f"while handling {self.handled.text}", MAX_ASIDE))
        return lines

    @property
    def earlier_line(self) -> str:
        """Return a line for an exception that came before the cause."""
        cause = shorten("".join(self.lines[:2]), 2 * MAX_ASIDE)
        return f"before, a process of the script ended with {cause}"

    def was_run_by(self, other: Record) -> bool:
        """Return whether this process ran the command whose failure `other` raised."""
        if not other.command or other.pid not in self.ancestors:
            return False
        argv = list(self.parents[self.ancestors.index(other.pid)][1])
        try:
            words = shlex.split(other.command) if isinstance(other.command, str) else other.command
        except ValueError:
            words = []
        # A #! line puts the interpreter before the program; a shell may exec it.
        count = min(len(words), len(argv))
        words, argv = list(words[len(words) - count :]), argv[len(argv) - count :]
        return argv[-1:] == [other.command] or (
            count > 0 and Path(words[0]).name == Path(argv[0]).name and words[1:] == argv[1:]
        )

    def lines_around(self, tail: Sequence[str]) -> tuple[list[str], list[str]] | None:
        """Return the lines before and after this exception's traceback; None without it."""
        printed = [line for line in mask(self.traceback).splitlines() if line.strip()]
        lines = [line for line in tail if line.strip()]
        ends = [end for end, line in enumerate(lines, 1) if line.endswith((printed or ["\n"])[-1])]
        return (lines[: max(0, ends[-1] - len(printed))], lines[ends[-1] :]) if ends else None


def shorten(text: str, most: int = 600) -> str:
    """Cut the middle of a long text: causes stand at its beginning or at its end."""
    text = text.strip()
    if len(text) <= most:
        return text
    end = most // 3
    return f"{text[: most - end - 5]} ... {text[-end:]}"
