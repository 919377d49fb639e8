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
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from recipe.models import lora

ATTENTION = "flat"
"""The `config._attn_implementation` of a model that takes flat batches."""
LOWEST_CAPABILITY = (8, 0)
_WIDEST_HEAD = 256
_DTYPES = (torch.bfloat16, torch.float16)
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor starts, float dropout, bool causal, "
    "SymInt? window, float scale"
)
"""Those of the operators below: versions of torch differ in how they read annotations."""


def why_not(
    config: Any,
    device: torch.device,
    dtype: torch.dtype,
    capability: tuple[int, int] | None = None,
) -> str | None:
    """Return why a model cannot take flat batches on a device; None if it can. `dtype` is the
    precision of attention, by autocast if that is on; `capability` that of a GPU that is not
    here."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "attention of varying lengths is for CUDA devices"
    capability = capability or torch.cuda.get_device_capability(device)
    if capability < LOWEST_CAPABILITY:
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
    kind, dtype, longest = query.device.type, query.dtype, kwargs["max_length_q"]
    if dtype == torch.float32 and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)  # rotary positions made it float32
    # [tokens, heads, width]
    flat = [states[0].transpose(0, 1).to(dtype) for states in (query, key, value)]
    if kind == "cpu":
        return attend_samples(*flat, starts, dropout, causal, window, scale)[0][None], None
    output = torch.ops.aten._flash_attention_forward(
        *flat,
        starts,
        starts,
        longest,
        kwargs["max_length_k"],
        dropout,
        causal,
        False,
        scale=scale,
        window_size_left=window,
        window_size_right=0 if causal and window is not None else window,
    )[0]
    return output[None], None


# An operator to compilers and fake tensors, as flash attention is: both read `starts`.
@torch.library.custom_op(
    "amphora::attend_samples", mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)"
)
def attend_samples(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    dropout: float,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return attention [tokens, heads, width], and the seed [1] of its dropout."""
    seed = torch.randint(1 << 62, (1,)) if dropout else torch.zeros(1, dtype=torch.int64)
    options = starts, dropout, causal, window, scale, seed
    parts = [
        (weights * noise @ values).transpose(0, 1)
        for _, _, values, weights, noise, _ in _each_sample(query, key, value, *options)
    ]
    return torch.cat(parts).to(query.dtype), seed


@torch.library.custom_op(
    "amphora::attend_samples_backward",
    mutates_args=(),
    schema=f"(Tensor gradient, {_ARGUMENTS}, Tensor seed) -> (Tensor, Tensor, Tensor)",
)
def _sample_gradients(gradient: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    results = [torch.zeros_like(part) for part in inputs[:3]]
    scale = inputs[7]
    for queries, keys, values, weights, noise, span in _each_sample(*inputs):
        received = gradient[span].transpose(0, 1).to(weights.dtype)
        of_weights = received @ values.mT * noise
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
        of_parts = of_scores @ keys, of_scores.mT @ queries, (weights * noise).mT @ received
        for result, of_part in zip(results, of_parts, strict=True):
            # Heads that share a key or a value add up.
            groups = result.shape[1], len(of_part) // result.shape[1]
            shared = of_part.reshape(*groups, *of_part.shape[1:]).sum(1)
            result[span] = shared.transpose(0, 1).to(result.dtype)
    return results[0], results[1], results[2]


def _each_sample(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    dropout: float,
    causal: bool,
    window: int | None,
    scale: float,
    seed: Tensor,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, slice]]:
    """Yield of each sample queries, keys and values [heads, tokens, width], the weights before
    dropout and the factors of dropout [heads, tokens, tokens], and its place in the row."""
    generator = torch.Generator().manual_seed(int(seed))
    wide = torch.promote_types(query.dtype, torch.float32)
    for begin, end in itertools.pairwise(starts.tolist()):
        span = slice(begin, end)
        queries, keys, values = (
            part[span]
            .transpose(0, 1)
            .to(wide)
            .repeat_interleave(query.shape[1] // part.shape[1], 0)
            for part in (query, key, value)
        )
        positions = torch.arange(end - begin)
        before = positions[:, None] - positions[None, :]
        visible = before >= 0 if causal else torch.ones_like(before, dtype=torch.bool)
        if window is not None:
            visible &= before.abs() <= window
        scores = (queries @ keys.mT * scale).masked_fill(~visible, -torch.inf)
        kept = torch.rand(scores.shape, generator=generator) >= dropout
        yield queries, keys, values, scores.softmax(-1), kept.to(wide) / (1 - dropout), span


@attend_samples.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(1, dtype=torch.int64)


@_sample_gradients.register_fake
def _(gradient: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(part) for part in inputs[:3])


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.dropout, ctx.causal, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)  # the output, too, as flash attention does


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
    *tensors, _, seed = ctx.saved_tensors
    options = ctx.dropout, ctx.causal, ctx.window, ctx.scale
    return *_sample_gradients(gradient, *tensors, *options, seed), *[None] * 5


attend_samples.register_autograd(_backward, setup_context=_keep_inputs)
