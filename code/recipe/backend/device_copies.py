"""Copies between the host and a device, which do not wait for a CUDA device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recipe.backend.rows import Values


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device. Copies to CUDA devices are asynchronous: torch does
    not reuse the pinned memory before the copy is complete."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class PendingCopy:
    """Copies values to the host, in float32, without waiting for a CUDA device."""

    def __init__(self, values: Values) -> None:
        self._counts = values.counts
        self._is_there: Any = None
        whole = values.whole.float()
        if whole.device.type == "cuda":
            self._whole = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True)
            self._whole.copy_(whole, non_blocking=True)
            self._is_there = torch.cuda.current_stream(whole.device).record_event()
        else:
            self._whole = whole.cpu()

    def wait(self) -> list[Tensor]:
        """Wait for the device, and return the values of each row."""
        if self._is_there is not None:
            self._is_there.synchronize()
        return Values(self._whole, self._counts).split()
