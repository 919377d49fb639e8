"""A training resumed by as many processes ends bit for bit; by others, with the same steps."""

from __future__ import annotations

import copy
import json
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import BertConfig

from recipe.batching import batches, packing
from recipe.batching.batches import World
from recipe.errors import CheckpointError
from recipe.plan import worlds
from recipe.plan.worlds import Cut
from recipe.storage import checkpoints
from recipe.tasks.text_classification.task import CLASSES
from tests.support.packed_batches import samples_of
from tests.support.words import WORDS, reviews
from tests.support.worlds import Training, run

SHARDED = ("--mp_parameters", "partitions=2")
STEPS = ("--max_steps", "6", "--save_strategy", "steps", "--save_steps", "3")
ARGUMENTS = (*STEPS, "--save_total_limit", "9", "--logging_steps", "1", "--lr", "5e-3")


def cut(processes: int, size: int, accumulation: int = 1) -> Cut:
    samples = processes * size * accumulation
    given = (size, accumulation)
    return Cut(processes=processes, size=size, accumulation=accumulation, given=given,
               sharded=False, samples=samples)  # fmt: skip


@pytest.mark.parametrize(
    ("was", "now", "found"),
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
def test_the_samples_of_a_step_are_kept(was: Cut, now: Cut, found: tuple[int, int, int]) -> None:
    """But where the batch itself was changed, which `checkpoints.check_same` refuses."""
    kept = worlds.kept(now, was.as_job())
    assert (kept.size, kept.accumulation, kept.samples) == found
    assert kept.size <= now.size, "a device has room for what was asked for"
    assert kept.processes * kept.size * kept.accumulation >= kept.samples
    again = worlds.kept(was, kept.as_job())
    if found[2] == was.samples and now.given == was.given:
        assert (again.size, again.samples) == (was.size, was.samples), "and back"


def test_another_batch_is_refused_with_the_arithmetic(tmp_path: Path) -> None:
    jobs = [
        {checkpoints.SAMPLES: each.samples, checkpoints.CUT: each.as_job()}
        for each in (cut(2, 8), cut(1, 4))
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
    return worlds.by_length(training, now, args, model, tokenizer, False, objective)


def test_steps_are_cut_where_that_saves_more_padding_than_it_costs() -> None:
    spread = np.random.default_rng(0).lognormal(5, 0.6, 333).astype(int).clip(4).tolist()
    training, now = finer(spread, cut(1, 16, 2))
    assert (now.size, now.accumulation, now.samples, now.given) == (4, 8, 32, (16, 2))
    assert training.steps() == 11
    lengths, longest = training.samples.lengths, []
    for at in range(8):
        ((rows, weight),) = training.epoch(0, False)[at]
        assert (len(rows), weight) == (4, 32)
        longest.append(lengths[rows].max())
    assert longest == sorted(longest, reverse=True)
    assert longest[-1] < longest[0] / 3
    whole = packing.steps(lengths, 32, 0, 0, False)[0]
    parts = [training.epoch(0, False)[at][0][0] for at in range(8)]
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
def test_cut_steps_learn_what_whole_ones_do(tmp_path: Path, still_model: Path) -> None:
    """In processes that share them, with sharded weights (accumulated, not cut), and resumed."""
    drawn = random.Random(0)
    rows = [
        {
            "text": " ".join(drawn.choices(WORDS, k=58 if at % 7 == 0 else 1 + at % 3)),
            "label": "ab"[at % 2],
        }
        for at in range(88)
    ]
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))

    def training(name: str, processes: int, *more: str, **rest: Any) -> Training:
        argv = ["--model_id", str(still_model), *ARGUMENTS, "--bf16", "False", "--packing", "False"]
        parts = 2 if more == SHARDED else 1
        argv += ["--optim", "sgd", "--batch_size", str(48 // processes // parts), *more]
        argv += ["--gradient_accumulation_steps", str(parts)]
        return Training(base=str(tmp_path / name), data=str(path), argv=argv, processes=processes,
                        **rest)  # fmt: skip

    one, sharded = training("one", 1), training("sharded", 2, *SHARDED)
    two, rest = training("two", 2), training("rest", 1, checkpoint=one.path(3))
    every = [one, sharded, two, training("three", 3), rest]
    for each, codes in zip(every, run(*every, timeout=280), strict=True):
        assert set(codes) == {0}, each.log()
        for step, loss in losses(each).items():
            assert loss == pytest.approx(losses(sharded)[step], abs=1e-5), (each.base, step)
        said = "48 samples a step (split by length into batches of "
        assert (said in each.log()) == (each in (one, rest, two)), each.log()
    assert rest.weights() == one.weights()
    weights = [load_file(Path(each.base) / "model" / "model.safetensors") for each in every]
    for each in weights[1:]:
        for name, values in each.items():
            torch.testing.assert_close(values, weights[0][name], rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = ({"text": text, "label": label} for text, label in reviews(72))
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def losses(training: Training) -> dict[int, float]:
    found = re.findall(r"metric step=(\d+) \{'loss': ([^,}]+)", training.log())
    return {int(step): float(loss) for step, loss in found}


@pytest.mark.heavy
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_resumed_training_ends_bit_for_bit(tmp_path: Path, data: Path, tiny_model: Path) -> None:
    """Every default left on: dropout, packing, evaluation, this device's precision.

    With 1 and 2 processes, test_resume.py kills and stops them.
    """
    wholes, rests = {}, {}
    for processes, more in [(n, more) for n in (4, 8) for more in ((), SHARDED)]:
        name = f"{processes}-{'sharded' if more else 'ddp'}"
        argv = ["--model_id", str(tiny_model), *ARGUMENTS, "--batch_size", "2", *more]
        whole = Training(base=str(tmp_path / name), data=str(data), argv=argv, processes=processes)
        wholes[name] = whole
        rests[name] = Training(
            base=str(tmp_path / f"{name}-rest"),
            data=str(data),
            argv=argv,
            processes=processes,
            checkpoint=whole.path(3),
        )
    pairs = [each for name in wholes for each in (wholes[name], rests[name])]
    for training, codes in zip(pairs, run(*pairs, timeout=560), strict=True):
        assert set(codes) == {0}, training.log()
    for name, rest in rests.items():
        assert f"resuming from {rest.path(3)}" in rest.log()
        assert min(losses(rest)) == 4
        assert rest.weights() == wholes[name].weights(), name
        assert ("(FSDP2)" in rest.log()) == name.endswith("sharded")


@pytest.mark.heavy
@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_job_goes_on_in_another_world(tmp_path: Path, data: Path, still_model: Path) -> None:
    """With the same samples in each step, and losses that are equal but for rounding."""
    base = ["--model_id", str(still_model), *ARGUMENTS, "--bf16", "False"]

    def training(name: str, processes: int, size: int, *more: str, **rest: Any) -> Training:
        argv = [*base, "--batch_size", str(size), *more]
        return Training(
            base=str(tmp_path / name), data=str(data), argv=argv, processes=processes, **rest
        )

    one = training("one", 1, 8)
    two = training("two", 2, 4)
    sharded = training("sharded", 2, 4, *SHARDED)
    begun = [one, two, sharded]
    gone_on = [
        training("1 to 2", 2, 8, checkpoint=one.path(3)),
        training("1 to 3", 3, 8, checkpoint=one.path(3)),
        training("2 to 1", 1, 4, checkpoint=two.path(3)),
        training("1 to 2 sharded", 2, 8, *SHARDED, checkpoint=one.path(3)),
        training("sharded 2 to 3", 3, 4, *SHARDED, checkpoint=sharded.path(3)),
        training("sharded 2 to 1", 1, 4, *SHARDED, checkpoint=sharded.path(3)),
        training("another step", 1, 3, checkpoint=one.path(3)),
    ]
    codes = run(*begun, *gone_on, timeout=380)
    assert codes[-1] == [1]
    assert "samples in a step was 8 (processes 1 x batch size 8" in gone_on[-1].log()
    expected = losses(one)
    assert len(expected) == 6
    assert len({round(loss, 3) for loss in expected.values()}) > 3, "steps can be told apart"
    for each, its_codes in zip([*begun, *gone_on[:-1]], codes, strict=False):
        assert set(its_codes) == {0}, each.log()
        for step, loss in losses(each).items():
            assert loss == pytest.approx(expected[step], rel=2e-4), (each.base, step)
    for each in gone_on[:-1]:
        assert min(losses(each)) == 4, each.base
        assert re.search(r"a step's 8 texts are split into .*before into", each.log()), each.base
    assert "2 processes x 4 texts x 1 batch, before" in gone_on[0].log()
    assert "3 processes x 3 texts x 1 batch, before" in gone_on[1].log()
    assert "1 process x 4 texts x 2 batches, before" in gone_on[2].log()
