"""The text of /opt/ml/output/failure: the real cause first, since only 1,024 characters are shown.

What is known comes from three places, the surest first: the records that the hook in the child
(hook/sitecustomize.py) wrote when an exception ended a process, the status the child ended with,
and the last lines it printed to stderr.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amphora.common.logs import mask

SHOWN_CHARS = 1024
_MESSAGE_CHARS, _ASIDE_CHARS = 600, 240
_TOTAL_CHARS = 32 * 1024
# torchrun's own: that its workers failed, or that it was told to stop.
_LAUNCHER_ERRORS = ("ChildFailedError", "SignalException")
# Patterns are text until a job fails: compiling them would take a tenth of its way to the script.
# How one rank sees that another one has gone: a consequence wherever a cause is known.
_PEER_LOST = (
    r"RuntimeError: (?s:.*)(?:\bgloo\b|\bnccl|NCCL|Connection (?:closed|reset) by peer)"
    r"|\bDist(?:Backend|Network|Store)Error\b"
)
_HINTS: tuple[tuple[str, str], ...] = (
    (
        r"ModuleNotFoundError|No module named",
        "List the package in requirements.txt beside the script.",
    ),
    (
        r"OutOfMemoryError|CUDA out of memory|can't allocate memory|died with <Signals.SIGKILL",
        "Out of memory: lower the batch size or max_length, or take a larger instance.",
    ),
    (
        r"No space left on device",
        "The disk is full: raise volume_size, or keep fewer checkpoints (save_total_limit).",
    ),
    (
        r"DataLoader worker .*(?:killed by signal: (?:Killed|Bus)|exited unexpectedly)",
        "A data loader's worker ran out of memory, most likely, or of shared memory: use fewer"
        " workers, or a container with more (docker run --shm-size).",
    ),
    (
        _PEER_LOST,
        "A communication error: another rank ended first, or the hosts cannot reach each other.",
    ),
)
# What may go well at another time: a broken connection, a device that fails. Not what the script
# brings about itself: too little memory, an index out of range (a device-side assert).
_DEVICE_FAULT = (
    r"\bCUDA error: (?!out of memory|device-side assert|invalid|no kernel image|API call is not)"
    r"|\b(?:CUBLAS|CUDNN)_STATUS_(?:INTERNAL_ERROR|EXECUTION_FAILED|MAPPING_ERROR)"
    r"|\bnccl(?:SystemError|RemoteError|InternalError|UnhandledCudaError)|\bNCCL (?:error|timeout)"
    r"|\bNRT_(?:EXEC_HW|EXEC_UNIT|EXEC_NC|HW_ERR|TIMEOUT|FAILURE|EXEC_COMPLETED_WITH_ERR)"
    r"|\bfallen off the bus|\bUncorrectable ECC|\buncorrectable ECC"
)
_CRASHES = tuple(
    getattr(signal, f"SIG{name}") for name in ("ILL", "ABRT", "BUS", "FPE", "KILL", "SEGV")
)
# From here on torchrun speaks of itself: of the rank's own words only what stands before counts.
_LAUNCHER_LINE = r"^[WE]\d{4} \d\d:\d\d.*torch/distributed/elastic"
_SHELL_ERROR = r"^\S+: (?:line )?\d+: "
_FRAME_LINES = r'(?m)^ *File "(.+)", line (\d+), in (.+)\n +(.+)$'
# What mpirun says of the rank that ended the others.
_MPI_SIGNAL = r"process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)"
_MPI_EXIT = r"Process name: \[\[\d+,\d+\],(\d+)\]\s+Exit code: +(\d+)"
_EXCEPTION_LINE = r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Exit|Interrupt)\b.*"


@dataclass(frozen=True)
class Raised:
    """An exception, as the hook saw it."""

    type: str
    message: str
    frames: Sequence[Sequence[Any]] = ()
    """File, line number, function and source line of each."""

    @property
    def text(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type

    def innermost(self) -> Raised:
        """The exception that a traceback within the message begins with: a data loader's worker, a
        pool and mp.spawn hand theirs over as text."""
        parts = self.message.split("Traceback (most recent call last):\n")
        while len(parts) > 2 and "direct cause of the following exception" in parts[-2]:
            parts.pop()
        ends = [line for line in parts[-1].splitlines() if line and not line[0].isspace()]
        if len(parts) == 1 or not ends:
            return self
        kind, _, message = ends[0].partition(": ")
        frames = [(f[0], int(f[1]), f[2], f[3]) for f in re.findall(_FRAME_LINES, parts[-1])]
        return Raised(kind, message, frames)


@dataclass(frozen=True, kw_only=True)
class Record:
    """An exception that ended a process of the script."""

    time: float
    pid: int
    parents: Sequence[tuple[int, Sequence[str]]] = ()
    """The process and those above it: ids and command lines."""
    rank: str | None
    host: str | None
    script_dir: str = ""
    errors: Sequence[Raised]
    """From the exception that was raised to its innermost cause."""
    handled: Raised | None = None
    """What the innermost one's `except` block was handling, without being its cause."""
    command: str | Sequence[str] = ""
    """The command whose failure was the innermost cause."""
    traceback: str
    workers: Sequence[dict[str, Any]] = ()

    @property
    def is_launcher(self) -> bool:
        return self.errors[0].type.endswith(_LAUNCHER_ERRORS)

    @property
    def lost_a_peer(self) -> bool:
        return any(re.search(_PEER_LOST, error.text) for error in self.errors)

    @property
    def above(self) -> list[int]:
        """The ids of the processes above, the parent's first."""
        return [pid for pid, _ in self.parents[1:]]

    @property
    def headline(self) -> str:
        """The innermost cause."""
        return _shorten(self.errors[-1].innermost().text)

    @property
    def lines(self) -> list[str]:
        """The cause, the script's own frame that is nearest to it, and what became of it."""
        causes = [error.innermost() for error in reversed(self.errors)]
        own = [
            frame
            for error in (*causes, *reversed(self.errors))
            for frame in reversed(error.frames)
            if self.script_dir and str(frame[0]).startswith(f"{self.script_dir}/")
        ]
        told = [self.headline]
        for file, line, function, source in [*own, *causes[0].frames[-1:]][:1]:
            told.append(f"  at {file}:{line} in {function}: {source or ''}".rstrip(": ")[:300])
        if causes[-1].text != causes[0].text:
            told.append(_shorten(f"raised as {causes[-1].text}", _ASIDE_CHARS))
        if self.handled is not None:
            told.append(_shorten(f"while handling {self.handled.text}", _ASIDE_CHARS))
        return told

    def was_run_by(self, other: Record) -> bool:
        """Whether this process belongs to the command whose failure the other one raised."""
        if not other.command or other.pid not in self.above:
            return False
        argv = list(self.parents[self.above.index(other.pid)][1])
        try:
            words = shlex.split(other.command) if isinstance(other.command, str) else other.command
        except ValueError:
            words = []
        # A program's #! line puts its interpreter before it; a shell may leave it its own place.
        count = min(len(words), len(argv))
        words, argv = list(words[len(words) - count :]), argv[len(argv) - count :]
        return argv[-1:] == [other.command] or (
            count > 0 and Path(words[0]).name == Path(argv[0]).name and words[1:] == argv[1:]
        )


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the script's process tree ended."""

    pid: int
    is_script: bool
    """Whether the root is the script itself, in Python; not torchrun, mpirun or a shell."""
    exit_code: int
    """0 to 255, or the negative number of the signal that ended it."""
    stop_signal: int | None = None
    """The signal that asked this job to stop, if one came."""
    out_of_budget: bool = False
    """Whether it was killed because it did not end in time after that."""
    oom_killed: bool = False
    """Whether the kernel's out-of-memory killer struck in this container meanwhile."""
    tail: Sequence[str] = field(default=())
    """The last lines of stderr, without their ends."""


