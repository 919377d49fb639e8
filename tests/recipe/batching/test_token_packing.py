"""Packed words and windows: the same logits, losses and gradients as each sample alone."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional
from transformers import PreTrainedModel

from recipe.batching import packing as plan
from recipe.batching.batches import Packed, Padded
from recipe.batching.document_batches import NOT_LEARNED
from recipe.batching.packing import Rows
from recipe.hyperparameters import Hyperparameters
from recipe.models import lora, packed_encoders, token_heads
from recipe.tasks.question_answering.tokens import WindowLayout, Windows
from recipe.tasks.token_classification.tokens import TaggedSamples, TagLayout
from tests.support.packed_batches import KINDS, PAD, assert_same_losses, spread

LENGTHS, SIZE = [30, 5, 17, 2, 41], 6
STARTS = np.cumsum([0, *LENGTHS])
ROWS = np.arange(len(LENGTHS))


def make(kind: str, head: str) -> PreTrainedModel:
    name, values = KINDS[kind]
    more = {"num_labels": 2} if head == "QuestionAnswering" else {}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**values, **more})
    model: PreTrainedModel = getattr(transformers, f"{name}For{head}")(config)
    return spread(model)


def ids() -> Rows:
    return np.random.default_rng(0).integers(4, 50, STARTS[-1]).astype(np.int32)


def tagged(judged: bool) -> TaggedSamples:
    random = np.random.default_rng(1)
    tags = random.integers(0, 3, STARTS[-1])
    tags[random.random(STARTS[-1]) < 0.4] = NOT_LEARNED
    tags[STARTS[:-1]] = 1
    sums = np.concatenate([[0], np.cumsum(tags != NOT_LEARNED)])
    labels = np.stack([np.diff(sums[STARTS]), ROWS], axis=1)
    return TaggedSamples(ids(), STARTS, labels, tags.astype(np.int16), judged)


def windows(judged: bool) -> Windows:
    starts = np.array([2, 1, 0, 1, 20])
    labels = np.stack([starts, starts + np.array([3, 2, 0, 0, 9]), ROWS], axis=1)
    none = np.zeros(STARTS[-1], dtype=np.int32)
    return Windows(ids(), STARTS, labels, none, none, judged)


def layout_of(kind: Any, packed: bool, model: PreTrainedModel, *more: Any) -> Any:
    lengths = [np.asarray(LENGTHS)]
    if not packed:
        return kind(Padded(plan.buckets(lengths), SIZE, PAD), *more)
    family = packed_encoders.family_of(model.config)
    assert family is not None
    shape = plan.shape(lengths)
    assert shape.rows > 1
    return kind(Packed(shape, SIZE, PAD, family.first_position(model.config)), *more)


PAIRS = [("bert", True), ("distilbert", True), ("modernbert", True), ("roberta", False)]
"""How an encoder is packed depends on its family (test_packing.py), and the heads' losses do not."""


@pytest.mark.parametrize(("kind", "packed"), PAIRS)
def test_words_are_tagged_as_alone(kind: str, packed: bool) -> None:
    model, samples = make(kind, "TokenClassification"), tagged(True)
    alone = [model(input_ids=torch.tensor(samples.tokens(row))[None].long()).logits[0]
             for row in ROWS]  # fmt: skip
    tags = [torch.tensor(samples.tags[samples.span(row)]).long() for row in ROWS]
    wanted = torch.stack([
        functional.cross_entropy(logits, word_tags, ignore_index=NOT_LEARNED, reduction="sum")
        for logits, word_tags in zip(alone, tags, strict=True)
    ])  # fmt: skip
    token_heads.patch_forward_for_tags(model, 0.0)
    learned, words = samples.weight(ROWS), samples.words()
    layout = layout_of(TagLayout, packed, model, learned, words)
    batch = layout.tensors(samples, ROWS)
    packed_logits = model(**batch).logits
    assert packed_logits.shape == (SIZE, 1 + 3 * words)
    for row in ROWS:
        tags = samples.tags[samples.span(row)]
        judged = packed_logits[row, 1:].reshape(3, words).detach()
        heads = judged[2] != token_heads.NO_TAG
        assert (judged[2][: len(tags)].numpy() == np.maximum(tags, token_heads.NO_TAG)).all()
        assert not heads[len(tags) :].any()
        expected = alone[row].detach()[heads[: len(tags)]].softmax(-1).max(-1)
        torch.testing.assert_close(judged[0][heads].long(), expected.indices)
        torch.testing.assert_close(judged[1][heads], expected.values, rtol=0, atol=1e-5)
    assert_same_losses(model, packed_logits[: len(ROWS), 0], wanted, 2e-5)


@pytest.mark.parametrize(("kind", "packed"), PAIRS)
def test_answers_are_found_as_alone(kind: str, packed: bool) -> None:
    model, samples = make(kind, "QuestionAnswering"), windows(True)
    outputs = [model(input_ids=torch.tensor(samples.tokens(row))[None].long()) for row in ROWS]
    spans = torch.tensor(samples.labels[:, :2])
    wanted = torch.stack([
        (functional.cross_entropy(output.start_logits[0], span[0])
         + functional.cross_entropy(output.end_logits[0], span[1])) / 2
        for output, span in zip(outputs, spans, strict=True)
    ])  # fmt: skip
    token_heads.patch_forward_for_spans(model)
    layout = layout_of(WindowLayout, packed, model, max(LENGTHS), True)
    logits = model(**layout.tensors(samples, ROWS)).logits
    for row in ROWS:
        both = logits[row, 1:].reshape(2, max(LENGTHS))
        expected = torch.stack([outputs[row].start_logits[0], outputs[row].end_logits[0]])
        torch.testing.assert_close(both[:, : LENGTHS[row]], expected, rtol=0, atol=1e-5)
        assert (both[:, LENGTHS[row] :] < -1e8).all()
    assert_same_losses(model, logits[: len(ROWS), 0], wanted, 2e-5)


@pytest.mark.parametrize("task", ["TOKEN_CLS", "QUESTION_ANS"])
def test_around_adapters_too(task: str) -> None:
    """Which add nothing before they are trained; peft must pass all on that a batch has."""
    if task == "TOKEN_CLS":
        samples: Any = tagged(True)
        head, kind, more = "TokenClassification", TagLayout, (samples.weight(ROWS), samples.words())
        patch: Any = functools.partial(token_heads.patch_forward_for_tags, smoothing=0.0)
    else:
        samples, head, kind, more = windows(True), "QuestionAnswering", WindowLayout, (41, True)
        patch = token_heads.patch_forward_for_spans
    logits = []
    for adapters in (None, 4):
        model: Any = make("bert", head)
        batch = layout_of(kind, True, model, *more).tensors(samples, ROWS)
        batch["token_type_ids"] = (batch["position_ids"] > 3).long()
        model = lora.wrap(model, Hyperparameters(lora_r=adapters), (), task, trains_head=True)
        patch(model)
        logits.append(model.eval()(**batch).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-6)
