"""Ranks that make no progress: noticed from outside, with the Python stack of each.

A rank moves on while it touches the file that AMPHORA_PROGRESS_FILE names (the recipe does at each
step), its processes compute or read and write, or its main thread's stack changes. A rank's own CPU
time counts on a host without accelerators only: what waits for a device spins. The stacks are
written by Python's faulthandler, which hook/sitecustomize.py registers in each rank for a signal.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from amphora.training import procfs
from amphora.training.limits import STALL_SECONDS
from amphora.training.verdict import Place

log = logging.getLogger("amphora")

STACK_SIGNAL = signal.SIGRTMIN + 8
"""As hook/sitecustomize.py has it."""
_LEAST_LOOK_SECONDS = 0.2
_MOST_LOOK_SECONDS = 10.0
# Less than this between two looks are a log, a metric, a thread that polls.
_BUSY_SHARE = 0.1
_MOVED_BYTES = 1 << 20
_FRAME = re.compile(
    r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE
)
# Where a main thread waits for other ranks; the elastic package is torchrun's own.
_WAITING = re.compile(
    r"/torch/distributed/(?!elastic/|run\.py)|/torch_xla/|/torch/autograd/graph\.py"
)

_UNKNOWN = "an unknown place: it answers no signal (stopped, or in a call of the kernel's)"


@dataclass
class _Rank:
    """One process that is watched."""

    pid: int
    parent: int
    rank: str | None
    main_thread: int
    touched: float
    cpu: float = 0.0
    transferred: int = 0
    moved: float = field(default_factory=time.monotonic)
    stack: str = ""
    """All threads, as faulthandler wrote them last."""


class Watch:
    """Looks at a host's ranks from a thread of its own.

    Args:
        folder: Where the ranks' files are: AMPHORA_PROGRESS_DIR.
        bound: Seconds without progress of any rank until `report` has their places.
        counts_cpu: Whether a rank that computes makes progress: not where it may spin.
        script_dir: The folder of the script, whose own lines are named first.
        report: Told where the ranks are once they do not move on, and () while they do. False
            once the job's end is decided: then what was seen last stays as it is.
    """

    def __init__(
        self,
        folder: Path,
        bound: float,
        counts_cpu: bool,
        script_dir: Path,
        host: str,
        report: Callable[[Sequence[Place]], bool],
    ) -> None:
        self._folder, self._bound, self._counts_cpu = folder, bound, counts_cpu
        self._script_dir, self._host, self._report = str(script_dir), host, report
        self._ranks: dict[int, _Rank] = {}
        self._stop = threading.Event()
        self.stacks = ""
        """The Python stack of each rank of this host, if none made progress when it ended."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[Watch]:
        """Look until the block ends."""
        thread = threading.Thread(target=self._run, name="stalls", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join(2 * _MOST_LOOK_SECONDS)

    def _run(self) -> None:
        every = min(_MOST_LOOK_SECONDS, max(_LEAST_LOOK_SECONDS, self._bound / 10))
        while not self._stop.wait(every):
            try:
                if not self.look(every):
                    return
            except Exception:  # A look that fails must not end the watch, nor the job.
                log.exception("the ranks' progress cannot be looked at")

    def look(self, every: float) -> bool:
        """See which ranks have moved on since the last look, `every` seconds ago.

        Returns:
            Whether to look again.
        """
        table = {process.pid: process for process in procfs.processes() if process.state != "Z"}
        self._ranks = {rank.pid: rank for rank in self._registered() if rank.pid in table}
        now = time.monotonic()
        for rank in self._ranks.values():
            below = procfs.descendants(rank.pid, table.values())
            counted = [rank.pid, *below] if self._counts_cpu else below
            cpu = sum(table[pid].cpu for pid in counted)
            transferred = sum(map(procfs.transferred, [rank.pid, *below]))
            is_busy = cpu - rank.cpu > _BUSY_SHARE * every
            has_moved = is_busy or transferred - rank.transferred > _MOVED_BYTES
            rank.cpu, rank.transferred = cpu, transferred
            touched = self._touched(rank.pid)
            if has_moved or touched != rank.touched:
                rank.touched, rank.moved = touched, now
        # No signal reaches any rank while one of them moves on in plain sight.
        if all(now - rank.moved > every for rank in self._ranks.values()):
            for rank in self._ranks.values():
                before = self._main_thread(rank)
                rank.stack = self._stack(rank.pid)
                if self._main_thread(rank) != before:
                    rank.moved = now
        is_stalled = bool(self._ranks) and all(
            now - rank.moved >= self._bound for rank in self._ranks.values()
        )
        ranks = list(self._ranks.values()) if is_stalled else []
        goes_on = self._report([self._place(rank) for rank in ranks])
        if ranks or goes_on:
            self.stacks = "\n\n".join(
                f"rank {rank.rank or 0} on {self._host} (process {rank.pid}):\n{rank.stack.strip()}"
                for rank in ranks
            )
        return goes_on

    def _registered(self) -> Iterator[_Rank]:
        """The ranks: processes whose hook has written a file, and that no other rank started."""
        known: dict[int, _Rank] = {}
        for file in self._folder.glob("*.json"):
            pid = int(file.stem)
            known[pid] = self._ranks.get(pid) or _Rank(
                pid=pid, touched=self._touched(pid), **json.loads(file.read_text())
            )
        # Below a shell script there may be a torchrun beside its ranks.
        ranks = {pid: each for pid, each in known.items() if each.rank is not None} or known
        for rank in sorted(ranks.values(), key=lambda rank: int(rank.rank or 0)):
            if rank.parent not in ranks:
                yield rank

    def _touched(self, pid: int) -> float:
        try:
            return (self._folder / str(pid)).stat().st_mtime
        except OSError:
            return 0.0

    def _stack(self, pid: int) -> str:
        """The stacks of a process's threads, or '' if it does not tell."""
        file = self._folder / f"{pid}.stacks"
        if not procfs.catches(pid, STACK_SIGNAL):
            return ""  # It has become another program, which the signal would end.
        os.truncate(file, 0)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACK_SIGNAL)
        text = ""
        for _ in range(20):
            time.sleep(0.02)
            before, text = text, file.read_text(errors="replace")
            if text and text == before:
                break
        return text

    def _main_thread(self, rank: _Rank) -> str:
        """The part of the stacks that belongs to the main thread, the innermost frame first."""
        for part in re.split(r"\n(?=\S)", rank.stack):
            if f"hread 0x{rank.main_thread:016x} " in part:
                return part.partition("\n")[2]
        return ""

    def _place(self, rank: _Rank) -> Place:
        frames = [match.groupdict() for match in _FRAME.finditer(self._main_thread(rank))]
        number, call = 0, ""
        while number < len(frames) and _WAITING.search(frames[number]["file"]):
            if frames[number]["function"] != "wrapper":
                call = frames[number]["function"]
            number += 1
        rest = frames[number:] or frames
        own = [frame for frame in rest if frame["file"].startswith(self._script_dir + os.sep)]
        frame = next(iter(own or rest), None)
        call = {"_engine_run_backward": "the backward pass"}.get(call, call)
        where = "{function} at {file}:{line}".format(**frame) if frame else _UNKNOWN
        return Place(int(rank.rank or 0), self._host, call, where)


