"""Reads the process table from /proc: which processes descend from which, and their commands.

psutil is not used, because a user's requirements.txt may replace it under a running supervisor.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """Holds one line of the process table."""

    pid: int
    parent: int
    state: str
    """'R', 'S', 'D' ...; 'Z' for one that has ended and has not been reaped."""


def processes() -> Iterator[Process]:
    """Yield every process."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                # The command's name, in parentheses, may hold anything, even parentheses.
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            except OSError:
                continue  # The process has ended.
            yield Process(int(entry.name), int(fields[1]), fields[0].decode())


def descendants(ancestor: int) -> list[int]:
    """Return the live processes below `ancestor`, parents first."""
    children: dict[int, list[int]] = {}
    for process in processes():
        if process.state != "Z":
            children.setdefault(process.parent, []).append(process.pid)
    below = [ancestor]
    for pid in below:
        below += children.get(pid, ())
    return below[1:]


def command(pid: int) -> list[str]:
    """Return the argv of a process, or an empty list if it has ended."""
    try:
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")
    except OSError:
        return []
