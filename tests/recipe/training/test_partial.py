"""A training that is stopped leaves the model that it had: servable, and marked as partial.

tests/contract stops every task; test_resume.py two processes.
"""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from recipe.errors import OutputError
from recipe.tasks import base
from recipe.training.interruptions import EXIT_CODE, Interruptions
from tests.support.jobs import QUICK, SHARDED, Job, write
from tests.support.words import reviews

ARGV = ("--batch_size", "8", "--epochs", "1", "--lr", "1e-3", "--bf16", "False")


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path) -> Job:
    """A job of eight steps."""
    rows = [{"text": text, "label": label} for text, label in reviews(64)]
    channels = {
        "train": write(tmp_path / "in", rows),
        "test": write(tmp_path / "test", rows[:16], "test"),
    }
    return Job(tmp_path, channels, ("--model_id", str(tiny_model), *ARGV))


def stop(job: Job, *argv: str, step: int = 2) -> None:
    """Train in this process, which gets SIGTERM after a step."""
    usual = Interruptions.on_step_end

    def on_step_end(self: Interruptions, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        usual(self, args, state, control, **more)

    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.MonkeyPatch.context() as patched, pytest.raises(SystemExit) as stopped:
            patched.setattr(Interruptions, "on_step_end", on_step_end)
            job.run_here(*argv)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stopped.value.code == EXIT_CODE


def test_the_best_is_left_if_the_best_is_kept(job: Job) -> None:
    # A step without effect is as good as the one before it: the first evaluation is the best.
    argv = "--epochs 2 --lr 1e-20 --load_best_model_at_end True --eval_strategy steps "
    argv += "--eval_steps 2 --save_strategy steps --save_steps 2"
    stop(job, *argv.split(), step=5)
    assert job.metrics["partial"] == {"step": 2, "stopped_at": 5, "of_steps": 16}
    assert "eval_loss" in job.metrics
    best = load_file(job.checkpoints / "checkpoint-2" / "model.safetensors")
    assert all(torch.equal(weight, best[key]) for key, weight in job.weights.items())


def test_without_checkpoints_the_model_is_left_too(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    stop(job, "--save_strategy", "no")
    output = capsys.readouterr().out
    assert "nothing is saved: save_strategy=no" in output
    assert "A partial model: training stopped after step 2 of 8, and the weights" in output
    assert job.weights


def test_a_model_that_cannot_be_written_is_absent_and_the_job_resumes(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def save(self: Any, model: Any, weights: Any, tokenizer: Any, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OutputError("The disk is full.")

    monkeypatch.setattr(base.Task, "save", save)
    stop(job)
    assert "warning: no partial model is left: The disk is full." in capsys.readouterr().out
    assert list(job.model.iterdir()) == []
    assert (job.checkpoints / "checkpoint-2").is_dir()


@pytest.mark.heavy
def test_two_processes_with_shards_leave_one_model(job: Job, preloaded: Mapping[str, str]) -> None:
    job.environ = {**preloaded, **QUICK}
    argv = ("--epochs", "6", "--logging_steps", "1", *SHARDED)
    job.interrupt("metric step=2 {'loss'", *argv, processes=2)
    assert job.codes == {EXIT_CODE}, job.log + job.errors
    assert job.log.count("A partial model: training stopped after step") == 1
    kept = job.checkpoints / f"checkpoint-{job.metrics['partial']['step']}" / "model.safetensors"
    saved = load_file(kept)
    assert all(torch.equal(weight, saved[key]) for key, weight in job.weights.items())
