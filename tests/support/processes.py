"""Processes as /proc shows them: their trees, memory and signals. For the ordeal and benchmarks, too."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path


def read_stats() -> dict[int, list[str]]:
    """Return for each process the fields of /proc/PID/stat after its name: state, parent, ..."""
    stats = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended
                text = (entry / "stat").read_text(errors="replace")
                stats[int(entry.name)] = text.rsplit(")", 1)[1].split()
    return stats


def children(*pids: int) -> list[int]:
    """Return the processes that these have started."""
    return [child for child, fields in read_stats().items() if int(fields[1]) in pids]


def descendants(*pids: int) -> list[int]:
    """Return all processes below these."""
    stats, below = read_stats(), list[int]()
    while pids := tuple(pid for pid, fields in stats.items() if int(fields[1]) in pids):
        below += pids
    return below


def kill_tree(pid: int) -> None:
    """Kill a process and all below it, as the end of a container does."""
    for descendant in (pid, *descendants(pid)):
        send(descendant, signal.SIGKILL)


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def memory(pids: Sequence[int], kinds: tuple[str, ...] = ("Pss:",)) -> float:
    """Return the MB of processes, shared pages counted once; `kinds` are rows of smaps_rollup."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith(kinds))
    return total / 1024
