"""Rows padded to the longest row of their call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from recipe.backend.rows import TokenRow, Values, Wanted, of_padded, padded

BATCH = 32
"""The most rows of a call."""
PADDED, EQUAL, ALONE = "texts of any length", "texts of one length", "one text at a time"
"""The rows that may share a call."""
_CALL_TOKENS = 16384
"""The most tokens of a call, padding included; one row may have more."""
_CALL_SCORES = 1 << 26
"""The most numbers that a head over a vocabulary computes in a call."""
_STEP = 8
"""Lengths of calls are multiples of this, since kernels are made for each shape (docs/LAB.md)."""
_CALL_COST = 32
"""What a call of OpenVINO's graph costs in addition to its tokens, in tokens (docs/LAB.md)."""


@dataclass(frozen=True, kw_only=True)
class PaddedRows:
    """Computes rows by the model's forward, padded to the longest row of their call."""

    pad: int
    """The id of the padding token."""
    inputs: frozenset[str]
    """The model's inputs among `input_ids`, `attention_mask` and `token_type_ids`."""
    most: int
    """The most tokens that the model reads."""
    merging: str = PADDED
    """The rows that may share a call: PADDED, EQUAL or ALONE."""
    call_tokens: int = _CALL_TOKENS
    """The most tokens of a call."""
    by_cost: bool = False
    """Whether rows are cut into calls by what these cost OpenVINO."""

    @classmethod
    def of(cls, model: Any, pad: int, inputs: frozenset[str], most: int) -> PaddedRows:
        """Return the layout of a model of transformers, with fewer tokens in a call if its head
        computes scores of a vocabulary."""
        head = model.get_output_embeddings()
        tokens = _CALL_TOKENS
        if head is not None:
            tokens = min(tokens, _CALL_SCORES // head.weight.shape[0])
        return cls(pad=pad, inputs=inputs, most=most, call_tokens=tokens)

    def cuts(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the positions of the rows of each call, shorter rows first."""
        if self.by_cost:
            yield from cheapest_cuts(lengths)
            return
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        start = 0
        for end in range(1, len(order) + 1):
            full = end - start == (1 if self.merging == ALONE else BATCH)
            last = end == len(order)
            if full or last or (end + 1 - start) * lengths[order[end]] > self.call_tokens or (
                self.merging == EQUAL and lengths[order[end]] != lengths[order[start]]
            ):  # fmt: skip
                yield order[start:end]
                start = end

    @torch.inference_mode()
    def values(self, model: PreTrainedModel, rows: Sequence[TokenRow], reading: Wanted) -> Values:
        """Return the values of the rows of one call."""
        longest = max(len(row.ids) for row in rows)
        if self.merging == PADDED:
            longest = min(self.most, -(-longest // _STEP) * _STEP)
        batch = padded(rows, longest, self.pad, model.device)
        inputs = {name: tensor for name, tensor in batch.items() if name in self.inputs}
        return of_padded(reading, model(**inputs), batch["attention_mask"], rows)


def cheapest_cuts(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield the places of the rows that share a call, so that all calls together cost least."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    costs, begins = [0.0], [0]
    for end, place in enumerate(order, 1):
        padded_length = -(-lengths[place] // _STEP) * _STEP
        options = range(max(0, end - BATCH), end)
        totals = [costs[begin] + _CALL_COST + (end - begin) * padded_length for begin in options]
        costs.append(min(totals))
        begins.append(options[totals.index(costs[-1])])
    calls, end = [], len(order)
    while end:
        calls.append(order[begins[end] : end])
        end = begins[end]
    yield from reversed(calls)