def within_shown(head: str) -> str:
    """`head` in the characters that are shown, its longest lines cut: the others stay whole."""
    lines = head.split("\n")
    while (excess := len("\n".join(lines)) - SHOWN_CHARS) > 0:
        longest = max(range(len(lines)), key=lambda number: len(lines[number]))
        left = max(0, len(lines[longest]) - excess - 4)
        if left == 0:  # Very many lines, none of them long.
            return head[:SHOWN_CHARS]
        lines[longest] = f"{lines[longest][:left]} ..."
    return "\n".join(lines)


def read_records(folder: Path) -> list[Record]:
    """The records in `folder`, oldest first."""
    records = []
    for path in folder.glob("*.json"):
        told = json.loads(path.read_text(encoding="utf-8"))
        told["errors"] = [Raised(**error) for error in told["errors"]]
        told["handled"] = told["handled"] and Raised(**told["handled"])
        records.append(Record(**told))
    return sorted(records, key=lambda record: record.time)


def is_consequence(text: str) -> bool:
    """Whether a failure's first line only tells of a lost peer."""
    return bool(re.search(_PEER_LOST, text.split("\n", 1)[0]))


def exit_code(ended: Ended, records: Sequence[Record]) -> int:
    """The code the container ends with: the script's own, also where torchrun stands between."""
    code = ended.exit_code
    worker = _cause(ended, records)[1]
    if code == 1 and worker is not None:
        code = worker["exit_code"]
    return 128 - code if code < 0 else code


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What is said of a failure."""

    head: str
    """The cause, within the first 1,024 characters."""
    rest: str
    raised: bool
    """Whether an exception of this host's own is known."""
    is_consequence: bool
    """Whether it only tells of a peer that was lost: then another host knows the cause."""
    is_stopped: bool
    """Whether it ended because the job was asked to stop."""
    is_fault: bool
    """Whether a device, a collective or the host failed: a restart may go well. An exception of the
    script's own, or an exit code that it chose, would come again."""

    @property
    def text(self) -> str:
        """At most 32 KiB."""
        return f"{within_shown(self.head)}\n\n{self.rest}"[:_TOTAL_CHARS].rstrip() + "\n"


