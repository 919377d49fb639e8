"""Runs the script's process tree: starts it, relays its output, stops it and reaps it.

A stop (SIGTERM, SIGINT) is forwarded to the script, which then has a budget of seconds to save its
state with the help of the processes that it has started. Those that remain then are killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from amphora.common.errors import CodeError
from amphora.common.logs import count_unfinished, mask
from amphora.training import terminal
from amphora.training.cluster import Link
from amphora.training.failure import DEATH, Ended

ABORT_BUDGET_SECONDS = 10.0
"""The budget after another host has failed: no whole step can be saved."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_TAIL_LINES = 200
_CHUNK_BYTES = 64 * 1024
# How often to look for signals, ended processes and a decision of the job's hosts.
_TICK_SECONDS = 0.1
# A line without an end, such as a progress bar, is relayed after this time.
_IDLE_SECONDS = 1.0
# How long to read the pipes after the script has ended.
_DRAIN_SECONDS = 2.0
_PR_SET_CHILD_SUBREAPER = 36
# Commands that only start the script's processes (the last one: SDK v3's), no option --deepspeed.
_LAUNCHER = re.compile(
    r"torch\.distributed\.(?:run|launch)\b|\b(?:torchrun|mpirun|orted|prted)\b(?!\.py)"
    r"|\baccelerate(?: |\.commands\.)launch\b|(?<!-)\bdeepspeed(?: |\.launcher\b)|/sm_drivers/"
)
_OOM_EVENTS = Path("/sys/fs/cgroup/memory.events")


class Interrupted(BaseException):
    """Reports a stop while no process of the script runs."""


@dataclass
class Signals:
    """Holds whether a signal has asked the job to stop, and what follows then."""

    stop: int | None = None
    """The first signal that asked to stop."""
    budget: float = 100.0
    """Seconds that a process tree may take to end after a stop."""
    interrupts: bool = False
    """Whether a stop raises Interrupted in the main thread: it does before the script runs."""

    @classmethod
    @contextlib.contextmanager
    def caught(cls) -> Iterator[Signals]:
        """Catch the stop signals within the block. Main thread only."""
        signals = cls()

        def on_stop(number: int, _frame: object) -> None:
            signals.stop = signals.stop or number
            if signals.interrupts:
                raise Interrupted

        previous = {number: signal.signal(number, on_stop) for number in _STOP_SIGNALS}
        # Where a parent has set it to be ignored, no child leaves a status.
        previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            yield signals
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


@dataclass
class _Relay:
    """Relays one pipe of the child line by line, with secrets masked."""

    source: BinaryIO
    sink: BinaryIO | terminal.Screen
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    pending: bytes = b""
    fed: float = 0.0
    death: str = ""
    """The first line by which a thread or a process of multiprocessing reported its end."""

    def feed(self) -> bool:
        """Relay what has arrived. Return False at the end of the stream."""
        chunk = os.read(self.source.fileno(), _CHUNK_BYTES)
        self.fed = time.monotonic()
        self.pending += chunk
        end = max(self.pending.rfind(b"\n"), self.pending.rfind(b"\r")) + 1
        if not chunk:
            end = len(self.pending)
        elif len(self.pending) - end > _CHUNK_BYTES:
            end = self._safe_end()
        self._pass_on(end)
        return bool(chunk)

    def flush_idle(self) -> None:
        """Relay a line that has had no end for a while."""
        if self.pending and time.monotonic() - self.fed > _IDLE_SECONDS:
            self._pass_on(self._safe_end())

    def _safe_end(self) -> int:
        """Return where to cut a line without an end: not within a possible secret."""
        return len(self.pending) - count_unfinished(self.pending.decode("latin-1"))

    def _pass_on(self, end: int) -> None:
        text = mask(self.pending[:end].decode("utf-8", "replace"))
        self.pending = self.pending[end:]
        lines = text.splitlines()
        self.tail.extend(filter(None, lines))
        self.death = self.death or next((line for line in lines if re.match(DEATH, line)), "")
        with contextlib.suppress(OSError):  # If nobody reads the output, the job continues.
            self.sink.write(text.encode("utf-8"))
            self.sink.flush()


