"""Trainings killed (KILL) and stopped (TERM) at random moments until they end.

Most starts are forks of this process, which has imported the recipe: so a start costs a fraction of
a second, and the moments fall into reading data, steps, evaluations, checkpoints and the writing of
the model. One in `WHOLE` is `amphora train` with everything below it, as a container has it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from ordeal.common import (
    ROOT,
    Trial,
    clean_environ,
    configure,
    free_port,
    kill_tree,
    made_elsewhere,
    reviews,
    send,
    start,
)

WEIGHTS = "a disturbed training ends with the undisturbed one's weights, bit for bit"
CHOSEN = "only whole checkpoints are resumed from"
STOPPED = "TERM ends a training within 20 s, with exit code 75 or its own end"
MODEL = "a model folder is never there in part after a success"
PROMISES = (WEIGHTS, CHOSEN, STOPPED, MODEL)

BUDGET = 20.0
WHOLE = 20
WEIGHTS_SHARDED = "FSDP2"
ROWS_SHARDED = "sharded rows"
HOST_WITHOUT_ROWS = "sharded rows, a host without"
TWO_ON_A_HOST = "sharded rows, two processes a host"
ARE_HOSTS = (ROWS_SHARDED, HOST_WITHOUT_ROWS, TWO_ON_A_HOST)
CASES = (
    *((processes, "") for processes in (1, 2, 3, 4)),
    *((processes, WEIGHTS_SHARDED) for processes in (2, 3, 4)),
    *((processes, ROWS_SHARDED) for processes in (2, 3, 4)),
    *((processes, HOST_WITHOUT_ROWS) for processes in (2, 3, 4)),
    (4, TWO_ON_A_HOST),
)
"""Processes, and how they share weights or rows (mostly each is a host with rows of its own)."""


class Job:
    """Starts of one and the same training on one tree."""

    def __init__(self, base: Path, model: Path, data: Path, processes: int, how: str) -> None:
        self.base, self.processes, self.data, self.how = base, processes, data, how
        self.log = base / "log.txt"
        base.mkdir(parents=True)
        self.hyperparameters = {
            "model_name_or_path": str(model), "epochs": 2, "lr": 1e-3, "max_length": 32,
            "batch_size": 8 // processes, "logging_steps": 1, "save_steps": 2,
        }  # fmt: skip
        if how == WEIGHTS_SHARDED:
            self.hyperparameters["mp_parameters"] = f"partitions={processes}"

    def fork(self) -> list[int]:
        """Its processes, as torchrun would start them."""
        port = str(free_port())
        variables = {
            "SAGEMAKER_BASE_DIR": str(self.base), "SM_CHANNEL_TRAIN": str(self.data),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONUNBUFFERED": "1",
            "WORLD_SIZE": str(self.processes), "LOCAL_WORLD_SIZE": str(self.processes),
        }  # fmt: skip
        if self.processes == 1:
            variables = {k: v for k, v in variables.items() if k[:4] not in ("MAST", "WORL")}
        return [self._fork(variables, rank) for rank in range(self.processes)]

    def _fork(self, variables: dict[str, str], rank: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.setsid()
            out = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(out, 1)
            os.dup2(out, 2)
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if self.processes > 1 else {}
            if self.how in ARE_HOSTS:
                ranks |= self._own_rows(rank)
            environ = clean_environ(**{**variables, **ranks})
            os.environ.clear()
            os.environ.update(environ)
            import tqdm

            import train

            # Its lock is one semaphore for all forks: a killed one would hold it for ever.
            tqdm.tqdm.set_lock(threading.RLock())
            train.main(
                [word for k, v in self.hyperparameters.items() for word in (f"--{k}", f"{v}")]
            )
            code = 0
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def _own_rows(self, rank: int) -> dict[str, str]:
        """A process's variables, and its host's part of the rows; parts are not equal."""
        of_each = 2 if self.how == TWO_ON_A_HOST else 1
        host, hosts = rank // of_each, self.processes // of_each
        header, *rows = self.data.read_text().splitlines()
        with_rows = hosts - (self.how == HOST_WITHOUT_ROWS)
        shares = [max(0, number % (with_rows + 1) - 1) for number in range(len(rows))]
        own = [row for row, share in zip(rows, shares, strict=True) if share == host]
        part = self.base / f"part-{host}"
        part.mkdir(exist_ok=True)
        if own:
            whole = self.base / f"part-{host}.of-{rank}"
            whole.write_text("\n".join([header, *own, ""]))
            whole.replace(part / "train.csv")  # the host's other process may read it
        channels = {"train": {"S3DistributionType": "ShardedByS3Key"}}
        return {
            "SM_CHANNEL_TRAIN": str(part), "SM_INPUT_DATA_CONFIG": json.dumps(channels),
            "SM_HOSTS": json.dumps([f"algo-{each + 1}" for each in range(hosts)]),
            "SM_CURRENT_HOST": f"algo-{host + 1}",
            "LOCAL_RANK": str(rank % of_each), "LOCAL_WORLD_SIZE": str(of_each),
        }  # fmt: skip

    def whole(self) -> list[int]:
        """`amphora train`, and what it starts."""
        configure(self.base, self.hyperparameters, inputdataconfig={"train": {}})
        channel = self.base / "input" / "data" / "train"
        channel.mkdir(parents=True, exist_ok=True)
        (channel / "train.csv").write_bytes(self.data.read_bytes())
        environ = {"AMPHORA_NPROC_PER_NODE": str(self.processes)}
        return [start(self.base, "train", self.log, **environ).pid]

    def weights(self) -> bytes:
        return (self.base / "model" / "model.safetensors").read_bytes()


def run(trial: Trial) -> None:
    """Jobs of 1 to 4 processes, also with shards, until there have been enough kills."""
    sys.path.insert(0, str(ROOT / "code"))
    import recipe.training.run  # noqa: F401  # before the forks

    model = made_elsewhere(trial.folder / "pretrained")
    data = reviews(trial.folder / "reviews.csv", 180)
    wanted = 6 if trial.short else 220
    cases = list(CASES)
    trial.random.shuffle(cases)
    references: dict[tuple[int, str], tuple[Job, float]] = {}
    round_ = 0
    while _disturbed(trial) < wanted and trial.has_time():
        case = processes, how = cases[round_ % len(cases)]
        if case not in references:
            name = f"whole-{processes}-{how.replace(',', '').replace(' ', '-')}"
            job = Job(trial.folder / name, model, data, processes, how)
            began = time.monotonic()
            codes = [_code(pid, 300) for pid in job.fork()]
            assert codes == [0] * processes, job.log.read_text()[-3000:]
            references[case] = (job, time.monotonic() - began)
        reference, seconds = references[case]
        job = Job(trial.folder / f"job-{round_}", model, data, processes, how)
        _torment(trial, job, seconds, wanted)
        trial.count(f"trainings by {processes} {how}".strip())
        trial.check(WEIGHTS, job.weights() == reference.weights(), job.base)
        there = {path.name for path in (job.base / "model").iterdir()}
        expected = {path.name for path in (reference.base / "model").iterdir()}
        trial.check(MODEL, there == expected, (there, expected))
        round_ += 1
    trial.figure("trainings", round_)


def _torment(trial: Trial, job: Job, seconds: float, wanted: int) -> None:
    """Interrupt a job again and again; each time it may live a little longer, so that it ends."""
    patience = seconds * 0.7
    while True:
        # `amphora train` on one machine is one host.
        is_whole = trial.random.randrange(WHOLE) == 0 and job.how not in ARE_HOSTS
        number = trial.random.choice((signal.SIGKILL, signal.SIGTERM))
        pids = job.whole() if is_whole else job.fork()
        disturbs = _disturbed(trial) < wanted
        if disturbs:
            patience *= 1.05
            time.sleep(trial.random.uniform(0, patience + (5 if is_whole else 0)))
            disturbs = not any(map(_has_ended, pids))
        codes = _end(trial, job, pids, number) if disturbs else [_code(pid, 300) for pid in pids]
        text = _log_of(trial, job)
        if not any(codes):
            return
        assert disturbs, (codes, text[-3000:])


def _disturbed(trial: Trial) -> int:
    return sum(trial.figures.get(name, 0) for name in ("KILL", "TERM"))


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(trial: Trial, job: Job, pids: list[int], number: signal.Signals) -> list[int]:
    """Kill or stop a start; the exit codes."""
    trial.count(number.name[3:])
    if any((job.base / "checkpoints").glob(".writing-*")):
        trial.count("while a checkpoint was written")
    for pid in pids:
        kill_tree(pid) if number == signal.SIGKILL else send(pid, number)
    began = time.monotonic()
    codes = [_code(pid, BUDGET * 3) for pid in pids]
    took = time.monotonic() - began
    if number == signal.SIGTERM:
        longest = max(trial.figures.get("longest stop, s", 0), round(took, 1))
        trial.figure("longest stop, s", longest)
        # Before it listens, a process ends by the signal itself; it has nothing to save then.
        fine = set(codes) <= {0, 75, -15, 143}
        trial.check(STOPPED, took < BUDGET and fine, (took, codes, job.log.read_text()[-1500:]))
    return codes


def _log_of(trial: Trial, job: Job) -> str:
    """What the last start printed, with its choice of a checkpoint looked at."""
    text = job.log.read_text(errors="replace") if job.log.exists() else ""
    for name in re.findall(r"resuming from \S*/(checkpoint-\d+)", text):
        trial.check(CHOSEN, True, name)
    unusable = re.findall(r"^.*(?:is damaged|CheckpointError).*$", text, re.MULTILINE)
    trial.check(CHOSEN, not unusable, unusable[:3])
    job.log.replace(job.base / f"log-{len(list(job.base.glob('log-*')))}.txt")
    return text


def _code(pid: int, seconds: float) -> int:
    """The exit code of a child, which is killed after so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    kill_tree(pid)
    os.waitpid(pid, 0)
    return -99
