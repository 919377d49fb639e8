"""A training resumed by another number of processes goes on with the same steps."""

import copy
import random
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig

from recipe.batching import batches, packing
from recipe.batching.batches import World
from recipe.errors import CheckpointError
from recipe.plan import batch_layout
from recipe.plan.batch_layout import Cut, Loaded
from recipe.storage import checkpoints
from recipe.tasks.text_classification.task import CLASSES
from tests.support.jobs import QUICK, SHARDED, Job, write
from tests.support.packed_batches import samples_of
from tests.support.words import WORDS, reviews

STEPS = ("--max_steps", "6", "--save_strategy", "steps", "--save_steps", "3")
ARGUMENTS = (*STEPS, "--save_total_limit", "9", "--logging_steps", "1", "--lr", "5e-3", "--bf16",
             "False")  # fmt: skip


def cut(processes: int, size: int, accumulation: int = 1) -> Cut:
    samples = processes * size * accumulation
    given = (size, accumulation)
    return Cut(processes=processes, size=size, accumulation=accumulation, given=given,
               sharded=False, samples=samples)  # fmt: skip


@pytest.mark.parametrize(
    ("was", "now", "actual"),
    [
        (cut(2, 8), cut(1, 8), (8, 2, 16)),
        (cut(1, 8), cut(2, 8), (4, 1, 8)),
        (cut(1, 8), cut(3, 8), (3, 1, 8)),
        (cut(8, 4), cut(6, 4), (3, 2, 32)),
        (cut(2, 8, 3), cut(5, 8, 3), (5, 2, 48)),
        (cut(4, 2), cut(16, 2), (1, 1, 8)),
        (cut(2, 8), cut(1, 16), (16, 1, 16)),
        (cut(2, 8), cut(1, 4), (4, 1, 4)),
        (cut(1, 8), cut(1, 8), (8, 1, 8)),
    ],
    ids=str,
)
def test_the_samples_of_a_step_are_kept(was: Cut, now: Cut, actual: tuple[int, int, int]) -> None:
    """But where the batch itself was changed, which `checkpoints.check_same` refuses."""
    kept = batch_layout.kept(now, was.as_job())
    assert (kept.size, kept.accumulation, kept.samples) == actual
    assert kept.size <= now.size, "a device has room for what was asked for"
    assert kept.processes * kept.size * kept.accumulation >= kept.samples
    again = batch_layout.kept(was, kept.as_job())
    if actual[2] == was.samples and now.given == was.given:
        assert (again.size, again.samples) == (was.size, was.samples), "and back"


def test_another_batch_is_refused_with_the_arithmetic(tmp_path: Path) -> None:
    jobs = [
        {checkpoints.SAMPLES: training.samples, checkpoints.CUT: training.as_job()}
        for training in (cut(2, 8), cut(1, 4))
    ]
    with pytest.raises(CheckpointError) as caught:
        checkpoints.check_same(checkpoints.Checkpoint(tmp_path, jobs[0], False), jobs[1])
    assert (
        "samples in a step was 16 (processes 2 x batch size 8 x gradient_accumulation_steps 1) and "
        "is 4 (processes 1 x batch size 4 x gradient_accumulation_steps 1)"
    ) in str(caught.value)


def finer(
    lengths: list[int], now: Cut, *, couples: bool = False, **others: Any
) -> tuple[batches.Training, Cut]:
    """What `by_length` makes of steps of samples of these lengths."""
    training = batches.Training(
        samples=samples_of(lengths), size=now.size, accumulation=now.accumulation,
        at_once=now.samples, world=World(processes=now.processes),
    )  # fmt: skip
    usual = {"torch_compile": False, "fsdp": "", "device": torch.device("cpu")}
    args: Any = SimpleNamespace(**{**usual, **others})
    model: Any = SimpleNamespace(config=BertConfig())
    tokenizer: Any = SimpleNamespace(pad_token_id=0)
    objective: Any = copy.copy(CLASSES)
    objective.couples_samples = couples
    return batch_layout.cut_by_length(
        Loaded(
            model=model, tokenizer=tokenizer, arguments=args, objective=objective, packing=False
        ),
        training,
        now,
    )


