"""Weights sharded over two processes (FSDP2): the training of one process, resumed bit for bit."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.support.jobs import BY_GRADIENT, QUICK, SHARDED, Job, assert_same
from tests.support.tasks import CASES, make

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]
STEPS = ("--max_steps", "6", "--save_strategy", "steps", "--save_steps", "3", "--save_total_limit", "9",
         "--logging_steps", "1", "--eval_strategy", "no")  # fmt: skip
IN_EVERY_CHECK = ("causal-lm, LoRA",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name not in IN_EVERY_CHECK)) for name in CASES],
)
def test_shards_learn_what_one_process_does_and_resume(
    name: str, tmp_path: Path, preloaded: Mapping[str, str]
) -> None:
    """In float32 within digits of its sums; in bfloat16 weights and losses keep float32's digits."""
    data, arguments = make(name, tmp_path)
    one, two, half, rest = (
        Job(tmp_path / folder, {"train": data}, (*arguments, *STEPS), {**preloaded, **QUICK})
        for folder in ("one", "two", "half", "rest")
    )
    one.finish("--batch_size", "8", "--bf16", "False", *BY_GRADIENT)
    two.finish("--batch_size", "4", "--bf16", "False", *BY_GRADIENT, *SHARDED, processes=2)
    assert "sharded over 2 processes (FSDP2)" in two.log
    assert len(one.losses) == 6
    assert_same(two, one, CASES[name].tolerance)

    argv = ("--batch_size", "4", "--lr", "2e-3", "--bf16", "True", *SHARDED)
    half.finish(*argv, processes=2)
    # Sums of losses are not rounded to bfloat16, nor what is saved.
    assert any(float(torch.tensor(loss).bfloat16()) != loss for loss in half.losses.values())
    assert {k: v.dtype for k, v in half.weights.items()} == {
        k: v.dtype for k, v in one.weights.items()
    }
    shutil.copytree(half.checkpoints / "checkpoint-3", rest.checkpoints / "checkpoint-3")
    rest.finish(*argv, processes=2)
    assert f"resuming from {rest.checkpoints}/checkpoint-3" in rest.log
    assert rest.losses == {step: loss for step, loss in half.losses.items() if step > 3}
    assert rest.files == half.files


def test_a_finished_training_of_shards_takes_no_further_step(
    tmp_path: Path, preloaded: Mapping[str, str]
) -> None:
    """Early stopping ended it before its last step; the next start writes the results only."""
    data, arguments = make("text-classification", tmp_path)
    job = Job(tmp_path / "job", {"train": data}, arguments, {**preloaded, **QUICK})
    argv = ("--batch_size", "4", "--lr", "1e-9", "--epochs", "9", "--eval_strategy", "epoch",
            "--save_strategy", "epoch", "--logging_steps", "1", "--early_stopping_patience", "1",
            "--early_stopping_threshold", "1", *SHARDED)  # fmt: skip
    job.finish(*argv, processes=2)
    losses, files = job.losses, job.files
    assert losses
    (job.model / "model.safetensors").unlink()
    job.finish(*argv, processes=2)
    assert "this job was finished before" in job.log
    assert not job.losses
    assert job.files == files
