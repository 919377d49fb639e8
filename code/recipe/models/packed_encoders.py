"""Models that take several samples in one block of tokens, each with its own head for each sample.

A packed batch is: `input_ids`, `position_ids` (restarting with each sample) and `segments` (the
number of each token's sample in its block, 0 where there is none), of pairs `token_type_ids`, all
[rows, length]; and `first` [samples], where each sample's first token is in the flattened blocks.
Tokens attend to their own segment only, by a 4-D mask: position ids alone let these encoders see
other samples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_outputs import SequenceClassifierOutput

from recipe.data.column_names import TYPE_IDS
from recipe.models import flat_attention

IS_OLDER = transformers.__version__.startswith("4.")
"""Whether models take masks as in transformers 4: [rows, length, length], and not all kinds do."""


def _one_mask(config: Any, own: Tensor, segments: Tensor) -> Any:
    return own


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one kind of model is packed."""

    head: Callable[[Any, Tensor], Any]
    """(model, hidden states [samples, hidden]) to logits, by the model's own modules."""
    masked: Callable[[Any, Tensor], Any]
    """As `head`, of the model with a head for masked tokens: logits over the vocabulary."""
    first_position: Callable[[Any], int] = lambda config: 0
    masks: Callable[[Any, Tensor, Tensor], Any] = _one_mask
    """(configuration, may attend [rows, 1, length, length], segments) to what the model takes."""
    pools_mean: Callable[[Any], bool] = lambda config: False
    in_older: bool = True
    """Whether transformers 4 can give this kind of model a mask for each token."""


def _bert(model: Any, hidden: Tensor) -> Any:
    return model.classifier(model.dropout(model.bert.pooler(hidden[:, None])))


def _distilbert(model: Any, hidden: Tensor) -> Any:
    return model.classifier(model.dropout(model.pre_classifier(hidden).relu()))


def _first_of_features(model: Any, hidden: Tensor) -> Any:
    return model.classifier(hidden[:, None])


def _modernbert(model: Any, hidden: Tensor) -> Any:
    return model.classifier(model.drop(model.head(hidden)))


def _masked_bert(model: Any, hidden: Tensor) -> Any:
    return model.cls(hidden)


def _masked_distilbert(model: Any, hidden: Tensor) -> Any:
    transformed = model.activation(model.vocab_transform(hidden))
    return model.vocab_projector(model.vocab_layer_norm(transformed))


def _masked_electra(model: Any, hidden: Tensor) -> Any:
    return model.generator_lm_head(model.generator_predictions(hidden))


def _masked_roberta(model: Any, hidden: Tensor) -> Any:
    return model.lm_head(hidden)


def _masked_modernbert(model: Any, hidden: Tensor) -> Any:
    return model.decoder(model.head(hidden))


def _modernbert_masks(config: Any, own: Tensor, segments: Tensor) -> dict[str, Tensor]:
    at = torch.arange(segments.shape[1], device=segments.device)
    near = (at[:, None] - at[None, :]).abs() <= config.sliding_window
    return {"full_attention": own, "sliding_attention": own & near}


_ROBERTA = Family(
    head=_first_of_features,
    masked=_masked_roberta,
    first_position=lambda config: int(config.pad_token_id) + 1,
)
FAMILIES: Mapping[str, Family] = {
    "bert": Family(head=_bert, masked=_masked_bert),
    "distilbert": Family(head=_distilbert, masked=_masked_distilbert, in_older=False),
    "electra": Family(head=_first_of_features, masked=_masked_electra),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "modernbert": Family(
        head=_modernbert,
        masked=_masked_modernbert,
        masks=_modernbert_masks,
        pools_mean=lambda config: bool(config.classifier_pooling == "mean"),
        in_older=False,
    ),
}
"""By `model_type`. Each is held to the unpacked model's logits and gradients by a test."""


def family_of(config: PretrainedConfig) -> Family | None:
    """The family of a model with this configuration; None where it cannot be packed."""
    if config._attn_implementation not in ("sdpa", "eager", flat_attention.ATTENTION):
        return None
    family = FAMILIES.get(config.model_type)
    return None if family is None or (IS_OLDER and not family.in_older) else family


def take_packed(model: Any) -> None:
    """Let `model`, of one of FAMILIES, take packed batches beside those it always took."""
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
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
    """[rows, length, hidden] of a packed batch, each token's by its own sample alone.

    Args:
        model: With any head, which is not computed.
        inputs: `input_ids`, `position_ids` and maybe `token_type_ids`; of a row without blocks also
            `starts` and `longest` (`recipe.batching.flat`).
        encode: What is called in the place of the model below its head, if not that itself.
    """
    types = {name: inputs[name] for name in (TYPE_IDS,) if name in inputs}
    if IS_OLDER:
        # By itself transformers 4 has token types for as many tokens as a sample may have only.
        types = {TYPE_IDS: torch.zeros_like(segments), **types}
    if "starts" in inputs:
        attention = flat_attention.inputs_of(inputs["starts"], inputs["longest"])
        if family.masks is not _one_mask:
            # Of models with windows: flat attention knows its layer's by itself.
            mask = attention["attention_mask"]
            attention["attention_mask"] = {"full_attention": mask, "sliding_attention": mask}
    else:
        own = segments[:, None, :, None] == segments[:, None, None, :]
        masks = family.masks(model.config, own, segments)
        attention = {"attention_mask": _as_taken(masks, model.config)}
    output = (encode or model.base_model)(
        input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], **attention, **types
    )
    hidden: Tensor = output.last_hidden_state
    return hidden


def _as_taken(mask: Any, config: Any) -> Any:
    """Masks for scaled_dot_product_attention stay boolean, eager attention adds its mask."""
    if isinstance(mask, dict):
        return {name: _as_taken(each, config) for name, each in mask.items()}
    if IS_OLDER:
        return mask[:, 0]  # which the model makes an added one of
    if config._attn_implementation in ("sdpa", flat_attention.ATTENTION):
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, torch.finfo().min)


def firsts(hidden: Tensor, segments: Tensor, first: Tensor) -> Tensor:
    return hidden.flatten(0, 1)[first]


def means(hidden: Tensor, segments: Tensor, first: Tensor) -> Tensor:
    """[samples, hidden]: the mean over each sample's tokens."""
    length = segments.shape[1]
    block = torch.arange(len(segments), device=segments.device)[:, None].expand_as(segments)
    mine = (block.flatten() == (first // length)[:, None]) & (
        segments.flatten() == segments.flatten()[first][:, None]
    )
    weights = mine.to(hidden.dtype)
    return weights @ hidden.flatten(0, 1) / weights.sum(dim=1, keepdim=True)
