"""Encoders with a head for tokens, packed or not: tags of words, and answer spans.

Instead of logits, such a model returns losses and predictions of a batch, in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional
from transformers.modeling_outputs import TokenClassifierOutput

from recipe.batching.document_batches import NOT_LEARNED
from recipe.data.column_names import TYPE_IDS
from recipe.models import lora, packed_encoders

NO_TAG = -1
"""The true tag of a slot that has no word."""
_LOWEST = -1e9
"""The logit of a token that cannot be part of an answer."""


def patch_forward_for_tags(model: Any, smoothing: float) -> None:
    """Let `model` also take batches of tagged samples.

    It returns [samples, 1 or 1 + 3 * words]: the sum of the losses of a sample's learned tokens;
    of evaluation data also the predicted tag of each word, its probability, and the true tag
    (NO_TAG for none). `smoothing` is the share of the target that is spread evenly over all tags in
    training.
    """
    lora.patch_forward(model, functools.partial(_tags, smoothing))


def patch_forward_for_spans(model: Any) -> None:
    """Let `model` also take batches of windows.

    It returns [windows, 1 or 1 + 2 * length]: the loss; of evaluation data also the logits of each
    token as the first of the answer, and those as the last (_LOWEST where there is no token).
    """
    lora.patch_forward(model, _spans)


def _usual(inputs: Mapping[str, Any]) -> dict[str, Any]:
    names = ("input_ids", "attention_mask", TYPE_IDS)
    return {name: inputs[name] for name in names if name in inputs}


def _tags(
    smoothing: float, model: Any, usual: Callable[..., Any], *args: Any, **inputs: Any
) -> Any:
    positions = inputs.get("positions")
    if positions is None:
        return usual(*args, **inputs)
    if "segments" in inputs:
        family = packed_encoders.FAMILIES[model.config.model_type]
        states = packed_encoders.states(model, family, inputs, inputs["segments"])
        logits = family.tags(model, states.flatten(0, 1)[positions])
    else:
        logits = usual(**_usual(inputs)).logits.flatten(0, 1)[positions]
    logits, targets, owners = logits.float(), inputs["targets"], inputs["owners"]
    losses = functional.cross_entropy(
        logits,
        targets,
        reduction="none",
        ignore_index=NOT_LEARNED,
        label_smoothing=smoothing if model.training else 0.0,
    )
    samples, words = inputs["samples"], inputs.get("words")
    sums = torch.zeros(samples, device=losses.device).index_add(0, owners, losses)[:, None]
    if words is None:
        return TokenClassifierOutput(logits=sums)
    likeliest, predicted = logits.detach().softmax(dim=-1).max(dim=-1)
    columns = [sums]
    indices = owners * (words + 1) + inputs["within"]
    for value, nothing in ((predicted, 0.0), (likeliest, 0.0), (targets, float(NO_TAG))):
        room = torch.full((samples * (words + 1),), nothing, device=losses.device)
        room = room.scatter(0, indices, value.float())
        columns.append(room.view(samples, words + 1)[:, :words])
    return TokenClassifierOutput(logits=torch.cat(columns, dim=1))


def _spans(model: Any, usual: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
    gold_spans = inputs.get("spans")
    if gold_spans is None:
        return usual(*args, **inputs)
    if "segments" in inputs:
        family = packed_encoders.FAMILIES[model.config.model_type]
        states = packed_encoders.states(model, family, inputs, inputs["segments"])
        logits = family.spans(model, states)
    else:
        output = usual(**_usual(inputs))
        logits = torch.stack([output.start_logits, output.end_logits], dim=-1)
    flat = logits.float().flatten(0, 1)
    within = torch.arange(inputs["window_length"], device=flat.device)
    indices = (inputs["first"][:, None] + within).clamp(max=len(flat) - 1)
    outside = within >= inputs["lengths"][:, None]
    spans = flat[indices].masked_fill(outside[..., None], _LOWEST)  # [windows, length, 2]
    losses = functional.cross_entropy(spans, gold_spans, reduction="none").mean(dim=1)
    outputs = [losses[:, None]]
    if inputs["judged"]:
        outputs += [spans[..., 0].detach(), spans[..., 1].detach()]
    return TokenClassifierOutput(logits=torch.cat(outputs, dim=1))
