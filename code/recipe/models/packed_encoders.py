"""Encoders that take several samples in one block of tokens.

A packed batch has `input_ids`, `position_ids` (restarting with each sample), `segments` (the number
of each token's sample in its block, 0 for padding) and, for pairs, `token_type_ids`, all [rows,
length]; and `first` [samples], the position of each sample's first token in the flattened blocks. A
4-D mask lets tokens attend to their segment only: with position ids alone, these encoders would see
other samples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers import PretrainedConfig
from transformers.modeling_outputs import SequenceClassifierOutput

from recipe.data.column_names import TYPE_IDS
from recipe.models import flat_attention, lora

IS_OLDER = transformers.__version__.startswith("4.")
"""Whether masks are those of transformers 4: [rows, length, length], which not all types take."""

UNMASKED = frozenset(
    ("canine", "convbert", "fnet", "funnel", "mobilebert", "nystromformer", "xlnet", "yoso")
)
"""Types of models whose results change with padding in spite of the mask: they mix or pool tokens
without it, or read the last position."""

_TEXT_OUTPUTS, _TOKEN_OUTPUTS = (
    ("logits", "pooler_output"),
    ("last_hidden_state", "start_logits", "end_logits"),
)


class Family:
    """How one type of model is packed: like BERT, unless a subclass overrides it.

    Hidden states are [..., hidden]; the model's modules compute logits from them.
    """

    has_windows = False
    """Whether some layers have local attention."""
    in_older = True
    """Whether this type takes a mask for each token in transformers 4."""

    def head(self, model: Any, hidden: Tensor) -> Any:
        """Return the logits of samples from their pooled states [samples, hidden]."""
        return model.classifier(model.dropout(model.bert.pooler(hidden[:, None])))

    def masked(self, model: Any, hidden: Tensor) -> Any:
        """Return logits over the vocabulary, for a model with a head for masked tokens."""
        return model.cls(hidden)

    def tags(self, model: Any, hidden: Tensor) -> Any:
        """Return logits over the tags, for a model with a head for tags of tokens."""
        return model.classifier(model.dropout(hidden))

    def spans(self, model: Any, hidden: Tensor) -> Any:
        """Return logits [..., 2] of first and last tokens, for a question answering model."""
        return model.qa_outputs(hidden)

    def first_position(self, config: Any) -> int:
        """Return the position id of a sample's first token."""
        return 0

    def pools_mean(self, config: Any) -> bool:
        """Return whether `head` takes the mean of a sample's states, not the first state."""
        return False

    def masks(self, config: Any, visible: Tensor) -> Any:
        """Return the model's masks for `visible` [rows, 1, length, length], the tokens that each
        token may attend to."""
        if IS_OLDER:
            return visible[:, 0]  # which the model converts to an additive mask
        return flat_attention.convert_mask(visible, config)


class _DistilBert(Family):
    in_older = False

    def head(self, model: Any, hidden: Tensor) -> Any:
        return model.classifier(model.dropout(model.pre_classifier(hidden).relu()))

    def masked(self, model: Any, hidden: Tensor) -> Any:
        transformed = model.activation(model.vocab_transform(hidden))
        return model.vocab_projector(model.vocab_layer_norm(transformed))

    def spans(self, model: Any, hidden: Tensor) -> Any:
        return model.qa_outputs(model.dropout(hidden))


class _Electra(Family):
    def head(self, model: Any, hidden: Tensor) -> Any:
        return model.classifier(hidden[:, None])

    def masked(self, model: Any, hidden: Tensor) -> Any:
        return model.generator_lm_head(model.generator_predictions(hidden))


class _Roberta(Family):
    def head(self, model: Any, hidden: Tensor) -> Any:
        return model.classifier(hidden[:, None])

    def masked(self, model: Any, hidden: Tensor) -> Any:
        return model.lm_head(hidden)

    def first_position(self, config: Any) -> int:
        return int(config.pad_token_id) + 1


class _ModernBert(Family):
    has_windows = True
    in_older = False

    def head(self, model: Any, hidden: Tensor) -> Any:
        return model.classifier(model.drop(model.head(hidden)))

    # Its heads are alike.
    tags = spans = head

    def masked(self, model: Any, hidden: Tensor) -> Any:
        return model.decoder(model.head(hidden))

    def pools_mean(self, config: Any) -> bool:
        return bool(config.classifier_pooling == "mean")

    def masks(self, config: Any, visible: Tensor) -> dict[str, Tensor]:
        positions = torch.arange(visible.shape[-1], device=visible.device)
        near = (positions[:, None] - positions[None, :]).abs() <= config.sliding_window
        return {
            "full_attention": flat_attention.convert_mask(visible, config),
            "sliding_attention": flat_attention.convert_mask(visible & near, config),
        }


FAMILIES: Mapping[str, Family] = {
    "bert": Family(),
    "distilbert": _DistilBert(),
    "electra": _Electra(),
    "roberta": _Roberta(),
    "xlm-roberta": _Roberta(),
    "camembert": _Roberta(),
    "modernbert": _ModernBert(),
}
"""By `model_type`. A test compares logits and gradients of each with those of unpacked models."""


def family_of(config: PretrainedConfig) -> Family | None:
    """Return the family of a model with this configuration; None if it cannot be packed."""
    if config._attn_implementation not in ("sdpa", "eager", flat_attention.ATTENTION):
        return None
    family = FAMILIES.get(config.model_type)
    return None if family is None or (IS_OLDER and not family.in_older) else family


