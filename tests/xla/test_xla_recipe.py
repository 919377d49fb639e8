"""The recipe on torch-xla's CPU device: compilations, checkpoints, resuming, and results compared with
PyTorch's. `make test-xla` runs this, with PJRT_DEVICE=CPU."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import write
from tests.support.paths import CODE
from tests.support.words import reviews

sys.path.insert(0, str(CODE))
pytestmark = [pytest.mark.xla, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
GRAPHS = 3
"""Graphs of a training of new shapes: its first step, which creates the optimizer's state, the other
steps, and a batch of an evaluation."""
Data = Callable[..., Path]


class Job:
    """Trainings of one job, in this process: what torch-xla compiled once it does not again."""

    def __init__(self, base: Path, model: Path, data: Path, **hyperparameters: Any) -> None:
        self.base = base
        self.environ = {"SAGEMAKER_BASE_DIR": str(base), "SM_CHANNEL_TRAIN": str(data)}
        values = {"model_id": model, "batch_size": 8, "lr": 5e-3, "logging_steps": 1}
        self.argv = [f"--{key}={value}" for key, value in {**values, **hyperparameters}.items()]

    def run(self) -> int:
        """Train; the number of graphs that were compiled for it."""
        from recipe import arguments, paths
        from recipe.runtime import xla
        from recipe.training import run

        before, _ = xla.compiled()
        where = paths.from_environment({**os.environ, **self.environ})
        run.run(arguments.parse(self.argv), where, {**os.environ, **self.environ})
        return xla.compiled()[0] - before

    @property
    def weights(self) -> dict[str, Any]:
        from safetensors.torch import load_file

        return load_file(self.base / "model" / "model.safetensors")

    @property
    def metrics(self) -> dict[str, float]:
        actual: dict[str, float] = json.loads((self.base / "output/data/metrics.json").read_text())
        return actual


@pytest.fixture(scope="module")
def write_data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """A function of a number of rows, and how long they are, to a channel's folder."""

    def write_rows(count: int, times: int = 1) -> Path:
        rows = [
            {"text": " ".join([text] * times), "label": label} for text, label in reviews(count)
        ]
        return write(tmp_path_factory.mktemp("data"), rows)

    return write_rows


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, write_data: Data) -> Job:
    """A training in this process, after which another one compiles only what is new."""
    job = Job(tmp_path_factory.mktemp("warm"), tiny_model, write_data(50), epochs=1)
    job.run()
    return job


def test_more_steps_epochs_and_data_compile_nothing_more(
    tmp_path: Path, tiny_model: Path, write_data: Data, warm: Job
) -> None:
    # 14 samples a step; then other data, in blocks of another shape, whose last step has one text.
    few = Job(tmp_path / "few", tiny_model, write_data(30), epochs=1, batch_size=14).run()
    more = Job(tmp_path / "more", tiny_model, write_data(90, times=2), epochs=4).run()
    assert (few, more) == (GRAPHS, GRAPHS)


def test_a_stopped_training_goes_on_to_the_same_weights(
    tmp_path: Path,
    tiny_model: Path,
    write_data: Data,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from recipe.training import progress
    from recipe.training.interruptions import EXIT_CODE

    def job(name: str) -> Job:
        return Job(tmp_path / name, tiny_model, data, epochs=3)

    data = write_data(50)
    whole, stopped = job("whole"), job("stopped")
    whole.run()
    losses = re.findall(r"metric step=(\d+) \{('loss': [^,}]+)", capsys.readouterr().out)
    assert len(losses) == 18

    class StopsAtEight(progress.MetricLines):
        def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            super().on_log(args, state, control, **more)
            if state.global_step == 7 and not (tmp_path / "asked").exists():
                (tmp_path / "asked").touch()
                os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("recipe.training.run.MetricLines", StopsAtEight)
    try:
        with pytest.raises(SystemExit) as left:
            stopped.run()
        compiled = stopped.run()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert left.value.code == EXIT_CODE
    output = capsys.readouterr().out
    assert f"resuming from {stopped.base}/checkpoints/checkpoint-8" in output
    assert re.findall(r"metric step=(\d+) \{('loss': [^,}]+)", output) == losses
    assert compiled == 0
    expected = whole.weights
    assert set(stopped.weights) == set(expected)
    for name, weight in stopped.weights.items():
        assert (weight == expected[name]).all(), name


def test_steps_are_those_of_eager_pytorch(
    tmp_path: Path, still_model: Path, write_data: Data
) -> None:
    from safetensors.torch import load_file

    start = load_file(still_model / "model.safetensors")
    same = {"data": write_data(60), "max_steps": 20, "bf16": False, "lr": 1e-3, "epochs": 3}
    on_xla = Job(tmp_path / "xla", still_model, **same)
    on_xla.run()
    eager = Job(tmp_path / "eager", still_model, **same)
    done = subprocess.run(
        [sys.executable, str(CODE / "train.py"), *eager.argv],
        env={**os.environ, **eager.environ, "USE_TORCH_XLA": "0"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "device          cpu" in done.stdout
    expected = eager.weights
    moved = [expected[f"bert.{name}"] - weight for name, weight in start.items()]
    assert max(float(change.abs().max()) for change in moved) > 5e-3
    for name, weight in on_xla.weights.items():
        assert float((weight - expected[name]).abs().max()) < 1e-4, name
    for name in ("eval_loss", "eval_accuracy"):
        assert on_xla.metrics[name] == pytest.approx(eager.metrics[name], abs=1e-4)


def test_bfloat16_is_autocast(tmp_path: Path, still_model: Path, write_data: Data) -> None:
    same = {"data": write_data(20), "max_steps": 1, "lr": 1e-9}
    losses = []
    for bf16 in (False, True):
        job = Job(tmp_path / str(bf16), still_model, bf16=bf16, **same)
        job.run()
        assert {weight.dtype.itemsize for weight in job.weights.values()} == {4}
        losses.append(job.metrics["eval_loss"])
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_the_cpu_cannot_be_asked_for_beside_torch_xla(tmp_path: Path, tiny_model: Path) -> None:
    from recipe.errors import HyperparameterError

    with pytest.raises(HyperparameterError, match="USE_TORCH_XLA=0"):
        Job(tmp_path, tiny_model, tmp_path, use_cpu=True).run()


def test_processes_that_would_train_apart_do_not_start(
    tmp_path: Path, tiny_model: Path, write_data: Data
) -> None:
    job = Job(tmp_path, tiny_model, write_data(20), epochs=1)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    done = subprocess.run(
        [*command, str(CODE / "train.py"), *job.argv],
        env={**os.environ, **job.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode != 0
    assert "WORLD_SIZE is 2, but a sum over all processes has 1 term(s)" in done.stderr
    assert not (tmp_path / "model").exists()
