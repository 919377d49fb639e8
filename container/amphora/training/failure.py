"""Finds the cause of a failed job, and words it for /opt/ml/output/failure.

The cause comes first, since SageMaker shows 1,024 characters. The sources, most certain first: the
hook's records of exceptions that ended processes, the exit status, the last lines of stderr.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from amphora.common import transformers4
from amphora.common.logs import mask
from amphora.common.packages import hidden_module_remedy
from amphora.training.exception_records import MAX_ASIDE, PEER_LOST, Raised, Record, Worker, shorten

SHOWN_CHARS = 1024
_TOTAL_CHARS = 32 * 1024
# Patterns are compiled only after a failure: compiling them would delay every start.
_HINTS: Mapping[str, str] = {
    r"No module named 'torch_xla": (
        "Only the image for Trainium has torch_xla: use it, or import torch_xla on Trainium alone."
    ),
    r"No module named 'smdistributed": (
        "AWS's smdistributed is not in this image: use torch's DistributedDataParallel, with which"
        " the job runs here (torch_distributed)."
    ),
    r"No module named 'sagemaker_containers": (
        "sagemaker_containers is now sagemaker_training; its values are in the variables SM_*."
    ),
    r"No module named '(?:horovod|tensorflow|keras)\b": (
        "This image is for PyTorch: use one that has the package."
    ),
    r"ModuleNotFoundError|No module named": (
        "List the package in requirements.txt, next to the script. Your modules must be in"
        " the code folder (source_dir, or dependencies=)."
    ),
    r"cannot import name 'load_metric'|no attribute 'load_metric'": "Write evaluate.load(...).",
    r"cannot import name 'HfFolder'": (
        "Write huggingface_hub.get_token(), and login(token=...) for HfFolder.save_token."
    ),
    r"cannot import name 'Repository' from 'huggingface_hub": (
        "Write huggingface_hub.create_repo(...) and upload_folder(...) in place of Repository and"
        " push_to_hub."
    ),
    r"cannot import name 'cached_download' from 'huggingface_hub": (
        "Write huggingface_hub.hf_hub_download(repo_id, filename)."
    ),
    r"'Accelerator' object has no attribute 'use_fp16'": (
        "Write accelerator.mixed_precision == 'fp16' in place of accelerator.use_fp16."
    ),
    r"Accelerator\.__init__\(\) got an unexpected keyword argument 'fp16'": (
        "Write Accelerator(mixed_precision='fp16')."
    ),
    r"Accelerator\.__init__\(\) got an unexpected keyword argument 'logging_dir'": (
        "Write Accelerator(project_dir=...)."
    ),
    r"Accelerator\.__init__\(\) got an unexpected keyword argument '\w+_batches'": (
        "Pass it in Accelerator(dataloader_config=DataLoaderConfiguration(...))."
    ),
    r"'prepare_model_for_int8_training'": "Write prepare_model_for_kbit_training (peft).",
    r"KeyError: 'SM_CHANNEL_": (
        "The job has no channel of that name: pass it to fit(), or read the channel that it has."
    ),
    (
        r"on the Hugging Face Hub either|couldn't connect to 'https://huggingface\.co"
        r"|(?:LocalEntryNotFound|OfflineModeIsEnabled)"
    ): (
        "The job cannot reach the Hub: put the files into a channel or the code folder, or give the"
        " job network access."
    ),
    r"MemoryError|CUDA out of memory|can't allocate memory|died with <Signals.SIGKILL": (
        "Out of memory: lower the batch size or max_length, or take a larger instance."
    ),
    (
        r"/dev/shm|shared memory|unable to write to file </torch_"
        r"|process pool was terminated abruptly|subprocesses has abruptly died"
        r"|DataLoader worker .*(?:killed by signal: (?:Killed|Bus)|exited unexpectedly)"
    ): (
        "A worker process most likely ran out of memory or shared memory: use fewer workers,"
        " or a container with more (docker run --shm-size)."
    ),
    r"No space left on device": (
        "The disk is full: raise volume_size, or keep fewer checkpoints (save_total_limit)."
    ),
    r"Timed out waiting \d+ms|collective operation timeout": (
        "A collective operation timed out: another rank did not take part in time. Let all ranks do"
        " the same steps, or pass a longer timeout to init_process_group (ddp_timeout)."
    ),
    PEER_LOST: (
        "A communication error: another rank ended first, or the hosts cannot reach each other."
    ),
}
# torchrun's log begins here; only the lines before are the script's.
_LAUNCHER_LINE = r"^[WE]\d{4} \d\d:\d\d.*torch/distributed/elastic"
_SHELL_ERROR = r"^\S+: (?:line )?\d+: "
# mpirun's lines about the rank that ended the others.
_MPI_SIGNAL = r"process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)"
_MPI_EXIT = r"Process name: \[\[\d+,\d+\],(\d+)\]\s+Exit code: +(\d+)"
# Output of dying threads, tasks and multiprocessing's processes, which the script may not notice.
DEATH = r"(?:Exception in thread .+|Process \S+):$|Task exception was never retrieved$"
_FAULT_FRAME = r'  File "(.+)", line (\d+) in (.+)'  # as faulthandler writes it
_EXCEPTION_LINE = r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Exit|Interrupt)\b.*"


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
    """The output of a thread or a process of multiprocessing that died, or ""."""
    tail: Sequence[str] = field(default=())
    """The last lines of stderr, or of stdout if stderr is empty."""
    stdout_line: str = ""
    """The last line of stdout, if stderr is not empty."""


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
        return f"{shortened_head(self.head)}\n\n{self.rest}"[:_TOTAL_CHARS].rstrip() + "\n"


def shortened_head(head: str) -> str:
    """Shorten the longest lines of `head` until it fits the characters that are shown."""
    lines = head.split("\n")
    while (excess := len("\n".join(lines)) - SHOWN_CHARS) > 0:
        longest = max(range(len(lines)), key=lambda number: len(lines[number]))
        left = len(lines[longest]) - excess
        if left <= 8:  # Very many lines, none of them long.
            return head[:SHOWN_CHARS]
        lines[longest] = shorten(lines[longest], left)
    return "\n".join(lines)


class _Diagnosis:
    """Looks for the cause in how the process tree ended and in the recorded exceptions."""

    def __init__(self, ended: Ended, folder: Path) -> None:
        self.ended = ended
        records = sorted(map(Record.read, folder.glob("*.json")), key=lambda record: record.time)
        self.records, self.by_pid = records, {record.pid: record for record in records}
        output, signs = "\n".join(ended.tail), ((_MPI_SIGNAL, -1), (_MPI_EXIT, 1))
        matches = ((re.search(pattern, output), sign) for pattern, sign in signs)
        workers = (Worker(rank=m[1], exit_code=sign * int(m[2])) for m, sign in matches if m)
        self.mpi_worker = next(workers, None)
        self.tail = list(
            itertools.takewhile(lambda line: not re.match(_LAUNCHER_LINE, line), ended.tail)
        )
        # A rank of mpirun may have run on another host, without records here; mpirun may end before
        # it has written which rank ended.
        number = r"\d+" if self.mpi_worker is None else str(self.mpi_worker.rank)
        marks = (re.match(rf"\[1,{number}\]<stderr>:", line) for line in self.tail)
        lines = [mark.string[mark.end() :] for mark in marks if mark]
        if self.mpi_worker is not None or any(line.startswith("Traceback (") for line in lines):
            self.tail = lines or self.tail
        # The exception that ended the job, and the rank that a launcher saw fail first. A program
        # below the script may have failed without consequences: it counts if a checked command ran
        # it. Below a shell the last exception counts, among ranks the first.
        self.suspect: Record | None = None
        self.worker = self.mpi_worker
        if ended.pid in self.by_pid:
            self.suspect, self.worker = self._followed(self.by_pid[ended.pid])
        elif uppermost := [record for record in records if not self._outer(record)]:
            last = uppermost[-1]
            ranks = [record for record in uppermost if None not in (record.rank, last.rank)]
            ranks = [rank for rank in ranks if rank.ancestors[:1] == last.ancestors[:1]]
            if chosen := _first_cause(ranks or [last], self.mpi_worker):
                self.suspect, inner = self._followed(chosen)
                self.worker = inner or self.mpi_worker
        # An exception that left the script itself is certain to be the cause. A script or shell may
        # ignore one below it: then the exit code must be Python's for an exception, or nothing may
        # follow the traceback. A shell that complains about one of its own lines afterwards has
        # ignored it.
        is_certain = ended.stop_signal is not None or ended.pid in self.by_pid
        if self.suspect is not None and not is_certain:
            # The last traceback may be that of the program that ran this one as a checked command.
            running = (*self._outer(self.suspect), self.suspect)
            tracebacks = (record.lines_around(self.tail) for record in running)
            after = next((lines[1] for lines in tracebacks if lines is not None), None)
            went_on = any(re.search(_SHELL_ERROR, line) for line in after or ())
            if ended.is_script:
                is_certain = ended.exit_code == 1 and after == []
            else:
                is_certain = after == [] or (ended.exit_code == 1 and not went_on)
        self.record = self.suspect if is_certain else None
        if self.worker is not None and self.record is not None and self.record.rank is not None:
            seen = {str(worker.rank): worker for record in records for worker in record.workers}
            seen.setdefault(str(self.worker.rank), self.worker)
            rank = self.record.rank
            self.worker = seen.get(rank, Worker(rank=rank, exit_code=1))
        self.code = self.worker.exit_code if self.worker else ended.exit_code
        # Scripts, and libraries such as Hydra, print exceptions and then exit. Ranks print others'.
        self.printed = Raised("", "" if self.worker else "\n".join(self.tail)).innermost()

    def head(self) -> list[str]:
        """Return the first lines: the cause, its circumstances, and advice."""
        ended, record = self.ended, self.record
        lines = [line for line in self.tail if line.strip()]
        # Of processes without the hook, and of interrupts, which the hook does not record.
        prints_exception = (
            (not ended.is_script or ended.exit_code == -signal.SIGINT)
            and any(line.startswith("Traceback (most recent call last)") for line in lines)
            and re.match(_EXCEPTION_LINE, lines[-1])
        )
        head: list[str] = []
        if ended.stop_signal is not None:
            how = " before the training had ended."
            if ended.out_of_budget:
                how = "; the script did not end in time and was killed."
            head.append(f"Stopped by {_signal_name(ended.stop_signal)}{how}")
        if record is not None:
            head += record.lines
            around = record.lines_around(self.tail)
            if around and record.command and "\n" not in record.errors[-1].message:
                head += [shorten(line, MAX_ASIDE) for line in around[0][-2:]]
            below = [other for other in self.records if record.pid in other.ancestors]
            if record.pid == ended.pid and below:
                before, _ = self._followed(below[-1])
                head.append((before or below[-1]).earlier_line)
            elif not ended.is_script and self.worker is None and not self._outer(record):
                after = around[1][-3:] if around else ()
                head += [shorten(line, MAX_ASIDE) for line in after]
        elif prints_exception:
            head.append(shorten(lines[-1]))
        elif ended.stop_signal is None:
            head.append(self._status())
            fault = "\n".join(self.tail).partition("Current thread ")[2]
            frames = re.findall(_FAULT_FRAME, fault) if self.code < 0 else []
            if frames:
                script_frames = [frame for frame in frames if "/lib/python" not in frame[0]]
                return [*head, "  at {}:{} in {}".format(*[*script_frames, *frames][0])]
            # The last lines, without those of ranks that failed after the cause.
            tracebacks = mask("\n".join(other.traceback for other in self.records)).splitlines()
            printed = []
            # Ranks print the same line, and mpirun frames its lines by dashes.
            for line in dict.fromkeys(self.tail):
                rank, text = re.findall(r"^(?:\[rank(\d+)\]:? ?)?(.*)", line)[0]
                is_other = self.worker is not None and (
                    text in tracebacks or rank not in ("", str(self.worker.rank))
                )
                is_note = re.match(r"\[[IW]\d{4} ", line) is not None  # torch's own
                printed += [line] if line.strip(" -") and not (is_other or is_note) else []
            head += [shorten(line) for line in printed[-3:]]
            if ended.stdout_line:
                head.append(shorten(f"last line of stdout: {ended.stdout_line}", MAX_ASIDE))
            if self.suspect:
                head.append(self.suspect.earlier_line)
            elif self.printed.text and not any(self.printed.text in line for line in head):
                frames = [frame for frame in self.printed.frames if "/lib/python" not in frame[0]]
                location = "".join(" at {}:{} in {}".format(*frame) for frame in frames[-1:])
                head.append(shorten(f"printed before: {self.printed.text}{location}"))
        if ended.stop_signal is None:
            text = "\n".join(head)
            hints = [hint for pattern, hint in _HINTS.items() if re.search(pattern, text)]
            is_missing = "".join(hints[:1]).startswith("List the package")
            folder = record.script_dir if record and is_missing else ""
            unread = sorted(Path(folder).glob("*/**/requirements*.txt")) if folder else []
            if unread:
                hints = [f"{unread[0]} is not read: move it to the top of the code folder."]
            advice = transformers4.remedy(head[0])
            if record and record.script_dir:
                advice = hidden_module_remedy(Path(record.script_dir), head[0]) or advice
            head += [advice] if advice else hints[:1]
        return head

    def _followed(self, record: Record) -> tuple[Record | None, Worker | None]:
        """Return the record behind this one: of torchrun's rank, or of the command that was run."""

        def order(worker: Worker) -> tuple[bool, bool, float]:
            record = self.by_pid.get(worker.pid)
            # torchrun ends the others with SIGTERM once one has failed.
            ended_by_it = record is None and worker.exit_code == -signal.SIGTERM
            return (ended_by_it, record is not None and record.lost_a_peer, worker.time)

        if record.is_launcher:
            worker = min(record.workers, key=order, default=None)
            ranks = [other for other in self.records if other.ancestors[:1] == [record.pid]]
            first = _first_cause(ranks, worker)
            # Of a function that torch's launcher has run, such as that of notebook_launcher.
            has_traceback = record.errors[0].innermost() is not record.errors[0]
            alone = record if has_traceback and worker and worker.exit_code > 0 else None
            return (self._followed(first)[0] if first else alone), worker
        below = [other for other in self.records if other.was_run_by(record)]
        return self._followed(below[-1]) if below else (record, None)

    def _outer(self, record: Record) -> list[Record]:
        """Return the records of the processes above, the outermost first."""
        return [self.by_pid[pid] for pid in reversed(record.ancestors) if pid in self.by_pid]

    def _status(self) -> str:
        """Describe the exit code or signal of a script without a known exception."""
        if self.code >= 0:
            ending = "." if self.suspect or self.printed.text else " and no exception."
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


