"""The text of /opt/ml/output/failure: the real cause first, since only 1,024 characters are shown.

What is known comes from three places, the surest first: the records that the hook in the child
(hook/sitecustomize.py) wrote when an exception ended a process, the status the child ended with,
and the last lines it printed to stderr.
"""

from __future__ import annotations

import itertools
import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amphora.common.logs import mask

SHOWN_CHARS = 1024
_MESSAGE_CHARS = 600
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
        r"OutOfMemoryError|CUDA out of memory|can't allocate memory",
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
_EXCEPTION_LINE = r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Exit|Interrupt)\b.*"


@dataclass(frozen=True)
class Record:
    """An exception that ended a process of the script."""

    time: float
    pid: int
    ppid: int
    rank: str | None
    host: str | None
    type: str
    message: str
    frame: Sequence[Any] | None
    """File, line number, function and source line of the user's own last frame."""
    traceback: str
    workers: Sequence[dict[str, Any]] = ()

    @property
    def is_launcher(self) -> bool:
        return self.type.endswith(_LAUNCHER_ERRORS)

    @property
    def lost_a_peer(self) -> bool:
        return bool(re.search(_PEER_LOST, f"{self.type}: {self.message}"))

    @property
    def headline(self) -> str:
        """The exception in one line."""
        if self.type.endswith("ProcessRaisedException"):
            # mp.spawn's: the rank's traceback is the message, and its last line the exception.
            return _shorten(self.message.strip().splitlines()[-1])
        return _shorten(f"{self.type}: {self.message}" if self.message else self.type)


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
    loaded = (json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json"))
    return sorted((Record(**record) for record in loaded), key=lambda record: record.time)


def is_consequence(text: str) -> bool:
    """Whether a failure's first line only tells of a lost peer."""
    return bool(re.search(_PEER_LOST, text.split("\n", 1)[0]))


def exit_code(ended: Ended, records: Sequence[Record]) -> int:
    """The code the container ends with: the script's own, also where torchrun stands between."""
    code = ended.exit_code
    worker = _first_worker(records)
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
    is_fault: bool
    """Whether a device, a collective or the host failed: a restart may go well. An exception of the
    script's own, or an exit code that it chose, would come again."""

    @property
    def text(self) -> str:
        """At most 32 KiB."""
        return f"{within_shown(self.head)}\n\n{self.rest}"[:_TOTAL_CHARS].rstrip() + "\n"


def describe(ended: Ended, records: Sequence[Record]) -> Failure:
    """What went wrong, secrets masked."""
    record = _cause(ended, records)
    tail = list(itertools.takewhile(lambda line: not re.match(_LAUNCHER_LINE, line), ended.tail))
    worker = _first_worker(records)
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
        head.append(record.headline)
        if record.frame:
            file, line, function, source = record.frame
            head.append(f"  at {file}:{line} in {function}: {source or ''}".rstrip(": ")[:300])
    elif (printed := _printed_exception(ended, tail)) is not None:
        head.append(_shorten(printed))
    elif ended.stop_signal is None:
        head.append(_status(ended, code))
        head += [_shorten(line) for line in tail if line.strip()][-3:]
    if ended.stop_signal is None:
        head_text = "\n".join(head)
        head += [hint for pattern, hint in _HINTS if re.search(pattern, head_text)][:1]
    rank = record.rank if record else worker and worker["rank"]
    parts = [f"exit code {code}" if code >= 0 else _signal_name(-code)]
    parts += [f"rank {rank}"] if rank is not None else []
    parts += [f"host {record.host}"] if record and record.host else []
    head.append(f"({', '.join(parts)})")
    rest = [record.traceback] if record else []
    others = [each for each in records if each is not record and not each.is_launcher]
    rest += [f"rank {other.rank}: {other.headline}" for other in others]
    rest += ["Last lines of stderr:", *tail] if tail else []
    if ended.stop_signal is not None:
        is_fault = False
    elif record is not None:
        is_device = re.search(_DEVICE_FAULT, f"{record.type}: {record.message}") is not None
        is_fault = record.lost_a_peer or is_device
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
        is_fault=is_fault,
    )


def _cause(ended: Ended, records: Sequence[Record]) -> Record | None:
    """The exception that ended the job: of the first rank that failed by itself.

    A Python program that the script ran may have failed without harm. So under a script it is the
    script's own record that counts, under torchrun those of its workers; below a shell, where
    nothing tells which program mattered, the nearest one's.
    """
    launcher = next((record.pid for record in records if record.is_launcher), None)
    raised = [record for record in records if not record.is_launcher]
    if launcher is not None:
        candidates = [record for record in raised if record.ppid == launcher]
    elif ended.is_script:
        candidates = [record for record in raised if record.pid == ended.pid]
    else:
        candidates = [record for record in raised if record.ppid == ended.pid] or raised[-1:]
    own = [record for record in candidates if not record.lost_a_peer]
    if own:
        return own[0]
    # A rank that a signal ended left no record: then a lost peer is no cause.
    worker = _first_worker(records)
    is_killed = worker is not None and worker["exit_code"] < 0
    return None if is_killed else next(iter(candidates), None)


def _first_worker(records: Sequence[Record]) -> dict[str, Any] | None:
    """The worker that failed first, as torchrun saw it; one that a signal ended goes first."""
    workers = [worker for record in records for worker in record.workers]
    by_pid = {record.pid: record for record in records}

    def order(worker: dict[str, Any]) -> tuple[bool, bool, float]:
        record = by_pid.get(worker["pid"])
        # torchrun ends the others by SIGTERM once one has failed.
        ended_by_it = record is None and worker["exit_code"] == -signal.SIGTERM
        return (ended_by_it, record is not None and record.lost_a_peer, worker["time"])

    return min(workers, key=order, default=None)


def _shorten(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _MESSAGE_CHARS else f"{text[: _MESSAGE_CHARS - 4]} ..."


def _status(ended: Ended, code: int) -> str:
    if code >= 0:
        return f"The script ended with exit code {code} and no exception."
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
