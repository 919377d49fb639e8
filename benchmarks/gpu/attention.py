"""Time of attention, forward and backward, by the length of samples: which layout is fastest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from stage import Stage, Values, table, timed
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import flex_attention

from recipe.models import flat_attention

HEADS, WIDTH, BLOCK = 12, 64, 128


def measure_lengths(stage: Stage) -> Values:
    """Measure one row for flash attention, blocks with a mask, and FlexAttention."""
    tokens, lengths = (256, (16, 64)) if stage.smoke else (32768, (16, 32, 64, 128, 150, 256, 512))
    rows = []
    for length in lengths:
        row: dict[str, Any] = {"tokens of a sample": length}
        for way, make in {
            "row": attend_row,
            "blocks": attend_blocks,
            "flex": attend_flex_blocks,
        }.items():
            if way == "flex" and stage.smoke:
                continue  # it compiles
            seconds = timed(stage.device, make(stage, tokens, length), 2 if stage.smoke else 20)
            row[f"{way}, ms"] = round(1000 * seconds, 3)
        rows.append(row)
    print(f"\n{table(rows)}\n", flush=True)
    return {"rows": rows}


def states(stage: Stage, *shape: int) -> list[Tensor]:
    """Return queries, keys and values of this shape."""
    return [
        torch.randn(shape, device=stage.device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]


def pass_both_ways(attend: Callable[[], Tensor]) -> Callable[[], None]:
    """Return a function that computes attention and its gradients."""
    return lambda: attend().sum().backward()


def attend_row(stage: Stage, tokens: int, length: int) -> Callable[[], None]:
    """Return attention over samples end to end in one row."""
    parts = states(stage, 1, HEADS, tokens, WIDTH)
    ends = [*range(0, tokens, length), tokens]
    starts = torch.tensor(ends, device=stage.device, dtype=torch.int32)
    inputs = flat_attention.inputs_of(starts, length)
    module = torch.nn.Module()
    return pass_both_ways(
        lambda: flat_attention.attend(module, *parts, is_causal=False, **inputs)[0]
    )


def numbers(stage: Stage, length: int) -> tuple[int, Tensor]:
    """Return the tokens of a block, and the number of the sample of each."""
    size = max(BLOCK, length)
    return size, torch.arange(size, device=stage.device) // length


def attend_blocks(stage: Stage, tokens: int, length: int) -> Callable[[], None]:
    """Return attention over blocks of at least 128 tokens, with a mask."""
    size, samples = numbers(stage, length)
    parts = states(stage, tokens // size, HEADS, size, WIDTH)
    mask = (samples[:, None] == samples[None, :])[None, None]
    return pass_both_ways(lambda: functional.scaled_dot_product_attention(*parts, attn_mask=mask))


def attend_flex_blocks(stage: Stage, tokens: int, length: int) -> Callable[[], None]:
    """Return the same by FlexAttention, compiled."""
    size, samples = numbers(stage, length)
    parts = states(stage, tokens // size, HEADS, size, WIDTH)
    mask = flex_attention.create_block_mask(
        lambda row, head, query, key: samples[query] == samples[key],
        None, None, size, size, device=str(stage.device),
    )  # fmt: skip
    compiled = torch.compile(flex_attention.flex_attention)
    return pass_both_ways(lambda: compiled(*parts, block_mask=mask))
