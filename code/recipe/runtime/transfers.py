"""Copies between the host and devices, which CUDA devices make while they compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device. Copies to CUDA devices are asynchronous: torch does
    not reuse the pinned memory before the copy is complete."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@dataclass(frozen=True)
class HostCopy:
    """Tensors that CUDA devices copy to the host."""

    tensors: list[Tensor]
    ends: Sequence[torch.cuda.Event]

    def is_complete(self) -> bool:
        """Return whether `wait` would not wait."""
        return all(end.query() for end in self.ends)  # type: ignore[no-untyped-call]

    def wait(self) -> list[Tensor]:
        """Return the copies, once they are complete."""
        for end in self.ends:
            end.synchronize()
        return self.tensors


def start_copy(tensors: Sequence[Tensor]) -> HostCopy:
    """Begin to copy tensors to the host; those of the host are not copied."""
    copies, ends = [], []
    for tensor in tensors:
        if tensor.device.type != "cuda":
            copies.append(tensor.cpu())
            continue
        copies.append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True))
        copies[-1].copy_(tensor, non_blocking=True)
        ends.append(torch.cuda.current_stream(tensor.device).record_event())
    return HostCopy(copies, ends)
