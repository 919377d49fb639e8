"""Finds the cause of a failed job, and words it for /opt/ml/output/failure.

The cause comes first, since SageMaker shows 1,024 characters. The sources, most certain first: the
records that the hook (hook/sitecustomize.py) wrote when an exception ended a process, the exit
status of the process, and the last lines of its stderr.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amphora.common import transformers4
from amphora.common.logs import mask

SHOWN_CHARS = 1024
_MESSAGE_CHARS, _ASIDE_CHARS = 600, 240
_TOTAL_CHARS = 32 * 1024
# Exceptions of torchrun: its workers failed, or it received a signal.
_LAUNCHER_ERRORS = ("ChildFailedError", "SignalException")
# Patterns are compiled only after a failure: compiling them would delay every start.
# How a rank notices that another one has gone: a consequence if any cause is known.
_PEER_LOST = (
    r"RuntimeError: (?s:.*)(?:\bgloo\b|\bnccl|NCCL|Connection (?:closed|reset) by peer)"
    r"|\bDist(?:Backend|Network|Store)Error\b"
)
_HINTS: tuple[tuple[str, str], ...] = (
    (
        r"No module named 'torch_xla",
        "Only the image for Trainium has torch_xla: use it, or import torch_xla on Trainium alone.",
    ),
    (
        r"No module named 'smdistributed",
        "AWS's smdistributed is not in this image: use torch's DistributedDataParallel, with which"
        " the job runs here (torch_distributed).",
    ),
    (
        r"No module named 'sagemaker_containers",
        "sagemaker_containers is now sagemaker_training; its values are in the variables SM_*.",
    ),
    (
        r"No module named '(?:horovod|tensorflow|keras)\b",
        "This image is for PyTorch: use one that has the package.",
    ),
    (
        r"ModuleNotFoundError|No module named",
        "List the package in requirements.txt, next to the script. Your modules must be in"
        " the code folder (source_dir, or dependencies=).",
    ),
    (r"cannot import name 'load_metric'|no attribute 'load_metric'", "Write evaluate.load(...)."),
    (
        r"cannot import name 'HfFolder'",
        "Write huggingface_hub.get_token(), and login(token=...) for HfFolder.save_token.",
    ),
    (r"'prepare_model_for_int8_training'", "Write prepare_model_for_kbit_training (peft)."),
    (
        r"KeyError: 'SM_CHANNEL_",
        "The job has no channel of that name: pass it to fit(), or read the channel that it has.",
    ),
    (
        r"on the Hugging Face Hub either|couldn't connect to 'https://huggingface\.co"
        r"|(?:LocalEntryNotFound|OfflineModeIsEnabled)",
        "The job cannot reach the Hub: put the files into a channel or the code folder, or give the"
        " job network access.",
    ),
    (
        r"MemoryError|CUDA out of memory|can't allocate memory|died with <Signals.SIGKILL",
        "Out of memory: lower the batch size or max_length, or take a larger instance.",
    ),
    (
        r"/dev/shm|shared memory|unable to write to file </torch_"
        r"|DataLoader worker .*(?:killed by signal: (?:Killed|Bus)|exited unexpectedly)",
        "A data loader's worker most likely ran out of memory or shared memory: use fewer workers,"
        " or a container with more (docker run --shm-size).",
    ),
    (
        r"No space left on device",
        "The disk is full: raise volume_size, or keep fewer checkpoints (save_total_limit).",
    ),
    (
        r"Timed out waiting \d+ms|collective operation timeout",
        "A collective operation timed out: another rank did not take part in time. Let all ranks do"
        " the same steps, or pass a longer timeout to init_process_group (ddp_timeout).",
    ),
    (
        _PEER_LOST,
        "A communication error: another rank ended first, or the hosts cannot reach each other.",
    ),
)
# torchrun's log begins here; only the lines before are the script's.
_LAUNCHER_LINE = r"^[WE]\d{4} \d\d:\d\d.*torch/distributed/elastic"
_SHELL_ERROR = r"^\S+: (?:line )?\d+: "
_FRAME_LINES = r'(?m)^ *File "(.+)", line (\d+), in (.+)\n +(.+)$'
# mpirun's lines about the rank that ended the others.
_MPI_SIGNAL = r"process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)"
_MPI_EXIT = r"Process name: \[\[\d+,\d+\],(\d+)\]\s+Exit code: +(\d+)"
# What threads and multiprocessing's processes print as they die, which the script may not notice.
DEATH = r"(?:Exception in thread .+|Process \S+):$"
_FAULT_FRAME = r'  File "(.+)", line (\d+) in (.+)'  # as faulthandler writes it
_EXCEPTION_LINE = r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Exit|Interrupt)\b.*"


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
        ends = [line for line in parts[-1].splitlines() if line and not line[0].isspace()]
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
        """Read a file that the hook wrote."""
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
        return any(re.search(_PEER_LOST, error.text) for error in self.errors)

    @property
    def ancestors(self) -> list[int]:
        """Return the ids of the ancestors, the parent first."""
        return [pid for pid, _ in self.parents[1:]]

    @property
    def headline(self) -> str:
        """Return the innermost cause."""
        return _shorten(self.errors[-1].innermost().text)

    @property
    def lines(self) -> list[str]:
        """Return the cause, the nearest frame of the script, and what it was raised as."""
        causes = [error.innermost() for error in reversed(self.errors)]
        of_script = [
            frame
            for error in (*causes, *reversed(self.errors))
            for frame in reversed(error.frames)
            if self.script_dir and str(frame[0]).startswith(f"{self.script_dir}/")
        ]
        lines = [self.headline]
        for file, line, function, source in [*of_script, *causes[0].frames[-1:]][:1]:
            lines.append(f"  at {file}:{line} in {function}: {source or ''}".rstrip(": ")[:300])
        if causes[-1].text != causes[0].text:
            lines.append(_shorten(f"raised as {causes[-1].text}", _ASIDE_CHARS))
        if self.handled is not None:
            lines.append(_shorten(f"while handling {self.handled.text}", _ASIDE_CHARS))
        return lines

    @property
    def earlier_line(self) -> str:
        """Return a line for an exception that came before the cause."""
        cause = _shorten("".join(self.lines[:2]), 2 * _ASIDE_CHARS)
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


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Describes how the script's process tree ended."""

    pid: int
    is_script: bool
    """Whether the root is the script itself, in Python; not torchrun, mpirun or a shell."""
    exit_code: int
    """0 to 255, or the negative number of the signal that ended it."""
    stop_signal: int | None = None
    """The signal that asked this job to stop, if one came."""
    out_of_budget: bool = False
    """Whether it was killed because it did not end in time after the signal."""
    oom_killed: bool = False
    """Whether the kernel's out-of-memory killer killed a process of this container."""
    death: str = ""
    """What a thread or a process of multiprocessing printed as it died; "" if none did."""
    tail: Sequence[str] = field(default=())
    """The last lines of stderr, or of stdout if stderr is empty."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Holds the outcome of the script, and the text of its failure with secrets masked."""

    exit_code: int
    """That of the script, even below torchrun; 128 + n if signal n ended it."""
    head: str
    """The cause, within the first 1,024 characters."""
    rest: str
    raised: bool
    """Whether an exception of this host is known."""
    is_consequence: bool
    """Whether it only reports a lost peer, so that another host knows the cause."""
    is_stopped: bool
    """Whether it ended because the job was asked to stop."""
    last_exception: str
    """The last exception that ended a process or thread, though the exit code may be 0, or ''."""

    @property
    def text(self) -> str:
        """Return the whole text, at most 32 KiB."""
        return f"{within_shown(self.head)}\n\n{self.rest}"[:_TOTAL_CHARS].rstrip() + "\n"


