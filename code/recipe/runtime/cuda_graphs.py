"""What a compiled model's answers need where a CUDA graph computes them (reduce-overhead).

A graph writes its outputs to the same memory each time: who keeps one over the next call copies it.
The outputs of a compiled model are treated so on every device and in every mode; a copy is cheap.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def mark_call(device: torch.device) -> None:
    """Say that a call follows, and that nothing of the calls before it is read any more."""
    if device.type == "cuda":
        mark: Any = torch.compiler.cudagraph_mark_step_begin  # which has no annotations
        mark()


@contextlib.contextmanager
def call(model: nn.Module, keeps_gradients: bool) -> Iterator[None]:
    """A forward and a backward pass of a compiled model.

    Autograd takes over the first gradients of an optimizer step as they are: memory of the graph,
    which the step's next batch would write over (pytorch#96693: a wrong sum, in silence).

    Args:
        keeps_gradients: Whether another batch adds to the gradients, which are then copied.
    """
    weights = [each for each in model.parameters() if each.requires_grad]
    unset = [each for each in weights if each.grad is None] if keeps_gradients else []
    mark_call(weights[0].device if weights else torch.device("cpu"))
    yield
    for weight in unset:
        if weight.grad is not None:
            weight.grad = weight.grad.clone()