def run(
    argv: Sequence[str],
    environ: Mapping[str, str],
    cwd: Path,
    signals: Signals,
    link: Link | None = None,
) -> Ended:
    """Run a program with its process tree until all of it has ended.

    Args:
        link: Has a decision once the job ends on all hosts; then the tree has 10 s.

    Raises CodeError if the program cannot be started.
    """
    interrupts, signals.interrupts = signals.interrupts, False
    if signals.stop is not None:
        raise Interrupted
    # Orphans of the script become children of this process, as of PID 1.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    oom_before = _oom_kills()
    sinks: list[BinaryIO] | list[terminal.Screen] = [sys.stdout.buffer, sys.stderr.buffer]
    watched = {}
    if terminal.is_watched():
        sinks, watched = [terminal.Screen(sys.stderr.buffer)] * 2, {terminal.VARIABLE: "1"}
    try:
        child = subprocess.Popen(
            argv, env={**environ, **watched}, cwd=cwd, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        remedy = "Check the script's first line (#!) and that the program is in this image."
        if error.errno == errno.E2BIG:
            largest = max(range(1, len(argv)), key=lambda index: len(argv[index]))
            size = f"the largest, {len(argv[largest]):,} characters, is that of {argv[largest - 1]}"
            remedy = f"Put large values into a file of a channel: {size}."
        raise CodeError(f"{argv[0]} cannot be started: {error}.", remedy) from error
    assert child.stdout is not None and child.stderr is not None
    pipes = (child.stdout, child.stderr)
    relays = [_Relay(pipe, sink) for pipe, sink in zip(pipes, sinks, strict=True)]  # type: ignore[arg-type]
    tree = _Tree(child.pid)
    try:
        out_of_budget = _watch(tree, relays, signals, link)
    finally:
        tree.kill()
        tree.reap()
        child.returncode = 0 if tree.status is None else tree.status  # Not for Popen to wait for.
        for relay in relays:
            relay.source.close()
        signals.interrupts = interrupts
    is_script = argv[0] == sys.executable and not _LAUNCHER.search(" ".join(argv[:3]))
    return Ended(
        pid=child.pid, is_script=is_script, exit_code=1 if tree.status is None else tree.status,
        stop_signal=signals.stop, out_of_budget=out_of_budget,
        oom_killed=_oom_kills() > oom_before, death=relays[1].death,
        tail=tuple(relays[1].tail or relays[0].tail),
        stdout_line="".join([*relays[0].tail][-1:]) if relays[1].tail else "",
    )  # fmt: skip


def _watch(tree: _Tree, relays: list[_Relay], signals: Signals, link: Link | None) -> bool:
    """Wait for the end of the tree and its output. Return whether the budget ran out."""
    deadline = ended_at = stopping = None
    is_decided = False
    with selectors.DefaultSelector() as selector:
        for relay in relays:
            selector.register(relay.source, selectors.EVENT_READ, relay)
        while True:
            for key, _ in selector.select(timeout=_TICK_SECONDS):
                if not key.data.feed():
                    selector.unregister(key.fileobj)
            for relay in relays:
                relay.flush_idle()
            tree.reap()
            now = time.monotonic()
            if link is not None and link.decision is not None and not is_decided:
                is_decided, deadline = True, deadline or now + ABORT_BUDGET_SECONDS
                tree.send(signal.SIGTERM)
            if signals.stop is not None and stopping is None:
                stopping, deadline = signals.stop, now + signals.budget
                tree.send(stopping)
            if deadline is not None and now > deadline:
                return True
            if tree.status is None:
                continue
            # A shell or a parent of ranks may end at once, while its children still save.
            if deadline is not None and tree.members():
                tree.send(stopping or signal.SIGTERM)
                continue
            ended_at = ended_at or now
            if not selector.get_map() or now - ended_at > _DRAIN_SECONDS:
                return False


@dataclass
class _Tree:
    """Finds the processes that descend from the script in /proc."""

    root: int
    status: int | None = None
    """The root's exit code, or the negative number of the signal that ended it."""
    signalled: set[int] = field(default_factory=set)
    """Processes that have received the signal: a second one would enter their handler again."""

    def reap(self) -> None:
        """Reap every process that has ended, orphans included."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.root:
                    self.status = os.waitstatus_to_exitcode(ended[1])

    def members(self) -> list[int]:
        """Return the ids of the live processes, orphans included."""
        children, below = _children(), [os.getpid()]
        for pid in below:
            below += children.get(pid, ())
        return below[1:]

    def send(self, number: int) -> None:
        """Send a signal to the scripts of the tree, once to each.

        The children of a Python process (data loaders, wandb, a shell with ffmpeg) are left to it:
        it needs them for its step. A launcher's children are the scripts, since torchrun itself
        would give them 30 s only. A shell may have a trap, and its children may be scripts.
        """
        children = _children()
        scripts, others = [], []
        # Orphans may be helpers as long as the root runs.
        pending = [self.root] if self.status is None else [*children.get(os.getpid(), ())]
        for pid in pending:
            below = children.get(pid, [])
            if below and _LAUNCHER.search(" ".join(_command(pid)[:4])):
                pending += below
            elif Path(_link(pid, "exe")).name.startswith("python"):
                scripts.append(pid)
            else:
                others.append(pid)
                pending += below
        # In `python train.py | tee log`, a script without the reader of its output cannot print.
        outputs = {_link(pid, f"fd/{output}") for pid in scripts for output in (1, 2)}
        pipes = {output for output in outputs if output.startswith("pipe:")}
        others = [pid for pid in others if _link(pid, "fd/0") not in pipes]
        for pid in {*scripts, *others} - self.signalled:
            self.signalled.add(pid)
            with contextlib.suppress(ProcessLookupError):  # It may have ended.
                os.kill(pid, number)

    def kill(self) -> None:
        for _ in range(10):
            members = self.members()
            if not members:
                return
            for pid in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
            self.reap()


def _children() -> dict[int, list[int]]:
    """Return the live children of every process.

    A user's requirements.txt may replace psutil under this process.
    """
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # The process has ended.
                # The command's name, in parentheses, may hold anything, even parentheses.
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                if fields[0] != b"Z":
                    children.setdefault(int(fields[1]), []).append(int(entry.name))
    return children


def _command(pid: int) -> list[str]:
    """Return the argv of a process, or an empty list if it has ended."""
    with contextlib.suppress(OSError):
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")
    return []


def _link(pid: int, name: str) -> str:
    """Return where a link of a process points (`exe`, `fd/0`), or "" if it has ended."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/{name}")  # noqa: PTH115
    return ""


def _oom_kills() -> int:
    with contextlib.suppress(OSError, ValueError):
        events = dict(line.split() for line in _OOM_EVENTS.read_text().splitlines())
        return int(events.get("oom_kill", 0))
    return 0