def test_steps_are_cut_where_that_saves_more_padding_than_it_costs() -> None:
    spread = np.random.default_rng(0).lognormal(5, 0.6, 333).astype(int).clip(4).tolist()
    training, now = finer(spread, cut(1, 16, 2))
    assert (now.size, now.accumulation, now.samples, now.given) == (4, 8, 32, (16, 2))
    assert training.steps() == 11
    lengths, longest = training.samples.lengths, []
    for index in range(8):
        ((rows, weight),) = training.epoch(0, False)[index]
        assert (len(rows), weight) == (4, 32)
        longest.append(lengths[rows].max())
    assert longest == sorted(longest, reverse=True)
    assert longest[-1] < longest[0] / 3
    whole = packing.steps(lengths, 32, 0, 0, False)[0]
    parts = [training.epoch(0, False)[position][0][0] for position in range(8)]
    assert sorted(whole) == sorted(np.concatenate(parts))
    assert finer(spread, cut(2, 6))[1].size == 3, "of parts that all have as many"
    for unchanged in (
        finer(spread, cut(1, 3)),
        finer([50] * 333, cut(1, 16)),
        finer([3, 9] * 166, cut(1, 16)),
        finer(spread, cut(1, 16), couples=True),
        finer(spread, cut(1, 16), torch_compile=True),
        finer(spread, cut(1, 16), fsdp="full_shard"),
        finer(spread, cut(1, 16), device=torch.device("meta")),
    ):
        assert unchanged[1].accumulation == unchanged[0].accumulation == 1


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_cut_steps_learn_what_whole_ones_do(
    tmp_path: Path, still_model: Path, preloaded: Mapping[str, str]
) -> None:
    """In processes that share them, with sharded weights (accumulated, not cut), and resumed."""
    drawn = random.Random(0)
    rows = [
        {
            "text": " ".join(drawn.choices(WORDS, k=58 if index % 7 == 0 else 1 + index % 3)),
            "label": "ab"[index % 2],
        }
        for index in range(88)
    ]
    channels = {"train": write(tmp_path / "in", rows)}
    argv = ("--model_id", str(still_model), *ARGUMENTS, "--packing", "False", "--optim", "sgd")

    def training(name: str, processes: int, *more: str, checkpoint: Path | None = None) -> Job:
        parts = 2 if more == SHARDED else 1
        cut = (
            "--batch_size",
            str(48 // processes // parts),
            "--gradient_accumulation_steps",
            str(parts),
        )
        job = Job(tmp_path / name, channels, (*argv, *cut, *more), {**preloaded, **QUICK})
        if checkpoint:
            shutil.copytree(checkpoint, job.checkpoints / checkpoint.name)
        return job.finish(processes=processes)

    one, sharded, two = training("one", 1), training("sharded", 2, *SHARDED), training("two", 2)
    rest = training("rest", 1, checkpoint=one.checkpoints / "checkpoint-3")
    for item in (one, sharded, two, rest):
        expected = {step: sharded.losses[step] for step in item.losses}
        assert item.losses == pytest.approx(expected, abs=1e-5), item.base
        line = "48 samples a step (split by length into batches of "
        assert (line in item.log) == (item is not sharded), item.log
        for name, values in item.weights.items():
            torch.testing.assert_close(values, one.weights[name], rtol=0, atol=1e-5)
    assert rest.files == one.files


@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_a_job_goes_on_in_another_world(
    tmp_path: Path, still_model: Path, preloaded: Mapping[str, str]
) -> None:
    """With the same samples in each step, and losses that are equal but for rounding."""
    rows = [{"text": text, "label": label} for text, label in reviews(72)]
    channels = {"train": write(tmp_path / "in", rows)}
    argv = ("--model_id", str(still_model), *ARGUMENTS)

    def training(name: str, size: int, *more: str) -> Job:
        cut = ("--batch_size", str(size), *more)
        return Job(tmp_path / name, channels, (*argv, *cut), {**preloaded, **QUICK})

    one = training("one", 8).finish()
    sharded = training("sharded", 4, *SHARDED).finish(processes=2)
    assert len({round(loss, 3) for loss in one.losses.values()}) > 3, "steps can be told apart"
    assert sharded.losses == pytest.approx(one.losses, rel=2e-4)
    for begun, name, processes, size, more, line in (
        (one, "1 to 2", 2, 8, (), "2 processes x 4 texts x 1 batch, before"),
        (one, "1 to 2 sharded", 2, 8, SHARDED, "before into"),
        (sharded, "sharded 2 to 3", 3, 4, SHARDED, "before into"),
        (sharded, "sharded 2 to 1", 1, 4, SHARDED, "before into"),
    ):
        job = training(name, size, *more)
        shutil.copytree(begun.checkpoints / "checkpoint-3", job.checkpoints / "checkpoint-3")
        job.finish(processes=processes)
        expected = {step: loss for step, loss in one.losses.items() if step > 3}
        assert job.losses == pytest.approx(expected, rel=2e-4), name
        assert re.search(r"a step's 8 texts are split into .*before into", job.log), name
        assert line in job.log
