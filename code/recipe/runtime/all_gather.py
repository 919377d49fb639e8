"""Gather tensors of all processes, some with gradients that flow back to their processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from recipe.runtime.device import gather_objects

Array = npt.NDArray[Any]


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


def gather_rows(local: Tensor) -> tuple[Tensor, int]:
    """Gather `local` [rows, ...] to [processes * rows, ...]; also return where its rows start.

    A collective of all processes, forward and backward, with the same number of rows in each.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return local, 0
    whole: Tensor = _Gather.apply(local)  # type: ignore[no-untyped-call]
    return whole, dist.get_rank() * len(local)


class SampleOutputs:
    """Logits [samples, ...] and losses [samples] of an evaluation, on the host, in the data's
    order."""

    def __init__(self, count: int) -> None:
        self._rows: list[Array] = []
        self._logits: Array | None = None
        self._losses = np.empty(count, dtype=np.float32)

    def add(self, rows: Tensor, logits: Tensor, losses: Tensor) -> None:
        """Add the outputs of a batch, from the host; rows of -1 are unused slots."""
        real = (rows >= 0).numpy()
        self._rows.append(rows.numpy()[real])
        self._write(self._rows[-1], logits.numpy()[real], losses.numpy()[real])

    def gather(self) -> tuple[Any, Array]:
        """Return the logits and losses of all processes."""
        if dist.is_initialized() and self._logits is not None:
            rows = np.concatenate(self._rows)
            for part in gather_objects((rows, self._logits[rows], self._losses[rows])):
                self._write(*part)
        return self._logits, self._losses

    def _write(self, rows: Array, logits: Array, losses: Array) -> None:
        if self._logits is None:
            self._logits = np.empty((len(self._losses), *logits.shape[1:]), dtype=np.float32)
        self._logits[rows], self._losses[rows] = logits, losses
