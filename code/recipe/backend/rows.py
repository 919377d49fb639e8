"""Rows of tokens, and the values that are read of each from a model's output."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipe.runtime import transfers
from recipe.runtime.transfers import HostCopy


@dataclass(frozen=True)
class TokenRow:
    """A text, a pair or a part of one."""

    ids: list[int]
    types: list[int] | None = None
    """The type id of each token, if the model needs them."""
    keep: list[int] | None = None
    """The positions of the tokens whose values are needed; None means all."""


class Reading(enum.Enum):
    """The values that a caller reads of each row."""

    LABELS = "logits [labels]"
    TOKENS = "of each token [tokens, ...]: logits, start and end logits, or hidden states"
    MEAN = "the mean of the last hidden states [hidden], in float32"


@dataclass(frozen=True)
class Pooling:
    """Reads a vector for each row: sentence-transformers' modules compute it of hidden states."""

    modules: Sequence[Any]
    """The modules after the encoder."""
    prompt_length: Any = None
    """Tokens of the prompt before each text, in the form that the library's modules need."""

    def vectors(self, states: Tensor, **features: Any) -> Tensor:
        """Return the vectors [rows, width] of hidden states.

        Args:
            states: [rows, tokens, hidden] with `attention_mask`, or packed rows [1, tokens,
                hidden] with `cu_seq_lens_q`, the start of each row and the end of the last.
            features: The mask, or these positions.
        """
        features["token_embeddings"] = states
        if self.prompt_length is not None:
            features["prompt_length"] = self.prompt_length
        for module in self.modules:
            features = module(features)
        vectors: Tensor = features["sentence_embedding"]
        return vectors


OutputKind = Reading | Pooling


@dataclass(frozen=True)
class Values:
    """The values of the rows of one call, in one tensor on the model's device."""

    whole: Tensor
    counts: Sequence[int] | None = None
    """How many entries of the first dimension each row has; None: each row is one entry."""

    def split(self) -> list[Tensor]:
        """Return the values of each row."""
        if self.counts is None:
            return list(self.whole)
        return list(torch.split(self.whole, list(self.counts)))

    def copy(self) -> CopiedValues:
        """Begin to copy to the host, in float32."""
        return CopiedValues(transfers.start_copy([self.whole.float()]), self.counts)


@dataclass(frozen=True)
class CopiedValues:
    """The values of the rows of one call, on their way to the host."""

    copy: HostCopy
    counts: Sequence[int] | None

    def wait(self) -> list[Tensor]:
        """Return the values of each row, once they are there."""
        return Values(self.copy.wait()[0], self.counts).split()


def kept_positions(rows: Sequence[TokenRow], begins: Iterable[int]) -> tuple[Tensor, list[int]]:
    """Return the positions of the tokens that the rows of a call keep, and how many each row keeps.
    Rows begin at the positions `begins`."""
    kept = [range(len(row.ids)) if row.keep is None else row.keep for row in rows]
    positions = [
        begin + np.asarray(tokens, dtype=np.int64)
        for tokens, begin in zip(kept, begins, strict=True)
    ]
    return torch.from_numpy(np.concatenate(positions)), [len(tokens) for tokens in kept]


def tolerance_of(expected: Sequence[Tensor], dtype: torch.dtype, exact: float = 1e-3) -> float:
    """Return the difference that rounding may cause in values computed in `dtype`; `exact` is what
    float32 may cause, as a share of the largest value."""
    scale = max(float(values.abs().max()) for values in expected)
    return (exact if dtype == torch.float32 else 0.06) * max(scale, 1e-3)


def are_close(one: Sequence[Tensor], other: Sequence[Tensor], tolerance: float) -> bool:
    """Return whether all numbers are within a tolerance, and none is NaN."""
    return all(
        torch.allclose(ours, theirs, atol=tolerance, rtol=0)
        for ours, theirs in zip(one, other, strict=True)
    )
