"""Processes as /proc tells of them: who descends from whom, and what they use.

Not by psutil: what a user's requirements.txt installs may replace it under a supervisor that runs
for days, and it does not tell which signals a process catches.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """One line of the table."""

    pid: int
    parent: int
    state: str
    """'R', 'S', 'D' ...; 'Z' for one that has ended and has not been reaped."""
    cpu: float
    """Seconds of all its threads, and of its children that have ended."""


def processes() -> Iterator[Process]:
    """Every process."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                # The command's name, in parentheses, may hold anything, even parentheses.
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            except OSError:
                continue  # It has ended meanwhile.
            cpu = sum(map(int, fields[11:15])) / _TICKS
            yield Process(int(entry.name), int(fields[1]), fields[0].decode(), cpu)


def descendants(ancestor: int, table: Iterable[Process] | None = None) -> list[int]:
    """The live processes below `ancestor`, parents first."""
    children: dict[int, list[int]] = {}
    for process in processes() if table is None else table:
        if process.state != "Z":
            children.setdefault(process.parent, []).append(process.pid)
    below = [ancestor]
    for pid in below:
        below += children.get(pid, ())
    return below[1:]


def command(pid: int) -> list[str]:
    """Its argv; empty if it has ended."""
    try:
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")
    except OSError:
        return []


def transferred(pid: int) -> int:
    """The bytes that it has read from storage and written there; 0 if that cannot be known."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("read_b", "write_b")))


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, which would end it otherwise."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