def diagnose(ended: Ended, folder: Path) -> Failure:
    """Describe the outcome of a job. The hook's records are in `folder`."""
    diagnosis = _Diagnosis(ended, folder)
    code, record = diagnosis.code, diagnosis.record
    worker, records = diagnosis.worker, diagnosis.records
    rank = record.rank if record and record.rank else worker and worker.rank
    details = [f"exit code {code}" if code >= 0 else _signal_name(-code)]
    details += [f"rank {rank}"] if rank is not None else []
    details += [f"host {record.host}"] if record and record.host else []
    rest = [record.traceback] if record else []
    for other in records:
        if other is not record and not other.is_launcher:
            where = f"process {other.pid}" if other.rank is None else f"rank {other.rank}"
            rest.append(f"{where}: {other.headline}")
    rest += ["Last lines of output:", *diagnosis.tail] if diagnosis.tail else []
    exit_code = code if ended.exit_code == 1 else ended.exit_code
    return Failure(
        exit_code=128 - exit_code if exit_code < 0 else exit_code,
        head=mask("\n".join([*diagnosis.head(), f"({', '.join(details)})"])),
        rest=mask("\n".join(rest)),
        raised=record is not None,
        is_consequence=record is not None and record.lost_a_peer,
        is_stopped=ended.stop_signal is not None and not ended.out_of_budget,
        last_exception=records[-1].headline if records else ended.death,
    )


def _first_cause(ranks: Sequence[Record], worker: Worker | None) -> Record | None:
    """Return the first rank that did not fail because of another one.

    It is None if that is `worker`, which has no record: it ended by a signal or an exit code.
    """
    has_record = worker is None or str(worker.rank) in [rank.rank for rank in ranks]
    # torchrun notes whole seconds; it ends the other ranks, which may then raise anything.
    end = worker.time + 1 if worker and worker.time and not has_record else math.inf
    causes = [rank for rank in ranks if not rank.lost_a_peer and rank.time < end]
    return next(iter(causes or (ranks if has_record else ())), None)


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return f"{signal.Signals(number).name} ({signal.strsignal(number)})"
    return f"signal {number}"
