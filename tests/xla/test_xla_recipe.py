"""The recipe on torch-xla: compilations, checkpoints, resuming, and results compared with PyTorch's."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import CODE
from tests.support.xla_job import Job

GRAPHS = 3
"""Graphs of a training of new shapes: its first step, which creates the optimizer's state, the other
steps, and a batch of an evaluation."""
Data = Callable[..., Path]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, write_data: Data) -> Job:
    """A training in this process, after which another one compiles only what is new."""
    job = Job(tmp_path_factory.mktemp("warm"), tiny_model, write_data(50), epochs=1)
    job.run()
    return job


@pytest.mark.xla
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_more_steps_epochs_and_data_compile_nothing_more(
    tmp_path: Path, tiny_model: Path, write_data: Data, warm: Job
) -> None:
    # 14 samples a step; then other data, in blocks of another shape, whose last step has one text.
    few = Job(tmp_path / "few", tiny_model, write_data(30), epochs=1, batch_size=14).run()
    more = Job(tmp_path / "more", tiny_model, write_data(90, times=2), epochs=4).run()
    assert (few, more) == (GRAPHS, GRAPHS)


@pytest.mark.xla
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.long
def test_a_graph_for_each_length_would_be_seen(
    tmp_path: Path, tiny_model: Path, write_data: Data, warm: Job
) -> None:
    data = write_data(30)
    longer = write_data(30, times=2) / "train.jsonl"
    with (data / "train.jsonl").open("a") as stream:
        stream.write("\n" + longer.read_text())
    count = Job(tmp_path, tiny_model, data, packing=False).run()
    assert count > GRAPHS


@pytest.mark.xla
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
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


@pytest.mark.xla
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
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


@pytest.mark.xla
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
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


@pytest.mark.xla
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_cpu_cannot_be_asked_for_beside_torch_xla(tmp_path: Path, tiny_model: Path) -> None:
    from recipe.errors import HyperparameterError

    with pytest.raises(HyperparameterError, match="USE_TORCH_XLA=0"):
        Job(tmp_path, tiny_model, tmp_path, use_cpu=True).run()


@pytest.mark.xla
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_processes_that_would_train_apart_do_not_start(
    tmp_path: Path, tiny_model: Path, write_data: Callable[..., Path]
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
