"""Rows padded to the longest row of their call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from recipe.backend.rows import (
    OutputKind,
    Pooling,
    Reading,
    TokenRow,
    Values,
    kept_positions,
)
from recipe.runtime.transfers import to_device

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
    call_padding: int = _CALL_TOKENS
    """The most tokens of padding that rows of other lengths add to a call."""

    @classmethod
    def from_model(cls, model: Any, pad: int, inputs: frozenset[str], most: int) -> PaddedRows:
        """Return the layout of a model of transformers, with fewer tokens in a call if its head
        computes scores of a vocabulary."""
        head = model.get_output_embeddings()
        tokens = _CALL_TOKENS
        if head is not None:
            tokens = min(tokens, _CALL_SCORES // head.weight.shape[0])
        return cls(pad=pad, inputs=inputs, most=most, call_tokens=tokens)

    def cuts(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the positions of the rows of each call, shorter rows first."""
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        start = 0
        for end in range(1, len(order) + 1):
            full = end - start == (1 if self.merging == ALONE else BATCH)
            if not full and end < len(order):
                longest = lengths[order[end]]
                tokens = (end + 1 - start) * longest
                padding = tokens - sum(lengths[row] for row in order[start : end + 1])
                allowed = 0 if self.merging == EQUAL else self.call_padding
                full = tokens > self.call_tokens or padding > allowed
            if full or end == len(order):
                yield order[start:end]
                start = end

    @torch.inference_mode()
    def values(
        self, model: PreTrainedModel, rows: Sequence[TokenRow], reading: OutputKind
    ) -> Values:
        """Return the values of the rows of one call."""
        longest = max(len(row.ids) for row in rows)
        if self.merging == PADDED:
            longest = min(self.most, -(-longest // _STEP) * _STEP)
        batch = pad_rows(rows, longest, self.pad, model.device)
        inputs = {name: tensor for name, tensor in batch.items() if name in self.inputs}
        return values_from_padded(reading, model(**inputs), batch["attention_mask"], rows)


def pad_rows(
    rows: Sequence[TokenRow], longest: int, pad: int, device: torch.device
) -> dict[str, Tensor]:
    """Return a model's inputs on the device: `input_ids`, padded by `pad`, `attention_mask` and, if
    a row has types, `token_type_ids`, each [rows, longest]."""
    ids = torch.full((len(rows), longest), pad, dtype=torch.long)
    batch = {"input_ids": ids, "attention_mask": torch.zeros_like(ids)}
    if any(row.types for row in rows):
        batch["token_type_ids"] = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = torch.tensor(row.ids, dtype=torch.long)
        batch["attention_mask"][index, : len(row.ids)] = 1
        if row.types:
            types = torch.tensor(row.types, dtype=torch.long)
            batch["token_type_ids"][index, : len(row.ids)] = types
    return {name: to_device(tensor, device) for name, tensor in batch.items()}


def values_from_padded(
    reading: OutputKind, output: Any, mask: Tensor, rows: Sequence[TokenRow]
) -> Values:
    """Return the values of each row of a padded batch, from a model's output and the batch's
    attention mask [rows, longest]. Only values of tokens need the rows."""
    if isinstance(reading, Pooling):
        return Values(reading.vectors(output[0], attention_mask=mask))
    if reading is Reading.LABELS:
        return Values(output.logits)
    if reading is Reading.MEAN:
        states = output.last_hidden_state.float()
        weights = mask.unsqueeze(-1).float()
        return Values((states * weights).sum(1) / weights.sum(1))
    values = token_values(output)
    if all(row.keep is None and len(row.ids) == values.shape[1] for row in rows):
        return Values(values.flatten(0, 1), [values.shape[1]] * len(rows))
    begins = range(0, len(rows) * values.shape[1], values.shape[1])
    positions, counts = kept_positions(rows, begins)
    return Values(values.flatten(0, 1)[to_device(positions, values.device)], counts)


def token_values(output: Any) -> Tensor:
    """Return logits, start and end logits, or hidden states [rows, longest, ...]."""
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    values: Tensor = output.logits if "logits" in output else output[0]
    return values
