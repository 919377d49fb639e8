"""A tensor of every process in one, through which gradients flow back to their processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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