def describe(ended: Ended, records: Sequence[Record]) -> Failure:
    """What went wrong, secrets masked."""
    tail = list(itertools.takewhile(lambda line: not re.match(_LAUNCHER_LINE, line), ended.tail))
    found, worker = _cause(ended, records)
    record = found if found and _ended_the_job(found, ended, records, tail) else None
    code: int = worker["exit_code"] if worker else ended.exit_code
    head: list[str] = []
    if ended.stop_signal is not None:
        how = (
            "; the script did not end within its budget and was killed."
            if ended.out_of_budget
            else " before the training had ended."
        )
        head.append(f"Stopped by {_signal_name(ended.stop_signal)}{how}")
    if record is not None:
        head += record.lines
        below = [each for each in records if record.pid in each.above]
        if record.pid == ended.pid and below:
            before, _ = _followed(below[-1], records)
            head.append(_before(before or below[-1]))
        elif not ended.is_script and all(each.pid not in record.above for each in records):
            head += [_shorten(line, _ASIDE_CHARS) for line in (_after(record, tail) or ())[-3:]]
    elif (printed := _printed_exception(ended, tail)) is not None:
        head.append(_shorten(printed))
    elif ended.stop_signal is None:
        head.append(_status(ended, code, "." if found else " and no exception."))
        head += [_shorten(line) for line in tail if line.strip()][-3:]
        head += [_before(found)] if found else []
    if ended.stop_signal is None:
        head_text = "\n".join(head)
        hints = [hint for pattern, hint in _HINTS if re.search(pattern, head_text)]
        from amphora.common import (
            transformers4,
        )  # whose patterns a job that goes well has no use for

        advice = transformers4.remedy(head[0])
        head += [advice] if advice else hints[:1]
    rank = record.rank if record else worker and worker["rank"]
    parts = [f"exit code {code}" if code >= 0 else _signal_name(-code)]
    parts += [f"rank {rank}"] if rank is not None else []
    parts += [f"host {record.host}"] if record and record.host else []
    head.append(f"({', '.join(parts)})")
    rest = [record.traceback] if record else []
    others = [each for each in records if each is not record and not each.is_launcher]
    for other in others:
        place = f"process {other.pid}" if other.rank is None else f"rank {other.rank}"
        rest.append(f"{place}: {other.headline}")
    rest += ["Last lines of stderr:", *tail] if tail else []
    if ended.stop_signal is not None:
        is_fault = False
    elif record is not None:
        texts = [error.text for error in record.errors]
        is_fault = record.lost_a_peer or any(re.search(_DEVICE_FAULT, text) for text in texts)
    elif code < 0:
        is_fault = -code != signal.SIGINT  # An interrupt is an exception of Python's.
    else:
        # A shell and mpirun tell of a program that a signal ended by 128 more than its number.
        is_fault = worker is None and not ended.is_script and code - 128 in _CRASHES
    return Failure(
        head=mask("\n".join(head)),
        rest=mask("\n".join(rest)),
        raised=record is not None,
        is_consequence=record is not None and record.lost_a_peer,
        is_stopped=ended.stop_signal is not None and not ended.out_of_budget,
        is_fault=is_fault,
    )


def _cause(ended: Ended, records: Sequence[Record]) -> tuple[Record | None, dict[str, Any] | None]:
    """The exception nearest to the job's end, and the rank that a launcher saw fail first.

    A Python program that the script ran may have failed without harm: it counts if a command that
    was to go well ran it. Below a shell it is the last one that counts, of ranks the first.
    """
    by_pid = {record.pid: record for record in records}
    if ended.pid in by_pid:
        return _followed(by_pid[ended.pid], records)
    uppermost = [record for record in records if by_pid.keys().isdisjoint(record.above)]
    worker = _mpi_worker(ended.tail)
    if not uppermost:
        return None, worker
    last = uppermost[-1]
    siblings = [each for each in uppermost if each.above[:1] == last.above[:1]]
    ranks = [each for each in siblings if each.rank is not None and last.rank is not None]
    chosen = _first_own(ranks or [last], worker)
    record, inner = _followed(chosen, records) if chosen else (None, None)
    return record, inner or worker


