"""Texts that a graph of OpenVINO's computes together: those of similar lengths, padded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from recipe.backend.engines.graph import STEP
from recipe.backend.rows import Reading, TokenRow, of_padded, padded

_MOST = 32
_CALL = 32
"""What a call costs beside its tokens, in tokens (docs/LAB.md)."""


def cuts(lengths: Sequence[int]) -> Iterator[list[int]]:
    """The places of the texts that share a call, shorter ones first, so that all calls together
    cost least."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    costs, begins = [0.0], [0]
    for end, place in enumerate(order, 1):
        padded_length = -(-lengths[place] // STEP) * STEP
        options = range(max(0, end - _MOST), end)
        totals = [costs[begin] + _CALL + (end - begin) * padded_length for begin in options]
        costs.append(min(totals))
        begins.append(options[totals.index(costs[-1])])
    calls, end = [], len(order)
    while end:
        calls.append(order[begins[end] : end])
        end = begins[end]
    yield from reversed(calls)


class PaddedRows:
    """Computes hidden states as `packed_rows.PackedRows` does, of texts that are padded."""

    def __init__(self, longest: int) -> None:
        """
        Args:
            longest: Tokens that the model reads at most.
        """
        self._longest = longest

    def cuts(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """The places of the texts that share a call."""
        return cuts(lengths)

    def states(
        self, model: PreTrainedModel, rows: Sequence[TokenRow]
    ) -> tuple[Tensor, np.ndarray[tuple[int], np.dtype[np.int64]]]:
        """The last hidden states [tokens, hidden] of texts, one after the other, and the tokens of
        each text."""
        lengths = np.asarray([len(row.ids) for row in rows], dtype=np.int64)
        longest = min(self._longest, -(-int(lengths.max()) // STEP) * STEP)
        batch = padded(rows, longest, int(model.config.pad_token_id or 0), torch.device("cpu"))
        whole = [TokenRow(row.ids) for row in rows]
        output = model(**batch)
        return of_padded(Reading.TOKENS, output, batch["attention_mask"], whole).whole, lengths
