"""Samples of several texts each: a query and its texts, or a question with each choice.

A batch holds the tensors of its texts (`batches`), and `slots` [samples, most]: the position of
each text of a sample among the texts of the batch. Slots without a text, which the labels mark, are
0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from recipe.batching import packing
from recipe.batching.batches import Batch, CompositeLayout, Packed, Padded
from recipe.batching.packing import Rows
from recipe.batching.samples import Samples

Batches = Sequence[tuple[Samples, Rows]]


@dataclass(frozen=True)
class Groups(Samples):
    """Samples whose texts are some of those in `texts`; a sample's length is that of all."""

    texts: Samples
    members: Rows
    """[samples, most]: the rows in `texts` of each sample's texts, first ones first; -1 for none"""

    @classmethod
    def from_texts(cls, texts: Samples, members: Rows, labels: Any) -> Groups:
        """Return the groups of `members` with their labels [samples, ...]."""
        lengths = np.where(members >= 0, texts.lengths[members], 0).sum(axis=1)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        return cls(texts.token_ids, starts, labels, texts, members, types=texts.types)

    @property
    def text_lengths(self) -> Rows:
        return self.texts.lengths[self.members[self.members >= 0]]

    def laid(self, rows: Rows) -> tuple[Rows, Rows]:
        """Return the texts of the samples at `rows`, and `slots` [rows, most]."""
        chosen = self.members[rows]
        is_there = chosen >= 0
        slots = np.zeros(chosen.shape, dtype=np.int64)
        slots[is_there] = np.arange(int(is_there.sum()))
        return chosen[is_there], slots


def consecutive(counts: Rows) -> Rows:
    """Return `members` [samples, most] of samples that have `counts` consecutive texts each."""
    positions = np.arange(counts.max(initial=0))
    starts = np.cumsum(counts) - counts
    return np.where(positions < counts[:, None], starts[:, None] + positions, -1)


def text_batches(batches: Batches) -> list[tuple[Samples, Rows]]:
    """Return the texts of each of some batches of groups."""
    return [
        (samples.texts, samples.laid(rows)[0]) if isinstance(samples, Groups) else (samples, rows)
        for samples, rows in batches
    ]


def layout(texts: Packed | Padded, size: int, batches: Batches) -> GroupLayout:
    """Return a layout of groups, at most `size` in a batch, with texts laid out as in `texts`."""
    most = max((len(samples.laid(rows)[0]) for samples, rows in batches
                if isinstance(samples, Groups)), default=1)  # fmt: skip
    return GroupLayout(dataclasses.replace(texts, size=most), size)


@dataclass(frozen=True)
class GroupLayout(CompositeLayout):
    """A layout of the texts of groups."""

    groups: int
    """Samples in a batch; the size of `texts` counts their texts."""

    def tensors(self, samples: Samples, rows: Rows) -> Batch:
        """Return the tensors of the texts, and `slots`; a batch with more texts than usual has
        larger tensors."""
        assert isinstance(samples, Groups)
        members, slots = samples.laid(rows)
        texts = self.texts
        if len(members) > texts.size:
            size = -(-len(members) // packing.ALIGNMENT) * packing.ALIGNMENT
            texts = dataclasses.replace(texts, size=size)
        placed = np.zeros((self.groups, slots.shape[1]), dtype=np.int64)
        placed[: len(rows)] = slots
        return {**texts.tensors(samples.texts, members), "slots": torch.from_numpy(placed)}

    def computed_tokens(self, samples: Samples, rows: Rows) -> int:
        assert isinstance(samples, Groups)
        return super().computed_tokens(samples.texts, samples.laid(rows)[0])

    def describe(self) -> str:
        return f"with all their texts {super().describe()}"
