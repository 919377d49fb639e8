"""How fast a device multiplies matrices: what the rate of a training is a share of."""

from __future__ import annotations

import time

import torch

_SIZES = {"cpu": 1024, "cuda": 8192}
_SECONDS = 0.5


def of_matrix_products(device: torch.device, seconds: float = _SECONDS) -> float | None:
    """Floating point operations a second in square bfloat16 products, the fastest of those tried.

    Takes about `seconds`. None for a device that is no CPU and no GPU: a lazy one would measure
    its compiler.
    """
    size = _SIZES.get(device.type)
    if size is None:
        return None
    left, right = torch.rand(2, size, size, device=device).to(torch.bfloat16)
    _seconds_of_a_product(left, right)  # the first one chooses its kernels
    durations: list[float] = []
    end = time.monotonic() + seconds
    while not durations or time.monotonic() < end:
        durations.append(_seconds_of_a_product(left, right))
    return 2 * size**3 / min(durations)


def _seconds_of_a_product(left: torch.Tensor, right: torch.Tensor) -> float:
    began = time.perf_counter()
    left @ right
    if left.device.type == "cuda":
        torch.cuda.synchronize(left.device)
    return time.perf_counter() - began
