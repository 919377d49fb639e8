"""Attention of padded rows on a CPU, forward and backward: PyTorch's beside what the recipe trains
with there in bfloat16, `recipe.models.cpu_kernels.attend`.

    OMP_NUM_THREADS=1 python benchmarks/bench_padded_attention.py

CPU-milliseconds, the lower quartile of what fits into half a CPU-second, variants one after the
other for each shape.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "code"))

_BUDGET = 0.5
_SHAPES = [(16, 4, 17, 32), (16, 12, 50, 64), (16, 12, 128, 32), (8, 12, 197, 64), (1, 12, 577, 64)]


def cpu_milliseconds(call: Callable[[], None]) -> float:
    """Of one call."""
    call()
    taken: list[float] = []
    while sum(taken) < _BUDGET or len(taken) < 4:
        start = time.process_time()
        call()
        taken.append(time.process_time() - start)
    return 1000 * sorted(taken)[len(taken) // 4]


def compared(
    shape: tuple[int, int, int, int], dtype: torch.dtype, masked: bool
) -> tuple[float, float]:
    """CPU-milliseconds of both.

    Args:
        shape: Rows, heads, tokens, width of a head.
        masked: Whether half of every other row is padding.
    """
    from recipe.models.cpu_kernels import attend

    rows, heads, tokens, width = shape
    mask, added = None, None
    if masked:
        lengths = torch.tensor([tokens, tokens // 2]).repeat(rows)[:rows, None]
        mask = (torch.arange(tokens) < lengths)[:, None, None].expand(rows, 1, tokens, tokens)
        added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo().min)
    query, key, value = (
        torch.randn(rows, tokens, heads, width).to(dtype).transpose(1, 2).requires_grad_()
        for _ in "qkv"
    )
    module = torch.nn.Module()

    def usual() -> None:
        output: Any = sdpa_attention_forward(module, query, key, value, mask, is_causal=False)[0]
        output.backward(torch.ones_like(output))

    def products() -> None:
        output: Any = attend(module, query, key, value, added)[0]
        output.backward(torch.ones_like(output))

    return cpu_milliseconds(usual), cpu_milliseconds(products)


def main() -> None:
    """Both, by shape, type and whether rows are padded."""
    torch.set_num_threads(1)
    for shape in _SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            for masked in (False, True):
                usual, products = compared(shape, dtype, masked)
                what = f"{shape} {str(dtype)[6:]}{' masked' if masked else ''}"
                print(f"{what}: {usual:.2f} and {products:.2f}, {usual / products:.2f} times")


if __name__ == "__main__":
    main()
