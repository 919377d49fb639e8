"""Gather tensors of all processes, some with gradients that flow back to their processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from recipe.runtime.device import everyones


class _Gather(torch.autograd.Function):
    """Concatenates the tensors of all processes; backward, sums gradients of the local part."""

    @staticmethod
    def forward(context: Any, local: Tensor) -> Tensor:
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, local.contiguous())
        context.length = len(local)
        return torch.cat(parts)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        summed = gradients[0].contiguous().clone()
        dist.all_reduce(summed)
        start = dist.get_rank() * context.length
        return summed[start : start + context.length]


def gathered(local: Tensor) -> tuple[Tensor, int]:
    """Gather `local` [rows, ...] to [processes * rows, ...]; also return where its rows start.

    A collective of all processes, forward and backward, with the same number of rows in each.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return local, 0
    whole: Tensor = _Gather.apply(local)  # type: ignore[no-untyped-call]
    return whole, dist.get_rank() * len(local)


def restore_order(outcomes: list[tuple[Tensor, Tensor, Tensor]], count: int) -> tuple[Any, Any]:
    """Return logits [samples, ...] and losses [samples] of all processes, in the data's order.

    Args:
        outcomes: Rows, logits and losses of each batch, on the device.
    """
    # Copied before concatenation: on the device, each number of batches would be another shape.
    parts = [torch.cat([part.cpu() for part in kind]) for kind in zip(*outcomes, strict=True)]
    logits = np.empty((count, *parts[1].shape[1:]), dtype=np.float32)
    losses = np.empty(count, dtype=np.float32)
    for rows, its_logits, its_losses in everyones(parts):
        real = (rows >= 0).numpy()
        positions = rows.numpy()[real]
        logits[positions], losses[positions] = its_logits.numpy()[real], its_losses.numpy()[real]
    return logits, losses