def describe(places: Sequence[Place], seconds: float) -> str:
    """Who waits where, and for whom, the answer first."""
    groups: dict[tuple[str, str], list[Place]] = {}
    for place in sorted(places):
        groups.setdefault((place.call, place.where), []).append(place)
    calls = [call for call, _ in groups if call]
    is_any_absent = len(calls) < len(groups)
    lines = []
    # Those that wait for nobody come first: the others wait for them.
    for (call, where), group in sorted(groups.items(), key=lambda item: bool(item[0][0])):
        is_many = len(group) > 1
        ranks = ", ".join(str(place.rank) for place in group[:8])
        more = f" and {len(group) - 8} more" if len(group) > 8 else ""
        hosts = sorted({place.host for place in group})
        on = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
        named = f"rank{'s' * is_many} {ranks}{more} on {on}"
        if call:
            verb = "wait" if is_many else "waits"
            lines.append(f"{named} {verb} in {call}, called from {where}.")
        elif calls:
            state = "have not arrived: they are" if is_many else "has not arrived: it is"
            lines.append(f"{named} {state} in {where}.")
        else:
            lines.append(f"{named} {'are' if is_many else 'is'} in {where}.")
    if len(calls) > 1 and not is_any_absent:
        lines.append("They wait for each other in different calls.")
    elif calls and not is_any_absent:
        lines.append("All wait in the same call: a rank has ended, or a connection hangs.")
    lines.append(
        f"No rank has made progress for {seconds:g} s (AMPHORA_STALL_SECONDS; {STALL_SECONDS:g} for"
        " the recipe, 0 waits for ever). The stacks follow, each host has its own."
    )
    return f"Stalled: {lines[0]}\n" + "\n".join(lines[1:])