def within_shown(head: str) -> str:
    """Shorten the longest lines of `head` until it fits the characters that are shown."""
    lines = head.split("\n")
    while (excess := len("\n".join(lines)) - SHOWN_CHARS) > 0:
        longest = max(range(len(lines)), key=lambda number: len(lines[number]))
        left = len(lines[longest]) - excess
        if left <= 8:  # Very many lines, none of them long.
            return head[:SHOWN_CHARS]
        lines[longest] = _shorten(lines[longest], left)
    return "\n".join(lines)


def is_consequence(text: str) -> bool:
    """Return whether a failure's first line only reports a lost peer."""
    return bool(re.search(_PEER_LOST, text.split("\n", 1)[0]))


def diagnose(ended: Ended, folder: Path, conflicts: Sequence[str] = ()) -> Failure:
    """Describe the outcome of a job.

    Args:
        folder: The folder of the hook's records.
        conflicts: pip's lines about packages that do not fit what it has installed.
    """
    records = sorted(map(Record.read, folder.glob("*.json")), key=lambda record: record.time)
    return _Diagnosis(ended, records, conflicts).failure()


class _Diagnosis:
    """Looks for the cause in how the process tree ended and in the recorded exceptions."""

    def __init__(self, ended: Ended, records: Sequence[Record], conflicts: Sequence[str]) -> None:
        self.ended, self.records, self.conflicts = ended, records, conflicts
        self.by_pid = {record.pid: record for record in records}
        self.mpi_worker = _mpi_worker(ended.tail)
        self.tail = list(
            itertools.takewhile(lambda line: not re.match(_LAUNCHER_LINE, line), ended.tail)
        )
        if self.mpi_worker is not None:
            # The rank may have run on another host, whose records are not here.
            mark = f"[1,{self.mpi_worker.rank}]<stderr>:"
            of_rank = [line.removeprefix(mark) for line in self.tail if line.startswith(mark)]
            self.tail = of_rank or self.tail
        self.suspect, self.worker = self._cause()
        self.record = self.suspect if self.suspect and self._is_certain(self.suspect) else None
        if self.worker is not None and self.record is not None and self.record.rank is not None:
            seen = {str(worker.rank): worker for record in records for worker in record.workers}
            seen.setdefault(str(self.worker.rank), self.worker)
            rank = self.record.rank
            self.worker = seen.get(rank, Worker(rank=rank, exit_code=1))
        self.code = self.worker.exit_code if self.worker else ended.exit_code

    def failure(self) -> Failure:
        """Word the outcome."""
        exit_code = self.code if self.ended.exit_code == 1 else self.ended.exit_code
        record, worker = self.record, self.worker
        rank = record.rank if record else worker and worker.rank
        details = [f"exit code {self.code}" if self.code >= 0 else _signal_name(-self.code)]
        details += [f"rank {rank}"] if rank is not None else []
        details += [f"host {record.host}"] if record and record.host else []
        rest = [record.traceback] if record else []
        for other in self.records:
            if other is not record and not other.is_launcher:
                where = f"process {other.pid}" if other.rank is None else f"rank {other.rank}"
                rest.append(f"{where}: {other.headline}")
        rest += ["Last lines of output:", *self.tail] if self.tail else []
        return Failure(
            exit_code=128 - exit_code if exit_code < 0 else exit_code,
            head=mask("\n".join([*self._head(), f"({', '.join(details)})"])),
            rest=mask("\n".join(rest)),
            raised=record is not None,
            is_consequence=record is not None and record.lost_a_peer,
            is_stopped=self.ended.stop_signal is not None and not self.ended.out_of_budget,
            last_exception=self.records[-1].headline if self.records else self.ended.death,
        )

    def _head(self) -> list[str]:
        """Return the first lines: the cause, its circumstances, and advice."""
        ended, record = self.ended, self.record
        head: list[str] = []
        if ended.stop_signal is not None:
            how = (
                "; the script did not end in time and was killed."
                if ended.out_of_budget
                else " before the training had ended."
            )
            head.append(f"Stopped by {_signal_name(ended.stop_signal)}{how}")
        if record is not None:
            head += record.lines
            around = record.lines_around(self.tail)
            if around and record.command and "\n" not in record.errors[-1].message:
                head += [_shorten(line, _ASIDE_CHARS) for line in around[0][-2:]]
            below = [other for other in self.records if record.pid in other.ancestors]
            if record.pid == ended.pid and below:
                before, _ = self._followed(below[-1])
                head.append((before or below[-1]).earlier_line)
            elif not ended.is_script and self.worker is None and not self._outer(record):
                after = around[1][-3:] if around else ()
                head += [_shorten(line, _ASIDE_CHARS) for line in after]
        elif (printed := self._printed_exception()) is not None:
            head.append(_shorten(printed))
        elif ended.stop_signal is None:
            head.append(self._status())
            fault = "\n".join(self.tail).partition("Current thread ")[2]
            frames = re.findall(_FAULT_FRAME, fault) if self.code < 0 else []
            if frames:
                of_script = [frame for frame in frames if "/lib/python" not in frame[0]]
                return [*head, "  at {}:{} in {}".format(*[*of_script, *frames][0])]
            head += [_shorten(line) for line in self._printed()[-3:]]
            head += [self.suspect.earlier_line] if self.suspect else []
        if ended.stop_signal is None:
            text = "\n".join(head)
            hints = [hint for pattern, hint in _HINTS if re.search(pattern, text)]
            is_missing = "".join(hints[:1]).startswith("List the package")
            folder = record.script_dir if record and is_missing else ""
            unread = sorted(Path(folder).glob("*/**/requirements*.txt")) if folder else []
            if unread:
                hints = [f"{unread[0]} is not read: move it to the top of the code folder."]
            advice = transformers4.remedy(head[0])
            head += [advice] if advice else hints[:1]
            output = "\n".join([record.traceback if record else "", *self.tail])
            for line in self.conflicts:
                # pip names the package that does not fit, and the one that it has installed.
                names = "|".join(line.replace("-", ".").split()[index] for index in (0, -5))
                if re.search(rf"\b({names})\b", output):
                    head.append(f"requirements.txt has replaced a package of the image: {line}")
        return head

    def _cause(self) -> tuple[Record | None, Worker | None]:
        """Find the exception that ended the job, and the rank that a launcher saw fail first.

        A program below the script may have failed without consequences: it counts if a checked
        command ran it. Below a shell the last exception counts, among ranks the first.
        """
        if self.ended.pid in self.by_pid:
            return self._followed(self.by_pid[self.ended.pid])
        uppermost = [record for record in self.records if not self._outer(record)]
        worker = self.mpi_worker
        if not uppermost:
            return None, worker
        last = uppermost[-1]
        ranks = [
            record
            for record in uppermost
            if record.ancestors[:1] == last.ancestors[:1] and None not in (record.rank, last.rank)
        ]
        chosen = _first_cause(ranks or [last], worker)
        record, inner = self._followed(chosen) if chosen else (None, None)
        return record, inner or worker

    def _followed(self, record: Record) -> tuple[Record | None, Worker | None]:
        """Return the record behind this one: of torchrun's rank, or of the command that was run."""
        if record.is_launcher:
            worker = self._first_worker(record)
            ranks = [other for other in self.records if other.ancestors[:1] == [record.pid]]
            first = _first_cause(ranks, worker)
            return (self._followed(first)[0] if first else None), worker
        below = [other for other in self.records if other.was_run_by(record)]
        return self._followed(below[-1]) if below else (record, None)

    def _first_worker(self, launcher: Record) -> Worker | None:
        """Return the worker that failed first, as torchrun saw it."""

        def order(worker: Worker) -> tuple[bool, bool, float]:
            record = self.by_pid.get(worker.pid)
            # torchrun ends the others with SIGTERM once one has failed.
            ended_by_it = record is None and worker.exit_code == -signal.SIGTERM
            return (ended_by_it, record is not None and record.lost_a_peer, worker.time)

        return min(launcher.workers, key=order, default=None)

    def _outer(self, record: Record) -> list[Record]:
        """Return the records of the processes above, the outermost first."""
        return [self.by_pid[pid] for pid in reversed(record.ancestors) if pid in self.by_pid]

    def _is_certain(self, record: Record) -> bool:
        """Return whether this exception is certain to be the cause.

        It is if it left the script itself. A script or shell may ignore one below it: then the exit
        code must be Python's for an exception, or nothing may follow the traceback. A shell that
        complains about one of its own lines afterwards has ignored it.
        """
        if self.ended.stop_signal is not None or self.ended.pid in self.by_pid:
            return True
        # The last traceback may be that of the program that ran this one as a checked command.
        tracebacks = (other.lines_around(self.tail) for other in (*self._outer(record), record))
        after = next((lines[1] for lines in tracebacks if lines is not None), None)
        if self.ended.is_script:
            return self.ended.exit_code == 1 and after == []
        went_on = any(re.search(_SHELL_ERROR, line) for line in after or ())
        return after == [] or (self.ended.exit_code == 1 and not went_on)

    def _status(self) -> str:
        """Describe the exit code or signal of a script without a known exception."""
        if self.code >= 0:
            ending = "." if self.suspect else " and no exception."
            return f"The script ended with exit code {self.code}{ending}"
        is_oom = self.ended.oom_killed
        if is_oom or (-self.code == signal.SIGKILL and not self.ended.out_of_budget):
            likely = "" if is_oom else "most likely "
            return (
                f"The script was killed by SIGKILL, {likely}by the kernel's out-of-memory killer:"
                " it used more memory than there is. Lower the batch size or the number of workers,"
                " or use a larger instance."
            )
        return f"The script was ended by {_signal_name(-self.code)}."

    def _printed(self) -> list[str]:
        """Return the output, without the lines of ranks that failed after the cause."""
        tracebacks = mask("\n".join(record.traceback for record in self.records)).splitlines()
        lines = []
        # Ranks print the same line, and mpirun frames its lines by dashes.
        for line in dict.fromkeys(self.tail):
            rank, text = re.findall(r"^(?:\[rank(\d+)\]:? ?)?(.*)", line)[0]
            is_other = self.worker is not None and (
                text in tracebacks or rank not in ("", str(self.worker.rank))
            )
            is_note = re.match(r"\[[IW]\d{4} ", line) is not None  # torch's own
            lines += [line] if line.strip(" -") and not (is_other or is_note) else []
        return lines

    def _printed_exception(self) -> str | None:
        """Return the last line of the output if it is that of a traceback.

        This serves processes without the hook, and interrupts, which the hook does not record.
        """
        if self.ended.is_script and self.ended.exit_code != -signal.SIGINT:
            return None
        lines = [line for line in self.tail if line.strip()]
        is_traceback = any(line.startswith("Traceback (most recent call last)") for line in lines)
        return lines[-1] if is_traceback and re.match(_EXCEPTION_LINE, lines[-1]) else None


