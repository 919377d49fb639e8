"""Faster dropout and attention for training on a CPU.

PyTorch draws a dropout mask number by number, and its attention with dropout and a mask is not
fused. Both together cost a third of a step of packed tweets. The backward pass of its attention in
bfloat16 takes several times as long as matrix products (docs/LAB.md). Results are those of the same
functions, and random numbers come from the same generator, whose state is in checkpoints.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from recipe.models import lora

ATTENTION = "cpu_packed"
"""The `config._attn_implementation` of a model with `attend`, for packed blocks."""
PADDED_ATTENTION = "cpu_padded"
"""The same with `attend_padded`."""
_LONGEST = 256
"""Tokens: the scores that `attend` keeps for the backward pass grow with their square."""
_VECTOR, _MOST_SPARE = 32, 15
"""PyTorch's softmax in bfloat16 takes 2 to 5 times as long if the number of keys is not a multiple
of 32. Up to 15 additional, masked keys cost less (docs/LAB.md)."""
_LEVELS = 1 << 16
_LOWEST = -(1 << 15)
_ALL_BITS = -(1 << 63)
_dropout = functional.dropout


def lighten(model: nn.Module, packed_attention: bool, padded_attention: bool = False) -> None:
    """Use this module's dropout in this process, and one of its attentions in `model` if its class
    allows that.

    The whole process uses it, since BART and similar models call PyTorch's function instead of a
    layer, and recomputation by gradient checkpointing needs the same dropout.

    Args:
        packed_attention: Whether the model gets `attend`, for samples packed in blocks.
        padded_attention: Whether the model gets `attend_padded`, if it has PyTorch's attention.
    """
    vars(functional)["dropout"] = dropout
    inner = lora.bare(model)
    if packed_attention and getattr(inner, "_supports_attention_backend", False):
        AttentionInterface.register(ATTENTION, attend)
        AttentionMaskInterface.register(ATTENTION, eager_mask)
        inner.set_attn_implementation(ATTENTION)
    elif padded_attention and inner.config._attn_implementation == "sdpa":
        # BART and T5 look theirs up by name, too, although they do not declare the support above.
        can_be_set = getattr(inner, "_can_set_attn_implementation", None)
        if can_be_set is not None and can_be_set():
            AttentionInterface.register(PADDED_ATTENTION, attend_padded)
            AttentionMaskInterface.register(PADDED_ATTENTION, sdpa_mask)
            inner.set_attn_implementation(PADDED_ATTENTION)


def noise(reference: Tensor, p: float) -> Tensor:
    """Return 0 with probability p (to 16 bits), else 1 / (1 - p), in the shape of `reference`.

    16 random bits decide on an element: four of them come from one draw of the generator.
    """
    if p >= 1:
        return torch.zeros_like(reference)
    dropped = min(max(round(p * _LEVELS), 1), _LEVELS - 1)
    scale = torch.tensor(_LEVELS / (_LEVELS - dropped), dtype=reference.dtype)
    count = reference.numel()
    drawn = torch.empty(math.ceil(count / 4), dtype=torch.int64).random_(_ALL_BITS, None)
    bits = drawn.view(torch.int16)[:count].view(reference.shape)
    kept = bits.ge_(_LOWEST + dropped)  # 0 or 1
    if reference.dtype.itemsize == 2:
        # 0 or 1 times the scale's own bits: converting integers would cost more than drawing them.
        return kept.mul_(int(scale.view(torch.int16))).view(reference.dtype)
    return kept.to(reference.dtype).mul_(scale)


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Replace functional.dropout, which nn.Dropout calls too; on a CPU it uses `noise`."""
    if not training or not 0 < p <= 1 or input.device.type != "cpu":
        return _dropout(input, p, training, inplace)
    return input.mul_(noise(input, p)) if inplace else input * noise(input, p)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return attention in the form of transformers' AttentionInterface.

    Args:
        query, key, value: [rows, heads, length, width].
        attention_mask: Numbers added to the scores, [rows, 1, length, length].

    Returns:
        [rows, length, heads, width], and no weights.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    length = key.shape[2]
    by_autocast = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if by_autocast else query.dtype
    spare = -length % _VECTOR if dtype == torch.bfloat16 else 0
    if spare > _MOST_SPARE:
        spare = 0
    if spare:
        key, value = (functional.pad(states, (0, 0, 0, spare)) for states in (key, value))
    scores = torch.matmul(query * scale, key.transpose(2, 3))
    added = attention_mask
    if added is not None:
        lowest = torch.finfo(scores.dtype).min  # float32's lowest would be -inf in bfloat16
        added = added.to(scores.dtype).clamp_min(lowest)
    if spare:
        added = scores.new_zeros((1, 1, 1, length)) if added is None else added
        added = functional.pad(added, (0, spare), value=-math.inf)
    if added is not None:
        scores = scores + added
    weights = scores.softmax(dim=-1)
    if dropout > 0:
        weights = weights * noise(weights, dropout)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), None


def attend_padded(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return what transformers' "sdpa" computes, by `attend` where that is faster: in bfloat16, of
    few tokens, for a backward pass. The arguments and the result are those of `attend`, but for:

    Args:
        attention_mask: [rows or 1, heads or 1, length, length], True for positions to attend to, or
            numbers added to the scores.
        position_bias: Added to the scores; same shape.
    """
    length, longest = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = attention_mask is None and length > 1 and causal
    faster = query.dtype == torch.bfloat16 and query.requires_grad and longest <= _LONGEST
    usual = key.shape[1] == query.shape[1] and (not causal or length == longest)
    if not (faster and usual) or any(kwargs.get(name) is not None for name in ("cache", "softcap")):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout,
            is_causal=is_causal, position_bias=position_bias, **kwargs,
        )  # fmt: skip
    seen = torch.ones(length, length, dtype=torch.bool).tril() if causal else attention_mask
    added = position_bias
    if seen is not None:
        if seen.dtype == torch.bool:
            lowest = torch.finfo(query.dtype).min
            seen = torch.zeros(seen.shape, dtype=query.dtype).masked_fill(~seen, lowest)
        added = seen if added is None else added + seen
    return attend(module, query, key, value, added, scaling, dropout)
