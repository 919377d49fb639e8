"""Weights sharded over processes (FSDP2), and rows sharded over hosts (ShardedByS3Key)."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.causal_kit import make_model
from tests.support.jobs import BY_GRADIENT, QUICK, SHARDED, Job, assert_same, write
from tests.support.tasks import CASES, make
from tests.support.words import reviews

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
    assert "not compared with the trained model: its weights are sharded" in two.log
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


INPUT = {name: {"S3DistributionType": "ShardedByS3Key"} for name in ("train", "test")}
REVIEWS = [{"text": text, "label": label} for text, label in reviews(90)]
Rows = Sequence[Mapping[str, Any]]


def hosts(base: Path, train: Sequence[Rows], test: Sequence[Rows]) -> list[dict[str, str]]:
    """Write each host's part of the channels, a file if it has rows; return its variables."""
    for channel, parts in (("train", train), ("test", test)):
        for rank, rows in enumerate(parts):
            folder = base / channel / str(rank)
            folder.mkdir(parents=True)
            if rows:
                write(folder, rows, "part")
    return [
        {
            "SM_CURRENT_HOST": f"algo-{rank + 1}", "SM_INPUT_DATA_CONFIG": json.dumps(INPUT),
            **{f"SM_CHANNEL_{name.upper()}": str(base / name / str(rank)) for name in INPUT},
        }
        for rank in range(len(train))
    ]  # fmt: skip


def test_hosts_train_on_their_own_rows_and_are_judged_on_all(
    tmp_path: Path, tiny_model: Path, preloaded: Mapping[str, str]
) -> None:
    # The first host knows no label but one; the third has nothing at all.
    train = [[row for row in REVIEWS[:60] if row["label"] == "pos"], REVIEWS[40:58], []]
    ranks = hosts(tmp_path / "in", train, [REVIEWS[60:65], REVIEWS[65:], []])
    argv = ("--model_id", str(tiny_model), "--epochs", "2", "--batch_size", "4")
    job = Job(tmp_path / "ml", {}, argv, {**preloaded, **QUICK}).finish(ranks=ranks)
    assert "training rows of each host: algo-1 30, algo-2 18, algo-3 0" in job.log
    assert "2 labels: neg (9 rows), pos (39 rows)" in job.log
    # 30 rows of the first host, 4 at a time.
    state = json.loads(next(job.checkpoints.glob("*/trainer_state.json")).read_text())
    assert state["max_steps"] == 2 * 8
    argv = ("--model_id", str(job.model), "--do_train", "False", "--do_eval", "True")
    whole = {"test": write(tmp_path / "whole", REVIEWS[60:], "test")}
    judged = Job(tmp_path / "one", whole, argv).run_here()
    timed = ("_second", "_runtime")
    scores = {k: v for k, v in judged.items() if k.startswith("eval_") and not k.endswith(timed)}
    assert scores.keys() >= {"eval_loss", "eval_accuracy"}
    assert {name: job.metrics[name] for name in scores} == pytest.approx(scores, abs=2e-4)


@pytest.mark.long
def test_documents_of_their_own_hosts_and_a_resume_that_ends_with_the_same_weights(
    tmp_path: Path, preloaded: Mapping[str, str]
) -> None:
    rows = [{"prompt": f"{n} plus {n % 7} is ", "completion": f"{n + n % 7}"} for n in range(50)]
    ranks = hosts(tmp_path / "in", [rows[:30], rows[30:], []], [[], [], []])
    # Two tasks take prompt_column; only hosts with data can detect which one is meant.
    argv = ("--model_id", str(make_model("llama", tmp_path / "decoder")), "--epochs", "2",
            "--batch_size", "4", "--prompt_column", "prompt")  # fmt: skip
    job = Job(tmp_path / "ml", {}, argv, {**preloaded, **QUICK}).finish(ranks=ranks)
    files = job.files
    # A tenth of each host's documents is held out.
    shutil.rmtree(job.checkpoints / "checkpoint-14")
    job.finish(ranks=ranks)
    assert "training documents of each host: algo-1 27, algo-2 18, algo-3 0" in job.log
    assert "resuming from" in job.log and "checkpoint-7" in job.log
    assert job.files == files


def test_different_data_is_refused_before_a_step(
    tmp_path: Path, tiny_model: Path, preloaded: Mapping[str, str]
) -> None:
    """A channel that SageMaker did not shard, with another file of as many rows on one of the hosts."""
    ranks = hosts(tmp_path / "in", [REVIEWS[:40], REVIEWS[50:]], [[], []])
    ranks = [{**variables, "SM_INPUT_DATA_CONFIG": "{}"} for variables in ranks]
    argv = ("--model_id", str(tiny_model), "--epochs", "1", "--batch_size", "4")
    job = Job(tmp_path / "ml", {}, argv, {**preloaded, **QUICK}).run(ranks=ranks)
    assert 0 not in job.codes
    assert (
        "DistributedError: The processes have read different data: rank 0 on algo-1" in job.errors
    )
    assert "rank 1 on algo-2" in job.errors and "FullyReplicated" in job.errors
    assert not job.losses