def patch_forward_for_lengths(model: Any) -> None:
    """Let a model of one of UNMASKED compute each text of a padded batch as if it were alone.

    Other models apply the mask, and are not changed.
    """
    if lora.bare(model).config.model_type in UNMASKED:
        lora.patch_forward(model, _forward_by_length)


def minimum_length(config: PretrainedConfig) -> int:
    """Return the fewest tokens that a model of UNMASKED can take; Funnel halves a text in each
    block."""
    return 1 + 2 ** (len(config.block_sizes) - 1) if config.model_type == "funnel" else 1


def _forward_by_length(model: Any, padded: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
    """Compute texts of equal length together, without padding; texts with fewer tokens than the
    model can take are padded to that number.

    Args:
        padded: The model's own forward pass.
        inputs: `attention_mask` and other tensors [rows, length], padded on the right; settings.

    Returns:
        The model's outputs (_TEXT_OUTPUTS, _TOKEN_OUTPUTS), 0 behind each text.
    """
    config, mask = model.config, inputs.get("attention_mask")
    if mask is None:
        return padded(*args, **inputs)
    width = mask.shape[1]
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    if (lacking := minimum_length(config) - width) > 0:
        fill = {"input_ids": config.pad_token_id or 0}
        tensors = {
            name: functional.pad(value, (0, lacking), value=fill.get(name, 0))
            for name, value in tensors.items()
        }
    lengths = mask.sum(1).clamp(min=minimum_length(config))
    row_groups = [(lengths == length).nonzero()[:, 0] for length in torch.unique(lengths)]
    outputs = []
    for rows in row_groups:
        parts = {name: value[rows, : int(lengths[rows[0]])] for name, value in tensors.items()}
        outputs.append(padded(*args, **{**inputs, **parts}))
    order = torch.cat(row_groups).argsort()
    values = {}
    for name in (name for name in (*_TEXT_OUTPUTS, *_TOKEN_OUTPUTS) if name in outputs[0]):
        hidden: list[Tensor] = [output[name] for output in outputs]
        if name in _TOKEN_OUTPUTS or hidden[0].dim() > 2:
            padding = (0, 0) * (hidden[0].dim() - 2)
            hidden = [functional.pad(part, (*padding, 0, width - part.shape[1])) for part in hidden]
        values[name] = torch.cat(hidden)[order]
    return type(outputs[0])(**values)


def patch_forward_for_packing(model: Any) -> None:
    """Let `model`, of one of FAMILIES, also take packed batches."""
    inner = lora.bare(model)
    family = family_of(inner.config)
    assert family is not None
    inner.forward = functools.partial(_forward, inner, family, inner.forward)


def _forward(
    model: Any, family: Family, unpacked: Callable[..., Any], *args: Any, **inputs: Any
) -> Any:
    segments, first = inputs.pop("segments", None), inputs.pop("first", None)
    if segments is None:
        return unpacked(*args, **inputs)
    hidden = states(model, family, inputs, segments)
    pool = means if family.pools_mean(model.config) else firsts
    return SequenceClassifierOutput(logits=family.head(model, pool(hidden, segments, first)))


def states(
    model: Any,
    family: Family,
    inputs: Mapping[str, Any],
    segments: Tensor,
    encode: Callable[..., Any] | None = None,
) -> Tensor:
    """Return the states [rows, length, hidden] of a packed batch, each from its sample alone.

    Args:
        model: With any head, which is not computed.
        inputs: `input_ids`, `position_ids` and maybe `token_type_ids`; of a row without blocks also
            `starts` and `longest` (`recipe.batching.flat`).
        encode: Called instead of the model below its head, if given.
    """
    types = {name: inputs[name] for name in (TYPE_IDS,) if name in inputs}
    if IS_OLDER:
        # transformers 4 has default token types only for as many tokens as a sample may have.
        types = {TYPE_IDS: torch.zeros_like(segments), **types}
    if "starts" in inputs:
        attention = flat_attention.inputs_of(
            inputs["starts"], inputs["longest"], family.has_windows
        )
    else:
        visible = segments[:, None, :, None] == segments[:, None, None, :]
        attention = {"attention_mask": family.masks(model.config, visible)}
    output = (encode or model.base_model)(
        input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], **attention, **types
    )
    hidden: Tensor = output.last_hidden_state
    return hidden


def firsts(hidden: Tensor, segments: Tensor, first: Tensor) -> Tensor:
    """Return [samples, hidden]: the state of each sample's first token."""
    return hidden.flatten(0, 1)[first]


def means(hidden: Tensor, segments: Tensor, first: Tensor) -> Tensor:
    """Return [samples, hidden]: the mean over each sample's tokens."""
    weights = tokens_of_samples(segments, first).to(hidden.dtype)
    return weights @ hidden.flatten(0, 1) / weights.sum(dim=1, keepdim=True)


def tokens_of_samples(segments: Tensor, first: Tensor) -> Tensor:
    """Return [samples, rows * length]: which of the flattened tokens belong to each sample."""
    rows, length = segments.shape
    block = torch.arange(rows, device=segments.device)[:, None].expand_as(segments)
    flat = segments.flatten()
    return (block.flatten() == (first // length)[:, None]) & (flat == flat[first][:, None])
