"""Tensors of every process in one; through some of them gradients flow back to their processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from recipe.runtime.device import everyones


class _Gather(torch.autograd.Function):
    """All processes' tensors, end to end; backwards, the sum of what all ask of this one's."""

    @staticmethod
    def forward(context: Any, own: Tensor) -> Tensor:
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own.contiguous())
        context.length = len(own)
        return torch.cat(parts)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        summed = gradients[0].contiguous().clone()
        dist.all_reduce(summed)
        start = dist.get_rank() * context.length
        return summed[start : start + context.length]


def gathered(own: Tensor) -> tuple[Tensor, int]:
    """[processes * rows, ...] of `own` [rows, ...], as many in each, and where its rows start.

    In a backward pass every process must take part, as in this one.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return own, 0
    everyones: Tensor = _Gather.apply(own)  # type: ignore[no-untyped-call]
    return everyones, dist.get_rank() * len(own)


def in_order(answered: list[tuple[Tensor, Tensor, Tensor]], count: int) -> tuple[Any, Any]:
    """Logits [samples, ...] and losses [samples] of all processes, in the order of the data.

    Args:
        answered: Rows, logits and losses of each batch, on the device: brought over at the end.
    """
    # On the device, each number of batches would be a shape of its own.
    parts = [torch.cat([each.cpu() for each in part]) for part in zip(*answered, strict=True)]
    logits = np.empty((count, *parts[1].shape[1:]), dtype=np.float32)
    losses = np.empty(count, dtype=np.float32)
    for rows, its_logits, its_losses in everyones(parts):
        real = (rows >= 0).numpy()
        at = rows.numpy()[real]
        logits[at], losses[at] = its_logits.numpy()[real], its_losses.numpy()[real]
    return logits, losses
