"""`profile_steps`: the right steps are recorded, once, and what is written can be opened."""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from recipe import arguments
from recipe.errors import HyperparameterError
from recipe.training.profiling import Profile
from tests.support.trainings import Job

STEPS = 6


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x) - labels).square().mean()}


def trained(folder: Path, steps: range, **given: Any) -> Any:
    """A run of six steps of two batches each, saved after each second step."""
    resumed = given.pop("resume", None)
    torch.manual_seed(0)
    rows = [{"x": torch.randn(4), "labels": torch.randn(4)} for _ in range(24)]
    values: dict[str, Any] = {
        "output_dir": str(folder / "checkpoints"),
        "max_steps": STEPS,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "logging_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **given,
    }
    callbacks = [Profile(steps, folder)] if steps else []
    trainer = Trainer(
        model=Tiny(),
        args=TrainingArguments(**values),
        train_dataset=rows,
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=resumed)
    return trainer


def events(folder: Path, name: str) -> list[str]:
    """The names in a trace, which is read as the viewers read it."""
    with gzip.open(folder / "profile" / f"{name}.trace.json.gz", "rt") as stream:
        return [each.get("name", "") for each in json.load(stream)["traceEvents"]]


def recorded(names: list[str]) -> list[str]:
    return sorted({name for name in names if re.fullmatch(r"step \d+", name)})


def test_the_steps_that_are_asked_for_and_no_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profiled = trained(tmp_path, range(3, 5))
    names = events(tmp_path, "steps-3-4")
    assert recorded(names) == ["step 3", "step 4"]
    # Two batches a step, two steps: a forward pass each, and nothing of the other steps.
    assert names.count("aten::linear") == 4
    table = (tmp_path / "profile" / "steps-3-4.txt").read_text()
    assert "aten::addmm" in table and "Self CPU %" in table
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == [
        "steps-3-4.trace.json.gz",
        "steps-3-4.txt",
    ]
    assert re.search(
        r"profile of steps 3-4 written to .*most time: \S+ \d+%", capsys.readouterr()[0]
    )
    bare = trained(tmp_path / "bare", range(0))
    assert torch.equal(profiled.model.layer.weight, bare.model.layer.weight)


def test_a_resumed_job_records_what_is_left_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, range(0))
    checkpoint = tmp_path / "checkpoints" / "checkpoint-4"
    trained(tmp_path, range(3, 7), resume=checkpoint)
    assert recorded(events(tmp_path, "steps-5-6")) == ["step 5", "step 6"]
    assert (
        "goes on after step 4: steps 3-4 are not recorded again; 5-6 are" in capsys.readouterr()[0]
    )
    trained(tmp_path / "past", range(2, 4), resume=checkpoint)
    assert "steps 2-3 are not recorded again\n" in capsys.readouterr()[0]
    assert not (tmp_path / "past" / "profile").exists()


def test_steps_that_the_job_does_not_have_are_refused_before_the_first(tmp_path: Path) -> None:
    with pytest.raises(HyperparameterError, match=r"profile_steps has value 6-7, but .* 6 steps"):
        trained(tmp_path, range(6, 8))
    assert not list(tmp_path.rglob("checkpoint-*"))


def test_a_full_disk_costs_the_profile_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profile").write_text("a file where the folder should be")
    trainer = trained(tmp_path, range(1, 2), save_strategy="no")
    assert trainer.state.global_step == STEPS
    assert "warning: The profile cannot be written" in capsys.readouterr()[0]


@pytest.mark.parametrize("value", ["0-3", "7-5", "3:5", "ten", "1-51", "-3", "2-"])
def test_what_is_no_range_is_refused(value: str) -> None:
    with pytest.raises(HyperparameterError, match="profile_steps has value"):
        arguments.parse([f"--profile_steps={value}"])


def test_what_is_one() -> None:
    assert arguments.parse(["--profile_steps", "10-12"]).profiled == range(10, 13)
    assert arguments.parse(["--profile-steps", "10"]).profiled == range(10, 11)
    assert arguments.parse([]).profiled == range(0)
    with pytest.raises(HyperparameterError, match="do_train is False"):
        arguments.parse(["--profile_steps", "1", "--do_train", "False", "--do_eval", "True"])


@pytest.mark.heavy
@pytest.mark.long
def test_the_recipe_with_two_processes(
    tmp_path: Path, tiny_model: Path, reviews: Callable[[int], list[tuple[str, str]]]
) -> None:
    with (tmp_path / "reviews.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("review", "sentiment"), *reviews(200)])
    job = Job(tmp_path, tiny_model, tmp_path / "reviews.csv", processes=2)
    output = job.finish("--max_steps", "8", "--profile_steps", "4-5")
    folder = tmp_path / "output" / "data"
    names = events(folder, "steps-4-5")
    assert recorded(names) == ["step 4", "step 5"] and any("gloo" in name for name in names)
    assert output.count("profile of steps 4-5 written") == 1
