"""Copies between the host and devices, which CUDA devices make while they compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device. Copies to CUDA devices are asynchronous: torch does
    not reuse the pinned memory before the copy is complete."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def start_copy(tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Begin to copy tensors to the host. The function that is returned waits for a CUDA device, and
    returns the copies; tensors of the host are not copied."""
    copies, ends = [], []
    for tensor in tensors:
        if tensor.device.type != "cuda":
            copies.append(tensor.cpu())
            continue
        copies.append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True))
        copies[-1].copy_(tensor, non_blocking=True)
        ends.append(torch.cuda.current_stream(tensor.device).record_event())

    def finish_copy() -> list[Tensor]:
        for end in ends:
            end.synchronize()
        return copies

    return finish_copy
