"""Two and four processes on torch-xla train as one does on the full batch.

Of the product this runs: the process group, the check before training, each process's share of a
batch and its weight in the loss, accelerate's sum of gradients before clipping, the gathered
evaluation, checkpoints, and who writes the model. Not run, as torch-xla's CPU device has no
collectives: XLA's own all-reduce and all-gather, in whose place stands gloo (`gloo_world`), and
what Neuron's runtime does with ranks. Each process computes by XLA.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import CODE
from tests.support.xla_job import Job

pytestmark = [pytest.mark.xla, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
WORLD = Path(__file__).with_name("gloo_world.py")
BATCH = 8


def arguments(processes: int) -> dict[str, Any]:
    # Adam would make a step of a rounding error where the gradient is 0 (keys' biases).
    return {"batch_size": BATCH // processes, "epochs": 1, "adam_epsilon": 1e-3}


def start(job: Job, summed: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
    command += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
    return subprocess.run(
        [*command, str(WORLD), summed, str(CODE / "train.py"), *job.argv],
        env={**os.environ, **job.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.fixture(scope="module")
def data(write_data: Callable[..., Path]) -> Path:
    return write_data(51)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, still_model: Path, data: Path) -> Job:
    job = Job(tmp_path_factory.mktemp("alone"), still_model, data, **arguments(1))
    job.run()
    return job


@pytest.mark.parametrize(
    ("processes", "summed"),
    [
        (2, "all"),
        pytest.param(2, "start", marks=pytest.mark.long),
        pytest.param(4, "all", marks=pytest.mark.long),
    ],
)
def test_processes_train_as_one_does_if_gradients_are_summed(
    tmp_path: Path, still_model: Path, data: Path, alone: Job, processes: int, summed: str
) -> None:
    job = Job(tmp_path, still_model, data, **arguments(processes))
    done = start(job, summed, processes)
    assert done.returncode == 0, done.stderr
    assert f"device: xla, {processes} process(es)" in done.stdout
    expected = alone.weights
    found = job.weights
    furthest = max(float((found[name] - weight).abs().max()) for name, weight in expected.items())
    if summed != "all":
        assert furthest > 1e-3
        return
    assert furthest < 1e-5
    for name in ("eval_loss", "eval_accuracy", "train_loss"):
        assert job.metrics[name] == pytest.approx(alone.metrics[name], abs=1e-4), name


def test_processes_that_would_train_apart_do_not_start(
    tmp_path: Path, still_model: Path, data: Path
) -> None:
    done = start(Job(tmp_path, still_model, data, **arguments(2)), "nothing")
    assert done.returncode != 0
    assert "WORLD_SIZE is 2, but a sum over all processes has 1 term(s)" in done.stderr
    assert not (tmp_path / "model").exists()
