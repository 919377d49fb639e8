"""What the steps of a training may depend on, for every task: not on interruptions, processes or
packing."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support import tasks
from tests.support.job_tree import clean_environ
from tests.support.ports import free_port
from tests.support.preloading import PRELOADED, STOP_AT_LINE, WITHOUT_REPORT
from tests.support.tasks import JOBS, SmallJob

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(1200)]
STOPPED = 75
STEPS = 8
"""Two epochs, of which the first ends with a smaller step."""
USUAL = (
    "--max_steps", str(STEPS), "--logging_steps", "1", "--eval_strategy", "no", "--bf16", "False",
)  # fmt: skip
RATE = 1e-2
BY_GRADIENT = ("--optim", "sgd", "--lr_scheduler_type", "constant", "--warmup_ratio", "0",
               "--lr", str(RATE), "--max_grad_norm", "1e9")  # fmt: skip
"""A weight is moved by its gradients alone. Adam would make a step of a rounding error where a
gradient is 0 (the biases of keys)."""


@dataclass
class Training:
    """A training by code/train.py, below a folder."""

    base: Path
    argv: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    log: str = ""

    def start(self, processes: int = 1, **more: str) -> None:
        """Run it, by so many processes; keep what rank 0 prints, and the exit codes."""
        world = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes),
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}  # fmt: skip
        running = []
        for rank in range(processes):
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), **world}
            environ = {**self.environ, **(ranks if processes > 1 else {}), **more}
            running.append(subprocess.Popen(
                [sys.executable, str(PRELOADED / "train.py"), *self.argv],
                env=clean_environ(SAGEMAKER_BASE_DIR=str(self.base), **environ),
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            ))  # fmt: skip
        self.log = "".join(each.communicate(timeout=1000)[0] for each in running)
        self.codes = {each.returncode for each in running}

    def finish(self, processes: int = 1) -> Training:
        """Run it to its end."""
        self.start(processes)
        assert self.codes == {0}, self.log
        return self

    def stop(self, line: str, step: int) -> None:
        """Run it until it prints a line, when it gets SIGTERM and ends the step."""
        self.start(**{STOP_AT_LINE: line})
        assert self.codes == {STOPPED}, self.log
        assert f"stopped at step {step} of {STEPS}" in self.log

    @property
    def files(self) -> dict[str, bytes]:
        """The bytes of the weights."""
        files = (self.base / "model").glob("*.safetensors")
        return {file.name: file.read_bytes() for file in files}

    def logged(self, name: str) -> list[float]:
        """Return a value of each step."""
        found = re.findall(
            rf"^metric step=\d+ \{{'loss'.*'{name}': ([^,]+),", self.log, re.MULTILINE
        )
        return [float(value) for value in found]

    @property
    def losses(self) -> list[float]:
        found = re.findall(r"^metric step=\d+ \{'loss': ([^,]+),", self.log, re.MULTILINE)
        return [float(loss) for loss in found]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        (file,) = (self.base / "model").glob("*.safetensors")
        return load_file(file)


@dataclass(frozen=True)
class Start:
    """A job's channel and its models, with dropout and without."""

    job: SmallJob
    base: Path
    variables: Mapping[str, str]

    def training(self, name: str, dropout: float, *argv: str) -> Training:
        model = self.base / f"model-{dropout}"
        if not model.exists():
            self.job.model(model, dropout)
        others = ("do_predict", "epochs", "lr")
        settings = {k: v for k, v in self.job.hyperparameters.items() if k not in others}
        given = [word for name, value in settings.items() for word in (f"--{name}", value)]
        environ = {**self.variables, **WITHOUT_REPORT, "SM_CHANNEL_TRAIN": str(self.base / "train")}
        words = ("--task", self.job.task, "--model_name_or_path", str(model), *USUAL, *given, *argv)
        return Training(self.base / name, words, environ)


@pytest.fixture(scope="module", params=JOBS)
def start(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    preloaded: Mapping[str, str],
) -> Start:
    job, base = JOBS[request.param], tmp_path_factory.mktemp("start")
    tasks.write(base / "train", job.rows(tasks.TRAIN_ROWS))
    return Start(job, base, preloaded)


def test_a_stopped_and_resumed_training_ends_with_the_same_bytes(start: Start) -> None:
    argv = ("--batch_size", str(tasks.BATCH), "--lr", "3e-3")
    whole = start.training("undisturbed", 0.1, *argv).finish()
    assert len(whole.losses) == STEPS
    stopped = start.training("stopped", 0.1, *argv)
    step = 4
    if start.job.task == "text-classification":
        # At every step from the second on.
        stopped.stop("metric step=1 {'loss'", 2)
        for step in range(3, STEPS):
            stopped.stop("resuming from", step)
            assert stopped.losses == whole.losses[step - 1 : step]
    else:
        stopped.stop(f"metric step={step - 1} {{'loss'", step)
        assert stopped.losses == whole.losses[:step]
    stopped.finish()
    assert f"checkpoint-{step}" in stopped.log
    assert stopped.losses == whole.losses[step:]
    assert whole.files and stopped.files == whole.files


def test_two_processes_give_the_weights_of_one(start: Start) -> None:
    one, two = (
        start.training(f"by {processes}", 0.0, "--batch_size", str(tasks.BATCH // processes),
                       *BY_GRADIENT).finish(processes)
        for processes in (1, 2)
    )  # fmt: skip
    assert "cpu, 2 processes" in two.log
    same(two, one, start.job)


def test_packed_and_padded_batches_give_equal_losses_and_gradients(start: Start) -> None:
    # All samples in each step: packing chooses which samples share one.
    argv = ("--batch_size", "512", *BY_GRADIENT)
    if not start.job.packs:
        refused = start.training("packed", 0.0, *argv, "--packing", "True")
        refused.start()
        assert refused.codes == {1}
        assert "HyperparameterError: Hyperparameter packing has value True" in refused.log
        return
    packed, padded = (
        start.training(f"packing {value}", 0.0, *argv, "--packing", value).finish()
        for value in ("True", "False")
    )
    assert " packed into " in packed.log
    assert " packed into " not in padded.log
    same(padded, packed, start.job)


def same(found: Training, expected: Training, job: SmallJob) -> None:
    """Check losses and, by how far they move the weights, gradients."""
    assert len(expected.losses) == STEPS
    assert found.losses == pytest.approx(expected.losses, rel=job.tolerance)
    norms = expected.logged("grad_norm")
    assert found.logged("grad_norm") == pytest.approx(norms, rel=job.tolerance)
    weights, wanted = found.weights, expected.weights
    assert weights.keys() == wanted.keys()
    apart = sum(float((weights[name] - wanted[name]).square().sum()) for name in wanted) ** 0.5
    assert apart < job.tolerance * RATE * sum(norms)
