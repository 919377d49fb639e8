"""Samples that are several texts each: a query and its texts, which are contrasted.

A batch is laid out as that of any texts (`batches`), and beside it has `slots` [samples, most],
where each text of a sample is among the batch's texts; 0 where there is none, which the labels say.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from recipe.batching import packing
from recipe.batching.batches import Batch, Layout, Packed, Padded
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
    def of_texts(cls, texts: Samples, members: Rows, labels: Any) -> Groups:
        """The groups of `members` with their labels [samples, ...]."""
        lengths = np.where(members >= 0, texts.lengths[members], 0).sum(axis=1)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        return cls(texts.token_ids, starts, labels, texts, members, types=texts.types)

    @property
    def text_lengths(self) -> Rows:
        """Tokens of each text of each sample."""
        return self.texts.lengths[self.members[self.members >= 0]]

    def fingerprint(self) -> str:
        """What tells this data apart from other data."""
        members = hashlib.sha256(np.ascontiguousarray(self.members).data).hexdigest()[:16]
        return f"{super().fingerprint()}-{members}"

    def laid(self, rows: Rows) -> tuple[Rows, Rows]:
        """The texts of the samples at `rows`, and `slots` [rows, most]."""
        chosen = self.members[rows]
        is_there = chosen >= 0
        slots = np.zeros(chosen.shape, dtype=np.int64)
        slots[is_there] = np.arange(int(is_there.sum()))
        return chosen[is_there], slots


def layout(inner: Layout, size: int, batches: Batches) -> PackedGroups | PaddedGroups:
    """The layout of groups, at most `size` in a batch, whose texts are laid out as `inner` does."""
    most = max((len(samples.laid(rows)[0]) for samples, rows in batches
                if isinstance(samples, Groups)), default=1)  # fmt: skip
    kind = PackedGroups if isinstance(inner, Packed) else PaddedGroups
    fields = {each.name: getattr(inner, each.name) for each in dataclasses.fields(inner)}  # type: ignore[arg-type]
    return kind(**{**fields, "size": most}, groups=size)


def text_batches(batches: Batches) -> list[tuple[Samples, Rows]]:
    """The texts of each of some batches of groups."""
    return [
        (samples.texts, samples.laid(rows)[0]) if isinstance(samples, Groups) else (samples, rows)
        for samples, rows in batches
    ]


def _tensors(self: Any, lay: Any, samples: Samples, rows: Rows) -> Batch:
    """The tensors of a batch's texts, and `slots`; a batch of more texts gets places for them."""
    assert isinstance(samples, Groups)
    texts, slots = samples.laid(rows)
    if len(texts) > self.size:
        self = dataclasses.replace(
            self, size=-(-len(texts) // packing.ALIGNMENT) * packing.ALIGNMENT
        )
    batch: Batch = lay(self, samples.texts, texts)
    placed = np.zeros((self.groups, slots.shape[1]), dtype=np.int64)
    placed[: len(rows)] = slots
    return {**batch, "slots": torch.from_numpy(placed)}


@dataclass(frozen=True)
class PackedGroups(Packed):
    """The texts of all samples end to end in blocks of one shape."""

    groups: int = dataclasses.field(kw_only=True)
    """Samples in a batch; `size` is that of their texts."""
    balanced: ClassVar[bool] = True

    def tensors(self, samples: Samples, rows: Rows) -> Batch:
        """What Packed gives for the texts, and `slots`."""
        return _tensors(self, Packed.tensors, samples, rows)

    def describe(self) -> str:
        """The block shape."""
        return f"with all that belongs to them {super().describe()}"


@dataclass(frozen=True)
class PaddedGroups(Padded):
    """A text in each row, padded to one of a few lengths."""

    groups: int = dataclasses.field(kw_only=True)
    """Samples in a batch; `size` is that of their texts."""
    balanced: ClassVar[bool] = False

    def tensors(self, samples: Samples, rows: Rows) -> Batch:
        """What Padded gives for the texts, and `slots`."""
        return _tensors(self, Padded.tensors, samples, rows)

    def places(self, samples: Samples, rows: Rows) -> int:
        """The tokens of all rows."""
        assert isinstance(samples, Groups)
        return super().places(samples.texts, samples.laid(rows)[0])

    def describe(self) -> str:
        """The lengths."""
        return f"with all that belongs to them {super().describe()}"
