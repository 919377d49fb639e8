"""Attention of samples that are end to end in one row; each token attends to its sample only.

On CUDA devices of compute capability 8.0 and later, this is PyTorch's variable-length flash
attention, with dropout, windows, grouped queries and gradients: without blocks or masks, so that
every sample fits. Other devices compute the same interface sample by sample, which is slow; tests
compare models with it.

A model gets it by `use`. A call is flat if it has `cu_seq_lens_q`, the offset of each sample in the
row and the end of the row, as transformers passes them to flash attention. All other calls (padded
batches, generation) use scaled dot product attention with a mask.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from recipe.models import lora

ATTENTION = "flat"
"""The `config._attn_implementation` of a model that takes flat batches."""
_LOWEST_CAPABILITY = (8, 0)
_WIDEST_HEAD = 256
_DTYPES = (torch.bfloat16, torch.float16)


def why_not(config: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a model cannot take flat batches on a device; None if it can. `dtype` is the
    precision of attention, by autocast if that is on."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "attention of varying lengths is for CUDA devices"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LOWEST_CAPABILITY:
        return f"this GPU has compute capability {capability[0]}.{capability[1]}, below 8.0"
    if dtype not in _DTYPES:
        return f"flash attention does not compute in {str(dtype).removeprefix('torch.')}"
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if width % 8 or width > _WIDEST_HEAD:
        return f"its heads are {width} wide: flash attention takes multiples of 8 up to 256"
    if getattr(config, "attn_logit_softcapping", None):
        return "its attention caps its scores"
    return None


def use(model: Any) -> None:
    """Let `model` also take flat batches."""
    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    lora.bare(model).set_attn_implementation(ATTENTION)


def is_used(config: Any) -> bool:
    """Return whether a model with this configuration takes flat batches."""
    return bool(config._attn_implementation == ATTENTION)


def convert_mask(mask: Tensor, config: Any) -> Tensor:
    """Return an attention mask in the form that a model takes: boolean for scaled dot product
    attention, added to the scores for all others."""
    if config._attn_implementation in ("sdpa", ATTENTION):
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, torch.finfo().min)


def inputs_of(starts: Tensor, longest: int, has_windows: bool = False) -> dict[str, Any]:
    """Return a model's inputs besides its `input_ids` and `position_ids` [1, tokens].

    The mask is never read. It keeps transformers from making a mask of all tokens by all tokens.

    Args:
        starts: int32 [samples + 1], offsets of samples in the row, and its end; a sample may be
            empty.
        longest: Tokens of the longest sample, at least.
        has_windows: Whether the model takes a mask for each kind of layer.
    """
    mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=starts.device)
    return {
        "attention_mask": {"full_attention": mask, "sliding_attention": mask}
        if has_windows
        else mask,
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return attention as transformers' AttentionInterface asks for it.

    Args:
        query: [1, heads, tokens, width]; key and value may have fewer heads, which divide them.
        attention_mask: For calls that are not flat.
        sliding_window: A token sees tokens whose distance is below this number.

    Returns:
        [1, tokens, heads, width], and no weights.
    """
    starts = kwargs.get("cu_seq_lens_q")
    if starts is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
        return output, None
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = None if sliding_window is None else sliding_window - 1
    if query.device.type != "cpu":
        dtype = query.dtype
        if dtype == torch.float32 and torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")  # rotary positions made it float32
        # [tokens, heads, width]
        flat = [states[0].transpose(0, 1).to(dtype) for states in (query, key, value)]
        output = torch.ops.aten._flash_attention_forward(
            *flat,
            starts,
            starts,
            kwargs["max_length_q"],
            kwargs["max_length_k"],
            dropout,
            causal,
            False,
            scale=scale,
            window_size_left=window,
            window_size_right=0 if causal and window is not None else window,
        )[0]
        return output[None], None
    # Sample by sample.
    parts, device = [], query.device
    for begin, end in itertools.pairwise(starts.tolist()):
        positions = torch.arange(end - begin, device=device)
        before = positions[:, None] - positions[None, :]
        visible = before >= 0 if causal else torch.ones_like(before, dtype=torch.bool)
        if window is not None:
            visible &= before.abs() <= window
        queries, keys, values = (states[:, :, begin:end] for states in (query, key, value))
        parts.append(
            functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=visible, dropout_p=dropout, scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        )  # fmt: skip
    return torch.cat(parts, dim=2).transpose(1, 2), None
