"""Attention in bfloat16 on a CPU, forward and backward, with as many keys as there are tokens and
with keys that nothing attends to, up to a multiple of 32 (`recipe.models.cpu_kernels.attend`).

    OMP_NUM_THREADS=1 python benchmarks/bench_keys.py 17,28,48,60,120,152,220

CPU-milliseconds for about 640 tokens, 12 heads of 32, dropout 0.1; least of four, taking turns.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "code"))
_CALLS = 12


def main(lengths: str) -> None:
    """A line for each length."""
    from recipe.models import cpu_kernels

    torch.set_num_threads(1)
    cpu_kernels.keep_memory()
    for length in map(int, lengths.split(",")):
        rows = max(1, 640 // length)
        inputs = [torch.randn(rows, length, 12, 32).bfloat16().requires_grad_() for _ in range(3)]
        mask = torch.zeros(rows, 1, length, length)
        best = {0: float("inf"), 31: float("inf")}
        for _ in range(4):
            for spare in best:
                cpu_kernels._MOST_SPARE = spare
                start = 0.0
                for call in range(_CALLS + 1):
                    if call == 1:
                        start = time.process_time()
                    query, key, value = (tensor.transpose(1, 2) for tensor in inputs)
                    output: Any = cpu_kernels.attend(
                        torch.nn.Module(), query, key, value, mask, dropout=0.1
                    )[0]
                    output.sum().backward()
                best[spare] = min(best[spare], 1000 * (time.process_time() - start) / _CALLS)
        as_it_is, more = best.values()
        print(
            f"{rows} x {length} tokens: {as_it_is:.2f}, with {-length % 32} more keys {more:.2f} "
            f"({as_it_is / more:.2f} times)",
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