def _followed(
    record: Record, records: Sequence[Record]
) -> tuple[Record | None, dict[str, Any] | None]:
    """The record behind one: of a rank behind torchrun's, of a command behind its caller's."""
    if record.is_launcher:
        worker = _first_worker(record, records)
        ranks = [each for each in records if each.above[:1] == [record.pid]]
        first = _first_own(ranks, worker)
        return (_followed(first, records)[0] if first else None), worker
    below = [each for each in records if each.was_run_by(record)]
    return _followed(below[-1], records) if below else (record, None)


def _first_own(ranks: Sequence[Record], worker: dict[str, Any] | None) -> Record | None:
    """The first rank that failed by itself."""
    own = [rank for rank in ranks if not rank.lost_a_peer]
    if own:
        return own[0]
    # A rank that a signal ended left no record: then a lost peer is no cause.
    is_killed = worker is not None and worker["exit_code"] < 0
    return None if is_killed else next(iter(ranks), None)


def _first_worker(launcher: Record, records: Sequence[Record]) -> dict[str, Any] | None:
    """The worker that failed first, as torchrun saw it; one that a signal ended goes first."""
    by_pid = {record.pid: record for record in records}

    def order(worker: dict[str, Any]) -> tuple[bool, bool, float]:
        record = by_pid.get(worker["pid"])
        # torchrun ends the others by SIGTERM once one has failed.
        ended_by_it = record is None and worker["exit_code"] == -signal.SIGTERM
        return (ended_by_it, record is not None and record.lost_a_peer, worker["time"])

    return min(launcher.workers, key=order, default=None)


def _mpi_worker(tail: Sequence[str]) -> dict[str, Any] | None:
    """The rank that ended the others, as mpirun tells it."""
    text = "\n".join(tail)
    for pattern, sign in ((_MPI_SIGNAL, -1), (_MPI_EXIT, 1)):
        if found := re.search(pattern, text):
            return {"rank": found[1], "exit_code": sign * int(found[2])}
    return None


def _ended_the_job(
    record: Record, ended: Ended, records: Sequence[Record], tail: Sequence[str]
) -> bool:
    """Whether this exception is sure to be the cause.

    It is if it left the script itself. A script or shell may have forgiven one below it: its exit
    code is Python's for an exception then, or the traceback is the last that was said. A shell that
    complains of a line of its own after it has gone on.
    """
    if ended.stop_signal is not None or any(each.pid == ended.pid for each in records):
        return True
    after = _after(record, tail)
    if ended.is_script:
        return ended.exit_code == 1 and after == []
    went_on = any(re.search(_SHELL_ERROR, line) for line in after or ())
    return after == [] or (ended.exit_code == 1 and not went_on)


def _after(record: Record, tail: Sequence[str]) -> list[str] | None:
    """What stderr says after the exception's traceback; None if that is not in it."""
    last = mask(record.traceback).strip().rpartition("\n")[2]
    places = [place for place, line in enumerate(tail) if last and line.endswith(last)]
    return [line for line in tail[places[-1] + 1 :] if line.strip()] if places else None


def _before(record: Record) -> str:
    told = _shorten("".join(record.lines[:2]), 2 * _ASIDE_CHARS)
    return f"before, a process of the script ended with {told}"


def _shorten(text: str, most: int = _MESSAGE_CHARS) -> str:
    text = text.strip()
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def _status(ended: Ended, code: int, ending: str) -> str:
    if code >= 0:
        return f"The script ended with exit code {code}{ending}"
    if ended.oom_killed or (-code == signal.SIGKILL and not ended.out_of_budget):
        sure = (
            "the kernel's out-of-memory killer"
            if ended.oom_killed
            else "most likely the out-of-memory killer"
        )
        return (
            f"The script was killed by SIGKILL, {sure}: it used more memory than there is."
            " Lower the batch size or the number of workers, or take a larger instance."
        )
    return f"The script was ended by {_signal_name(-code)}."


def _signal_name(number: int) -> str:
    try:
        known = signal.Signals(number)
    except ValueError:
        return f"signal {number}"
    return f"{known.name} ({signal.strsignal(number)})"


def _printed_exception(ended: Ended, tail: Sequence[str]) -> str | None:
    """The exception that ends the last traceback, where that is the last that was said.

    For processes without the hook, and interrupts, which it does not record. A traceback that the
    script or a program of its printed on the way is none.
    """
    if ended.is_script and ended.exit_code != -signal.SIGINT:
        return None
    lines = [line for line in tail if line.strip()]
    is_traceback = any(line.startswith("Traceback (most recent call last)") for line in lines)
    return lines[-1] if is_traceback and re.match(_EXCEPTION_LINE, lines[-1]) else None