def _first_cause(ranks: Sequence[Record], worker: Worker | None) -> Record | None:
    """Return the first rank that did not fail because of another one.

    It is None if that is `worker`, which has no record: it ended by a signal or an exit code.
    """
    has_record = worker is None or str(worker.rank) in [rank.rank for rank in ranks]
    # torchrun notes whole seconds; it ends the other ranks, which may then raise anything.
    end = worker.time + 1 if worker and worker.time and not has_record else math.inf
    causes = [rank for rank in ranks if not rank.lost_a_peer and rank.time < end]
    return next(iter(causes or (ranks if has_record else ())), None)


def _mpi_worker(tail: Sequence[str]) -> Worker | None:
    """Return the rank that ended the others, from mpirun's output."""
    text = "\n".join(tail)
    for pattern, sign in ((_MPI_SIGNAL, -1), (_MPI_EXIT, 1)):
        if match := re.search(pattern, text):
            return Worker(rank=match[1], exit_code=sign * int(match[2]))
    return None


def _shorten(text: str, most: int = _MESSAGE_CHARS) -> str:
    """Cut the middle of a long text: causes stand at its beginning or at its end."""
    text = text.strip()
    if len(text) <= most:
        return text
    end = most // 3
    return f"{text[: most - end - 5]} ... {text[-end:]}"


def _signal_name(number: int) -> str:
    try:
        known = signal.Signals(number)
    except ValueError:
        return f"signal {number}"
    return f"{known.name} ({signal.strsignal(number)})"
