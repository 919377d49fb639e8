"""Linear layers on a CPU whose weights lie as oneDNN's kernels read them.

PyTorch's own linear layer hands oneDNN plain weights in bfloat16, which it lays out anew in every
call: with the few tokens that serving has at a time, that is a quarter to a half of the call
(docs/LAB.md). In float32 it calls MKL, which on processors other than Intel's takes up to three
times as long. A layer's weights are laid out once here, by the operators that torch.compile's own
code for CPUs calls; in bfloat16 what it computes is the same to the bit, in float32 but for the
order of sums. A GELU that follows is computed with the product, and not by another pass over what
was rounded.
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

_TOKENS = 256
"""For how many tokens weights are laid out: it decides about speed alone."""
_NARROWEST = 64
"""Narrower layers, such as heads, are left as they are."""
_GAIN = 0.9
"""A product in float32 has to take less than so much of what PyTorch's own takes."""
_FOLLOWED_BY_GELU: Sequence[tuple[str, str]] = (
    ("dense", "intermediate_act_fn"),
    ("lin1", "activation"),
)
"""What BERT's kin and DistilBERT call a layer and the activation that is all that follows it."""


def why_not(model: nn.Module, dtype: torch.dtype, environ: Mapping[str, str]) -> str | None:
    """Why a model's weights stay as they are; None if they can be laid out.

    Args:
        model: On its device.
        dtype: Its precision.
        environ: AMPHORA_BLOCKED_WEIGHTS.

    Raises:
        ValueError: AMPHORA_BLOCKED_WEIGHTS is neither 0 nor 1.
    """
    asked = environ.get("AMPHORA_BLOCKED_WEIGHTS") or "1"
    if asked not in ("0", "1"):
        raise ValueError(
            f"AMPHORA_BLOCKED_WEIGHTS is {asked!r}. Give 1 (weights of linear layers as oneDNN "
            "reads them) or 0 (as PyTorch has them)."
        )
    if asked == "0":
        return "AMPHORA_BLOCKED_WEIGHTS=0"
    if dtype not in (torch.bfloat16, torch.float32):
        return "only bfloat16 and float32 gain by it"
    if any(weight.device.type != "cpu" for weight in model.parameters()):
        return "it is for CPUs"
    try:
        if dtype == torch.float32:
            return None if _is_faster() else "PyTorch's own products in float32 are as fast"
        is_supported = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        is_supported = False
    return None if is_supported else "this CPU or this build of torch has no kernels for it"


@functools.cache
@torch.inference_mode()
def _is_faster() -> bool:
    """Whether products in float32 gain by it on this CPU: a few milliseconds tell."""
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


def use(
    model: nn.Module,
    answers: Callable[[], Sequence[Tensor]],
    are_same: Callable[[Sequence[Tensor], Sequence[Tensor]], bool],
) -> str:
    """Lay out the weights of the linear layers of `model`, which is not trained any more. While it
    is done a layer's weights are there twice, one after the other.

    Args:
        answers: Those of the model to a few texts.
        are_same: Whether two lists of answers are the same but for rounding.

    Returns:
        Why all is as it was, since the model would answer otherwise; empty if weights are laid out
        and the memory of the plain ones is given back.
    """
    try:
        expected = answers()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    undo = _lay_out(model)
    try:
        fault = "" if are_same(answers(), expected) else "its answers are others then"
    except Exception as error:
        fault = f"{type(error).__name__}: {str(error)[:200]}"
    if fault:
        undo()
    return fault


def _lay_out(model: nn.Module) -> Callable[[], None]:
    """Lay the weights out. Returns what undoes it."""
    counts = Counter(
        id(weight) for module in model.modules() for weight in module.parameters(recurse=False)
    )
    modules: list[Any] = list(model.modules())
    layers = [
        module
        for module in modules
        if type(module) in (nn.Linear, Conv1D)
        and min(module.weight.shape) >= _NARROWEST
        # Those of a masked model's decoder are its embedding's, too.
        and counts[id(module.weight)] == 1
    ]
    activations: list[tuple[nn.Module, str, Any]] = []
    with_gelu = set()
    for parent in model.modules():
        for layer, activation in _FOLLOWED_BY_GELU:
            function = getattr(parent, activation, None)
            is_known = type(parent).__module__.startswith("transformers.models.")
            if is_known and getattr(parent, layer, None) in layers and _is_gelu(function):
                with_gelu.add(id(getattr(parent, layer)))
                activations.append((parent, activation, function))
    for parent, name, _ in activations:
        setattr(parent, name, nn.Identity())
    blocked: list[tuple[Any, Tensor]] = []
    for module in layers:
        weight = module.weight.detach()
        # GPT-2's layers have inputs first.
        rows_out = weight if type(module) is nn.Linear else weight.t().contiguous()
        kept = torch.ops.mkldnn._reorder_linear_weight(rows_out, _TOKENS)
        blocked.append((module, kept))
        does = ("gelu", "none") if id(module) in with_gelu else ("none", "")
        vars(module)["forward"] = functools.partial(_forward, kept, module.bias, *does)
        # Its shape and type can still be read, and whoever else computes with it fails.
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


def _is_gelu(function: Any) -> bool:
    """Whether it is the GELU by the error function, of PyTorch or of transformers."""
    if isinstance(function, nn.GELU):
        return function.approximate == "none"
    is_named = type(function).__name__ == "GELUActivation"
    return is_named and getattr(function, "act", None) is nn.functional.gelu


def _forward(
    weights: Tensor, bias: Tensor | None, activation: str, how: str, inputs: Tensor
) -> Tensor:
    outputs: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weights, bias, activation, [], how)
    return outputs
