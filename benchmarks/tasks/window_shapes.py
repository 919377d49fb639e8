"""CPU-seconds of a step of windows by the shape of their blocks, beside PyTorch's attention.

    python benchmarks/tasks/window_shapes.py FOLDER

FOLDER is that of an encoder such as MiniLM. 16 windows, dropout on, one thread; each case is run
three times, taking turns.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "code"))

# Name, whether with the recipe's kernels, blocks, their length, tokens of a window in them.
CASES = [
    ("ours, 4 x 440", True, 4, 440, 110),
    ("ours, 8 x 220", True, 8, 220, 110),
    ("ours, 16 x 128", True, 16, 128, 128),
    ("PyTorch's, 16 x 128", False, 16, 128, 128),
]


def step(model: Any, rows: int, length: int, window: int, dtype: torch.dtype) -> float:
    """The CPU-seconds of a forward and a backward pass."""
    ids = torch.randint(1000, 20000, (rows, length))
    mask = torch.ones(rows, length, dtype=torch.long)
    if window < length or model.config._attn_implementation != "sdpa":
        owner = torch.arange(length) // window
        apart = owner[:, None] != owner[None, :]
        mask = torch.zeros(rows, 1, length, length).masked_fill(
            apart, torch.finfo(torch.float32).min
        )
    start = time.process_time()
    is_mixed = dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=dtype) if is_mixed else contextlib.nullcontext():
        states = model(input_ids=ids, attention_mask=mask).last_hidden_state
    states.float().sum().backward()
    return time.process_time() - start


def main(folder: str) -> None:
    """A line for each precision and case."""
    from recipe.models import cpu_kernels

    torch.set_num_threads(1)
    cpu_kernels.keep_memory()
    models: dict[bool, Any] = {
        lightened: AutoModel.from_pretrained(folder).float().train() for lightened in (True, False)
    }
    cpu_kernels.lighten(models[True], packed_attention=True)
    for dtype in (torch.float32, torch.bfloat16):
        seconds: dict[str, list[float]] = {name: [] for name, *_ in CASES}
        for _ in range(3):
            for name, lightened, rows, length, window in CASES:
                seconds[name].append(step(models[lightened], rows, length, window, dtype))
        for name, value in seconds.items():
            print(f"{dtype} {name}: least {min(value):.2f}, {max(value):.2f} at most", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
