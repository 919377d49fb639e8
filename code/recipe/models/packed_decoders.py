"""Causal language models that take several documents in one block of tokens.

A packed batch has `input_ids`, `position_ids` and `segments` as in `packed_encoders`. A 4-D mask
lets tokens attend to earlier tokens of their segment only: with position ids alone, GPT-2 sees
other documents in some attention kernels. `positions`, `targets`, `owners` and `samples` are those
of `document_batches`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig
from transformers.modeling_outputs import CausalLMOutput

from recipe.batching.document_batches import NOT_LEARNED
from recipe.errors import HyperparameterError, ModelError
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
ROUTER_WEIGHT = "router_aux_loss_coef"
_MOST_LOGITS = 1 << 26  # at once, in float32: 256 MB
_GPU_SHARE = 32  # a GPU's memory for logits at once, if more


class States(NamedTuple):
    """What a model computes before its head."""

    last: Tensor
    """[rows, length, hidden]"""
    head: Callable[[Tensor], Tensor]
    """Converts some of them to logits."""
    vocabulary: int
    router_loss: Tensor | None = None
    """The weighted loss of a mixture of experts, by which experts are used equally often."""


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
    sample's learned tokens, and how many of these the model predicts. In training, the loss of each
    token includes that of the batch's routers.

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
    states = read(model, usual, inputs)
    share = smoothing if model.training else 0.0
    chosen = states.last.flatten(0, 1)[positions]
    tokens = token_losses(chosen, states.head, targets, states.vocabulary, share)
    if model.training and states.router_loss is not None:
        is_used = (targets != NOT_LEARNED).to(tokens.dtype)
        shares = torch.stack([is_used, torch.zeros_like(is_used)], dim=-1)
        tokens = tokens + states.router_loss * shares
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
        head = model.get_output_embeddings()
        return States(output.last_hidden_state, head, model.config.vocab_size)
    inner = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    output = usual(**inner, use_cache=False)
    router_loss = getattr(output, "aux_loss", None)
    if router_loss is not None:
        router_loss = router_loss * router_weight(model)
    return States(output.logits, identity_head, output.logits.shape[-1], router_loss)


def router_weight(model: Any) -> float:
    """Return the factor of the router loss of a mixture of experts, as its class applies it."""
    config = model.config.get_text_config()
    for owner, name in ((model, ROUTER_WEIGHT), (model, "aux_loss_coef"), (config, ROUTER_WEIGHT)):
        if (weight := getattr(owner, name, None)) is not None:
            return float(weight)
    raise ModelError(
        f"{type(model).__name__} has a router loss, but no {ROUTER_WEIGHT}.",
        "Set output_router_logits to false in its config.json.",
    )


def set_router_weight(model: Any, weight: float) -> None:
    """Train with the router loss, with a factor; 0 trains without it. The saved config.json has
    both.

    Raises:
        HyperparameterError: The model is not a mixture of experts with such a loss.
    """
    inner = lora.bare(model)
    config = inner.config.get_text_config()
    if not hasattr(config, "output_router_logits") or not hasattr(config, ROUTER_WEIGHT):
        raise HyperparameterError(
            f"Hyperparameter {ROUTER_WEIGHT} has value {weight}, but a model of type "
            f"{config.model_type} has no router loss.",
            "Leave it out.",
        )
    config.output_router_logits = weight > 0
    config.router_aux_loss_coef = weight
    if hasattr(inner, ROUTER_WEIGHT):
        inner.router_aux_loss_coef = weight


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
