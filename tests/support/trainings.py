"""Trainings in processes: run once; or killed, stopped and started again."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.paths import CODE

STEPS = 100
"""Of an epoch; there are two."""


def train(
    base: Path,
    channels: Mapping[str, Path],
    *arguments: str,
    processes: int = 1,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run code/train.py in a process of its own below `base`, as an image does."""
    # What a training in this process has set for itself is not for one in another.
    own = ("SM_", "SAGEMAKER_", "TENSORBOARD_", "MLFLOW_", "WANDB_DIR", "WANDB_X_")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(own)}
    variables = {f"SM_CHANNEL_{name.upper()}": str(path) for name, path in channels.items()}
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
        launcher += ["--master_port", "0", "--rdzv_backend", "c10d"]
        launcher += ["--rdzv_endpoint", "localhost:0"]
    return subprocess.run(
        [*launcher, str(CODE / "train.py"), *arguments],
        env={
            **inherited,
            "HF_HUB_OFFLINE": "1",
            # Threads that wait for each other are slow where tests share the cores.
            "OMP_NUM_THREADS": "1",
            "SAGEMAKER_BASE_DIR": str(base),
            **variables,
            **(environment or {}),
        },
        capture_output=True,
        text=True,
        timeout=540,
    )


class Job:
    """A training that is started several times."""

    def __init__(
        self, base: Path, model: Path, data: Path, processes: int = 1, more: Sequence[str] = ()
    ) -> None:
        self.base, self.processes = base, processes
        self.environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "SAGEMAKER_BASE_DIR": str(base),
            "SM_CHANNEL_TRAIN": str(data),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        self.arguments = ["--model_name_or_path", str(model), "--epochs", "2", "--lr", "1e-3"]
        self.arguments += ["--batch_size", str(8 // processes), "--logging_steps", "1"]
        self.arguments += ["--save_steps", "7", "--save_strategy", "steps", "--max_length", "32"]
        self.arguments += more

    @property
    def checkpoints(self) -> Path:
        return self.base / "checkpoints"

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable]
        if self.processes > 1:
            command += ["-m", "torch.distributed.run", "--nproc_per_node", str(self.processes)]
            command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
        return subprocess.Popen(
            [*command, str(CODE / "train.py"), *self.arguments, *arguments],
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def finish(self, *arguments: str) -> str:
        started = self.start(*arguments)
        output, errors = started.communicate(timeout=540)
        assert started.returncode == 0, errors
        return output

    def interrupt(self, number: signal.Signals, step: int) -> tuple[int, str]:
        """Send a signal once a step is logged; return the exit code of a rank and the output.

        SIGKILL waits for a checkpoint as well: on a busy host writing one in the background takes
        longer than a step of a tiny model.
        """
        started = self.start()
        assert started.stdout is not None
        # With a small pipe the training waits for this reader. Otherwise it might end before the
        # signal is sent.
        fcntl.fcntl(started.stdout, fcntl.F_SETPIPE_SZ, 4096)
        output = ""
        for line in started.stdout:
            output += line
            logged = re.match(r"metric step=(\d+) ", line)
            is_saved = number != signal.SIGKILL or any(self.checkpoints.glob("checkpoint-*"))
            if logged and int(logged[1]) >= step and is_saved:
                break
        ranks = self._ranks(started.pid)
        if number == signal.SIGKILL:
            # As a container ends: everything at once. torchrun's ranks are sessions of their own.
            os.killpg(started.pid, number)
        for rank in ranks:
            # As amphora does: to the ranks, not to torchrun.
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, number)
        rest, errors = started.communicate(timeout=540)
        code = started.returncode
        if self.processes > 1 and code > 0:
            code = int(re.findall(r"exitcode\s*: (\d+)", errors)[0])
        return code, output + rest

    def _ranks(self, pid: int) -> list[int]:
        if self.processes == 1:
            return [pid]
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in children]

    def weights(self) -> bytes:
        return (self.base / "model" / "model.safetensors").read_bytes()
