"""Causal language models that take several documents in one block of tokens.

A packed batch has `input_ids`, `position_ids` and `segments` as in `packed_encoders`. A 4-D mask
lets tokens attend to earlier tokens of their segment only: with position ids alone, GPT-2 sees
other documents in some attention kernels. `positions`, `targets`, `owners` and `samples` are those
of `document_batches`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig
from transformers.modeling_outputs import CausalLMOutput

from recipe.batching.document_batches import NOT_LEARNED
from recipe.models import flat_attention, lora

DECODERS = (
    "gemma",
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
    "starcoder2",
)
"""Every packed `model_type`; a test compares logits, loss and gradients with unpacked ones."""
_MOST_LOGITS = 1 << 26  # at once, in float32: 256 MB
_GPU_SHARE = 32  # a GPU's memory for logits at once, if more
States = tuple[Tensor, Callable[[Tensor], Tensor], int]
"""Last states [rows, length, hidden], the head that converts some of them to logits, and the size
of the vocabulary."""
ReadStates = Callable[[Any, Callable[..., Any], dict[str, Any]], States]
"""Computes the states of a batch from a model, its usual forward, and the other inputs."""


def can_be_packed(config: PretrainedConfig) -> bool:
    """Return whether a model with this configuration takes packed documents."""
    known = ("sdpa", "eager", flat_attention.ATTENTION)
    return config.model_type in DECODERS and config._attn_implementation in known


def patch_forward_for_documents(model: Any) -> None:
    """Let `model` also take batches of documents.

    It returns what `patch_forward_for_tokens` does.
    """
    patch_forward_for_tokens(model, _states)


def patch_forward_for_tokens(model: Any, read: ReadStates, smoothing: float = 0.0) -> None:
    """Let `model` also take batches with the learned tokens of `document_batches`.

    For these it returns, instead of logits, [samples, 2] in float32: the sum of the losses of a
    sample's learned tokens, and how many of these the model predicts.

    Args:
        smoothing: Share of the target spread evenly over all tokens in training.
    """
    lora.patch_forward(model, functools.partial(_forward, read, smoothing))


def _forward(
    read: ReadStates, smoothing: float, model: Any, usual: Callable[..., Any],
    *args: Any, **inputs: Any,
) -> Any:  # fmt: skip
    positions = inputs.pop("positions", None)
    if positions is None:
        return usual(*args, **inputs)
    targets, owners, samples = (inputs.pop(name) for name in ("targets", "owners", "samples"))
    states, head, vocabulary = read(model, usual, inputs)
    share = smoothing if model.training else 0.0
    tokens = token_losses(states.flatten(0, 1)[positions], head, targets, vocabulary, share)
    sums = torch.zeros((samples, 2), dtype=tokens.dtype, device=tokens.device)
    return CausalLMOutput(logits=sums.index_add(0, owners, tokens))


def _states(model: Any, usual: Callable[..., Any], inputs: dict[str, Any]) -> States:
    if model.config.model_type in DECODERS:
        options: dict[str, Any] = {"attention_mask": inputs.get("attention_mask")}
        if "starts" in inputs:
            has_windows = len(set(getattr(model.config, "layer_types", None) or ())) > 1
            options = flat_attention.inputs_of(inputs["starts"], inputs["longest"], has_windows)
            options["position_ids"] = inputs["position_ids"]
        elif (segments := inputs.get("segments")) is not None:
            order = torch.arange(segments.shape[1], device=segments.device)
            before = order[:, None] - order[None, :]
            visible = (segments[:, None, :, None] == segments[:, None, None, :]) & (before >= 0)
            kinds = getattr(model.config, "layer_types", None)
            window = getattr(model.config, "sliding_window", None)
            # [rows, 1, length, length], by kind of layer if there are two
            near: Any = None
            if window is not None and (kinds is None or "sliding_attention" in kinds):
                near = flat_attention.convert_mask(visible & (before < window), model.config)
            masks = near
            if near is None or kinds is not None:
                full = flat_attention.convert_mask(visible, model.config)
                kinds_of_masks = {"full_attention": full, "sliding_attention": near}
                masks = full if near is None else kinds_of_masks
            options = {"attention_mask": masks, "position_ids": inputs["position_ids"]}
        output = model.base_model(input_ids=inputs["input_ids"], use_cache=False, **options)
        states, head = output.last_hidden_state, model.get_output_embeddings()
    else:
        inner = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        states, head = usual(**inner, use_cache=False).logits, identity_head
    vocabulary = head.weight.shape[0] if hasattr(head, "weight") else states.shape[-1]
    return states, head, int(vocabulary)


def identity_head(logits: Tensor) -> Tensor:
    """Return the logits unchanged: the head of `token_losses` for a model that returns logits."""
    return logits


def token_losses(
    states: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    vocabulary: int,
    smoothing: float = 0.0,
) -> Tensor:
    """Return [slots, 2]: the loss of each token, and whether it is predicted; 0 in unused slots.

    More logits than `most_logits` are computed in parts, and again in the backward pass.

    Args:
        states: [slots, hidden].
        head: States to logits over `vocabulary` tokens.
        targets: [slots], NOT_LEARNED in unused ones.
        smoothing: Share of the target spread evenly over all tokens.
    """
    parts = -(-len(targets) * vocabulary // most_logits(states.device))
    if parts <= 1:
        return _chunk_losses(states, head, targets, smoothing)
    losses_of_parts = [
        checkpoint(_chunk_losses, part, head, part_targets, smoothing, use_reentrant=False)
        for part, part_targets in zip(states.chunk(parts), targets.chunk(parts), strict=True)
    ]
    return torch.cat(losses_of_parts)


def most_logits(device: torch.device) -> int:
    """Return how many logits are in memory at once.

    It depends on a GPU's total memory, not on its free memory, so that a resumed training adds its
    sums in the same order.
    """
    if device.type != "cuda":
        return _MOST_LOGITS
    memory = int(torch.cuda.get_device_properties(device).total_memory)
    return max(_MOST_LOGITS, memory // (4 * _GPU_SHARE))


def _chunk_losses(
    states: Tensor, head: Callable[[Tensor], Tensor], targets: Tensor, smoothing: float
) -> Tensor:
    logits = head(states).float()
    losses = functional.cross_entropy(
        logits, targets, reduction="none", ignore_index=NOT_LEARNED, label_smoothing=smoothing
    )
    is_right = logits.detach().argmax(dim=-1) == targets
    return torch.stack([losses, is_right.float()], dim=-1)
