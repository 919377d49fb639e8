"""Store the weights of linear layers in oneDNN's layout, for serving on a CPU.

In bfloat16, PyTorch passes plain weights to oneDNN, which reorders them in every call: a quarter to
a half of the time with the few tokens of a serving batch. In float32, PyTorch calls MKL, which
takes up to three times as long on processors other than Intel's.

This module reorders the weights once, by the operators that torch.compile's CPU backend uses. The
results are bitwise equal in bfloat16, and differ by the order of sums in float32. A GELU that
follows is fused with the product.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from recipe.runtime import device

_TOKENS = 256
"""Number of tokens to optimize the layout for; it affects only the speed."""
_NARROWEST = 64
"""Narrower layers, such as heads, keep their layout."""
_GAIN = 0.9
"""In float32, use the layout only if it takes less than this share of PyTorch's time."""
_FOLLOWED_BY_GELU: Sequence[tuple[str, str]] = (
    ("dense", "intermediate_act_fn"),
    ("lin1", "activation"),
)
"""Names of layers and of the activations that alone follow them: BERT and similar, DistilBERT."""


def why_not(model: nn.Module, dtype: torch.dtype, environ: Mapping[str, str]) -> str | None:
    """Return why a model's weights keep their layout; None if they can be reordered. Raise
    ValueError if AMPHORA_BLOCKED_WEIGHTS is neither 0 nor 1."""
    layouts = "oneDNN's layout for the weights of linear layers", "PyTorch's"
    if not device.is_on(environ, "AMPHORA_BLOCKED_WEIGHTS", *layouts):
        return "AMPHORA_BLOCKED_WEIGHTS=0"
    if dtype not in (torch.bfloat16, torch.float32):
        return "only bfloat16 and float32 are faster with it"
    if any(weight.device.type != "cpu" for weight in model.parameters()):
        return "it is for CPUs"
    try:
        if dtype == torch.float32:
            return None if _is_faster() else "PyTorch's float32 products are as fast"
        is_supported = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        is_supported = False
    return None if is_supported else "this CPU or this build of torch has no kernels for it"


@functools.cache
@torch.inference_mode()
def _is_faster() -> bool:
    """Measure, in a few milliseconds, whether float32 products are faster with oneDNN's layout."""
    weights = torch.ones(1024, 512)
    kept = torch.ops.mkldnn._reorder_linear_weight(weights, _TOKENS)

    def seconds(product: Callable[[Tensor], Tensor], inputs: Tensor) -> float:
        taken = []
        for _ in range(8):
            began = time.perf_counter()
            product(inputs)
            taken.append(time.perf_counter() - began)
        return min(taken)

    def blocked(inputs: Tensor) -> Tensor:
        return _forward(kept, None, "none", "", inputs)

    def plain(inputs: Tensor) -> Tensor:
        return nn.functional.linear(inputs, weights)

    return all(
        seconds(blocked, inputs) < _GAIN * seconds(plain, inputs)
        for inputs in (torch.ones(4, 512), torch.ones(64, 512))
    )


def reorder(model: nn.Module, fuses: bool = True) -> Callable[[], None]:
    """Reorder the weights of the linear layers of a model, which must not be trained afterwards,
    and return a function that restores them.

    Layers are reordered one after the other, so only one layer's weights are in memory twice.

    Args:
        fuses: Whether a GELU after a layer is fused; not if adapters add to the layer's outputs.
    """
    counts = Counter(
        id(weight) for module in model.modules() for weight in module.parameters(recurse=False)
    )
    modules: list[Any] = list(model.modules())
    first = next(model.parameters(), None)
    layers = [
        module
        for module in modules
        if type(module) in (nn.Linear, Conv1D)
        and min(module.weight.shape) >= _NARROWEST
        # Tied weights, such as those of a masked model's decoder, stay, and those by which
        # transformers tells the model's device: XLM-RoBERTa's head comes first.
        and counts[id(module.weight)] == 1
        and module.weight is not first
    ]
    activations: list[tuple[nn.Module, str, Any]] = []
    with_gelu = set()
    for parent in model.modules():
        for layer, activation in _FOLLOWED_BY_GELU:
            function: Any = getattr(parent, activation, None)
            # The exact GELU, of PyTorch or of transformers.
            is_gelu = isinstance(function, nn.GELU) and function.approximate == "none"
            if type(function).__name__ == "GELUActivation":
                is_gelu = function.act is nn.functional.gelu
            is_known = type(parent).__module__.startswith("transformers.models.")
            if fuses and is_gelu and is_known and getattr(parent, layer, None) in layers:
                with_gelu.add(id(getattr(parent, layer)))
                activations.append((parent, activation, function))
    for parent, name, _ in activations:
        setattr(parent, name, nn.Identity())
    blocked: list[tuple[Any, Tensor]] = []
    for module in layers:
        weight = module.weight.detach()
        # Conv1D (GPT-2) stores its weights transposed.
        rows_out = weight if type(module) is nn.Linear else weight.t().contiguous()
        kept = torch.ops.mkldnn._reorder_linear_weight(rows_out, _TOKENS)
        blocked.append((module, kept))
        fused = ("gelu", "none") if id(module) in with_gelu else ("none", "")
        vars(module)["forward"] = functools.partial(_forward, kept, module.bias, *fused)
        # Keeps shape and dtype readable; any computation with it fails.
        empty = torch.empty_like(weight, device="meta")
        module.weight = nn.Parameter(empty, requires_grad=False)

    def undo() -> None:
        for module, kept in blocked:
            vars(module).pop("forward")
            weight = kept.to_dense()
            weight = weight if type(module) is nn.Linear else weight.t().contiguous()
            module.weight = nn.Parameter(weight, requires_grad=False)
        for parent, name, function in activations:
            setattr(parent, name, function)

    return undo


def _forward(
    weights: Tensor, bias: Tensor | None, activation: str, how: str, inputs: Tensor
) -> Tensor:
    outputs: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weights, bias, activation, [], how)
    return outputs
