"""A training that is stopped leaves the model that it had: servable, and marked as partial."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from recipe import arguments, paths
from recipe.errors import OutputError
from recipe.tasks import base
from recipe.training import run as training_run
from recipe.training.interruptions import EXIT_CODE, Interruptions
from tests.support import task_cases
from tests.support.serving_kit import Handlers
from tests.support.trainings import Job
from tests.support.words import write_reviews


def stop(
    base_folder: Path,
    channels: dict[str, str],
    argv: list[str],
    monkeypatch: pytest.MonkeyPatch,
    step: int = 2,
) -> None:
    """Train in this process, which gets SIGTERM after a step."""
    for name, value in {"SAGEMAKER_BASE_DIR": str(base_folder), **channels}.items():
        monkeypatch.setenv(name, value)
    usual = Interruptions.on_step_end

    def on_step_end(self: Interruptions, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        usual(self, args, state, control, **more)

    before = signal.getsignal(signal.SIGTERM)
    try:
        with monkeypatch.context() as patched, pytest.raises(SystemExit) as stopped:
            patched.setattr(Interruptions, "on_step_end", on_step_end)
            given = paths.from_environment(os.environ)
            training_run.run(arguments.parse(argv, given), given, os.environ)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stopped.value.code == EXIT_CODE


ONE_PER_TASK = {case.task: name for name, case in reversed(task_cases.CASES.items())}


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name not in ONE_PER_TASK.values()))
        for name in task_cases.CASES
    ],
)
def test_a_stopped_job_of_every_task_serves_its_partial_model(
    name: str, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = task_cases.CASES[name]
    model, data, others, argv = task_cases.make(case, tmp_path / "kind", tiny_model)
    argv = ["--task", case.task, "--model_id", str(model), *argv, *case.more, "--batch_size", "4"]
    stop(tmp_path, {"SM_CHANNEL_TRAIN": data, **others}, argv, monkeypatch)
    (checkpoint,) = (tmp_path / "checkpoints").glob("checkpoint-*")
    assert checkpoint.name == "checkpoint-2"
    metrics = json.loads((tmp_path / "output" / "data" / "metrics.json").read_text())
    assert metrics["partial"]["step"] == metrics["partial"]["stopped_at"] == 2
    assert metrics["partial"]["of_steps"] > 2
    card = (tmp_path / "model" / "README.md").read_text()
    assert "A partial model: training stopped after step 2 of" in card
    served = Handlers(tmp_path / "model").model
    (answer,) = served.predict([served.prepare(served.example("the film was good"))])
    assert answer is not None


@pytest.mark.heavy
def test_the_weights_are_those_of_the_last_step_and_a_resumed_job_replaces_them(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_reviews(tmp_path / "train.csv", 60)
    argv = ["--model_id", str(tiny_model), "--epochs", "1", "--batch_size", "8", "--lr", "1e-3"]
    channels = {"SM_CHANNEL_TRAIN": str(tmp_path / "train.csv")}
    stop(tmp_path, channels, argv, monkeypatch)
    partial, kept = (
        load_file(tmp_path / folder / "model.safetensors")
        for folder in ("model", "checkpoints/checkpoint-2")
    )
    assert partial.keys() == kept.keys()
    assert all(torch.equal(partial[key], kept[key]) for key in kept)
    given = paths.from_environment(os.environ)
    before = signal.getsignal(signal.SIGTERM)
    training_run.run(arguments.parse(argv, given), given, os.environ)
    signal.signal(signal.SIGTERM, before)
    final = load_file(tmp_path / "model" / "model.safetensors")
    assert not all(torch.equal(partial[key], final[key]) for key in final)
    metrics = json.loads((tmp_path / "output" / "data" / "metrics.json").read_text())
    assert "partial" not in metrics and "eval_accuracy" in metrics
    assert "partial" not in (tmp_path / "model" / "README.md").read_text()


@pytest.mark.heavy
def test_the_best_is_left_if_the_best_is_kept(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, rows in (("train", 64), ("test", 16)):
        write_reviews(tmp_path / f"{name}.csv", rows)
    # A step without effect is as good as the one before it: the first evaluation is the best.
    argv = ["--model_id", str(tiny_model), "--epochs", "2", "--batch_size", "8", "--lr", "1e-20"]
    argv += ["--load_best_model_at_end", "True", "--eval_strategy", "steps", "--eval_steps", "2"]
    argv += ["--save_strategy", "steps", "--save_steps", "2", "--bf16", "False"]
    channels = {f"SM_CHANNEL_{name.upper()}": str(tmp_path / f"{name}.csv")
                for name in ("train", "test")}  # fmt: skip
    stop(tmp_path, channels, argv, monkeypatch, step=5)
    metrics = json.loads((tmp_path / "output" / "data" / "metrics.json").read_text())
    assert metrics["partial"] == {"step": 2, "stopped_at": 5, "of_steps": 16}
    assert "eval_loss" in metrics
    best = load_file(tmp_path / "checkpoints" / "checkpoint-2" / "model.safetensors")
    left = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(left[key], best[key]) for key in best)


@pytest.mark.heavy
def test_without_checkpoints_the_model_is_left_too(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    write_reviews(tmp_path / "train.csv", 60)
    argv = ["--model_id", str(tiny_model), "--batch_size", "8", "--save_strategy", "no"]
    stop(tmp_path, {"SM_CHANNEL_TRAIN": str(tmp_path / "train.csv")}, argv, monkeypatch)
    said = capsys.readouterr().out
    assert "nothing is saved: save_strategy=no" in said
    assert "A partial model: training stopped after step 2 of 21, and the weights" in said
    assert (tmp_path / "model" / "model.safetensors").is_file()


@pytest.mark.heavy
def test_a_model_that_cannot_be_written_is_absent_and_the_job_resumes(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    write_reviews(tmp_path / "train.csv", 60)

    def save(self: Any, model: Any, weights: Any, tokenizer: Any, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OutputError("The disk is full.")

    monkeypatch.setattr(base.Task, "save", save)
    argv = ["--model_id", str(tiny_model), "--batch_size", "8"]
    stop(tmp_path, {"SM_CHANNEL_TRAIN": str(tmp_path / "train.csv")}, argv, monkeypatch)
    assert "warning: no partial model is left: The disk is full." in capsys.readouterr().out
    assert list((tmp_path / "model").iterdir()) == []
    assert (tmp_path / "checkpoints" / "checkpoint-2").is_dir()


@pytest.mark.heavy
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "more", [(), ("--mp_parameters", "partitions=2"), task_cases.LORA], ids=["ddp", "fsdp", "lora"]
)
def test_two_processes_leave_one_model(
    tmp_path: Path, tiny_model: Path, more: tuple[str, ...]
) -> None:
    write_reviews(tmp_path / "reviews.csv", 900)
    job = Job(tmp_path / "job", tiny_model, tmp_path / "reviews.csv", 2, more)
    code, output = job.interrupt(signal.SIGTERM, 20)
    assert code == EXIT_CODE, output
    assert output.count("A partial model: training stopped after step") == 1
    metrics = json.loads((job.base / "output" / "data" / "metrics.json").read_text())
    step = metrics["partial"]["step"]
    served = Handlers(job.base / "model").model
    (answer,) = served.predict([served.prepare(served.example("the film was good"))])
    assert answer is not None
    if not more or "partitions=2" in more:
        kept = load_file(job.checkpoints / f"checkpoint-{step}" / "model.safetensors")
        left = load_file(job.base / "model" / "model.safetensors")
        assert all(torch.equal(left[key], kept[key]) for key in kept)
