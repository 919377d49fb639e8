"""Packed batches: the same logits, gradients and losses as without, in one shape, nearly full."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import PreTrainedModel

from recipe.batching import batches, flat
from recipe.batching import packing as plan
from recipe.batching.batches import Packed, Padded
from recipe.errors import HyperparameterError
from recipe.models import cpu_kernels, flat_attention, losses, packed_encoders
from recipe.plan import batch_layout
from recipe.plan.table import Table
from recipe.tasks.text_classification.task import CLASSES
from tests.support.packed_batches import (
    KINDS,
    PAD,
    SIZE,
    SMALL,
    assert_same_losses,
    make,
    samples_of,
    to_train,
    tweet_lengths,
)


@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        *((kind, attention) for kind in KINDS for attention in ("sdpa", flat_attention.ATTENTION)),
        *(
            (kind, attention)
            for kind in ("bert", "modernbert")
            for attention in ("eager", cpu_kernels.ATTENTION)
        ),
    ],
)
def test_packed_logits_and_gradients_are_those_of_samples_alone(kind: str, attention: str) -> None:
    model = make(kind, attn_implementation="eager" if attention == "eager" else "sdpa")
    samples = samples_of([30, 5, 17, 2, 41])
    rows = np.arange(5)
    labels = torch.from_numpy(samples.labels)
    alone = [
        model(input_ids=torch.from_numpy(samples.tokens(row).astype(np.int64))[None]).logits
        for row in rows
    ]
    expected = torch.cat(alone)
    family = packed_encoders.family_of(model.config)
    assert family is not None
    packed_encoders.patch_forward_for_packing(model)
    if attention == cpu_kernels.ATTENTION:
        cpu_kernels.lighten(model, packed_attention=True)
        assert model.config._attn_implementation == cpu_kernels.ATTENTION
    shape: Any = plan.shape([samples.lengths])
    assert shape.rows > 1
    if attention == flat_attention.ATTENTION:
        flat_attention.use(model)
        shape = flat.row([samples.lengths])
    layout = Packed(shape, SIZE, PAD, family.first_position(model.config))
    logits = model(**layout.tensors(samples, rows)).logits
    assert logits.shape == (SIZE, 3)
    torch.testing.assert_close(logits[:5], expected, rtol=0, atol=1e-5)
    actual, wanted = (losses.sample_losses(some, labels) / 5 for some in (logits[:5], expected))
    assert_same_losses(model, actual, wanted)


def test_every_family_is_held_to_that() -> None:
    assert {kind.split(",")[0] for kind in KINDS} == set(packed_encoders.FAMILIES)


@pytest.mark.parametrize("size", [2, 31, 64])
def test_a_step_has_a_sample_of_each_length_class(size: int) -> None:
    """The shortest samples are not kept for the step of the longest: what goes with length would
    be learned worse."""
    lengths = np.random.default_rng(0).permutation(64 * size) + 1
    for step in plan.steps(lengths, size, 7, 0, True):
        assert sorted((lengths[step] - 1) // 64) == list(range(size))


def test_samples_of_nearly_one_length_get_a_block_each() -> None:
    """Four in a block would fill 95 % of it, and cost four times the attention."""
    drawn = np.random.default_rng(0)
    windows = drawn.integers(114, 129, 2000)
    windows[0] = 128
    steps = plan.steps(windows, 16, 7, 0, True)
    shape = plan.shape([windows[step] for step in steps])
    assert (shape.rows, shape.length) == (16, 128)
    for step in steps:
        assert len(set(shape.assign_blocks(windows[step]))) == len(step)
    # Where most are far shorter than the longest, they share blocks as before.
    windows[1:] = drawn.integers(20, 60, 1999)
    shape = plan.shape([windows[step] for step in plan.steps(windows, 16, 7, 0, True)])
    assert windows.mean() * 16 / shape.tokens > 0.9


def test_what_cannot_be_packed_has_four_lengths_at_most() -> None:
    lengths = np.asarray(tweet_lengths(2000))
    whole = plan.steps(lengths, 32, 7, 0, False)
    steps = [part for step in whole for part in plan.split(step, lengths, 4, 8, False)]
    chosen = plan.buckets([lengths[step] for step in steps])
    assert len(chosen) <= 4
    samples, layout = samples_of(lengths.tolist()), Padded(chosen, 8, PAD)
    shapes = {layout.tensors(samples, step)["input_ids"].shape for step in steps}
    assert shapes == {(8, length) for length in chosen}
    assert lengths.sum() / sum(layout.computed_tokens(samples, step) for step in steps) > 0.65


@pytest.mark.parametrize("spread", [True, False])
def test_a_padded_step_has_samples_of_many_lengths(spread: bool) -> None:
    # Steps of samples that are alike learned worse what goes with length.
    lengths = np.random.default_rng(0).integers(10, 500, 1600)
    if spread:
        steps = plan.spread(lengths, 100, (7, 0), False)
    else:
        steps = list(plan.steps(lengths, 16, 7, 0, False))
    within = [lengths[step].std() / lengths.std() for step in steps]
    assert np.mean(within) > 0.9
    assert min(within) > 0.4


def test_what_the_table_says_of_packing(make_deberta: Callable[[], PreTrainedModel]) -> None:
    run = batches.Training(samples=samples_of(tweet_lengths(75)), size=8)
    held_out = {"evaluation": samples_of(tweet_lengths(20))}

    def lay(model: PreTrainedModel, packing: bool | None) -> tuple[Any, Any, str]:
        table = Table()
        chosen = batch_layout.layouts(to_train(model, CLASSES, 8, packing), run, held_out, table)
        return *chosen, str(table.rows[0])

    layout, _, row = lay(make("bert"), None)
    count = layout.shape.rows
    assert isinstance(layout, Packed)
    assert f"8 samples packed into {count} block{'s' * (count > 1)} of" in row
    assert isinstance(lay(make("bert"), False)[0], Padded)
    _, evaluation, row = lay(make_deberta(), None)
    assert isinstance(evaluation, Padded) and "(deberta-v2 cannot be packed)" in row
    with pytest.raises(HyperparameterError, match=r"packing has value True.*deberta-v2"):
        lay(make_deberta(), True)


@pytest.fixture()
def make_deberta() -> Callable[[], PreTrainedModel]:
    config = transformers.DebertaV2Config(**SMALL)
    return lambda: transformers.DebertaV2ForSequenceClassification(config)
