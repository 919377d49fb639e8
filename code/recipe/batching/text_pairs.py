"""Make batches of sources and targets, for the encoder and the decoder of a model.

The tokens of a sample are those of its source, then those of its target. A batch has `input_ids`
and `attention_mask` [rows, source length], `decoder_input_ids` [rows, target length], and the
tensors of `document_batches` for learned tokens: all targets, at their positions in the decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import datasets
import numpy as np
import torch

from recipe.batching import packing
from recipe.batching.batches import Batch, Samples
from recipe.batching.document_batches import NOT_LEARNED, pad_positions
from recipe.batching.packing import Rows

_SOURCE_LENGTHS, _TARGET_LENGTHS = 4, 2
Lengths = tuple[int, int]
"""The lengths of sources and targets in a batch."""


@dataclass(frozen=True)
class Pairs(Samples):
    """Samples that are pairs. The label of each is the number of its target's tokens."""

    sources: Rows
    """Tokens of each sample's source."""
    texts: datasets.Dataset
    """The same pairs as texts, with the columns `source` and `target`."""

    def weight(self, rows: Rows) -> int:
        """Return the tokens of the targets at `rows`: the loss is the mean over these."""
        return max(1, int(self.labels[rows].sum()))

    def lengths_of(self, rows: Rows) -> Lengths:
        """Return the longest source and the longest target among `rows`."""
        return int(self.sources[rows].max(initial=1)), int(self.labels[rows].max(initial=1))


@dataclass(frozen=True)
class PaddedPairs:
    """A pair in each row, both its texts padded to one of a few lengths."""

    shapes: Sequence[Lengths]
    size: int
    pad_id: int
    shift: Callable[[torch.Tensor], torch.Tensor]
    """The model's function from labels [rows, length] to the inputs of its decoder."""
    learned: int
    """Most target tokens in a batch; a rare batch has more."""
    balanced: ClassVar[bool] = False

    def tensors(self, samples: Samples, rows: Rows) -> Batch:
        """Return the inputs of the model, and the learned tokens."""
        assert isinstance(samples, Pairs)
        source_length, target_length = self._shape(samples, rows)
        indices, owners, within = samples.token_positions(rows)
        sources = samples.sources[rows][owners]
        reads = within < sources
        ids = np.full((self.size, source_length), self.pad_id)
        mask = np.zeros_like(ids)
        # An unused row attends to one token, since attention to none is undefined.
        mask[:, 0] = 1
        ids[owners[reads], within[reads]] = samples.token_ids[indices[reads]]
        mask[owners[reads], within[reads]] = 1
        owners, within = owners[~reads], (within - sources)[~reads]
        targets = samples.token_ids[indices[~reads]].astype(np.int64)
        labels = np.full((self.size, target_length), NOT_LEARNED, dtype=np.int64)
        labels[len(rows) :, 0] = self.pad_id + 1  # of an unused row, whose loss does not count
        labels[owners, within] = targets
        positions = owners * target_length + within
        return {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(mask),
            "decoder_input_ids": self.shift(torch.from_numpy(labels)),
            **pad_positions(positions, targets, owners, self.size, self.learned),
        }

    def _shape(self, samples: Pairs, rows: Rows) -> Lengths:
        lengths = samples.lengths_of(rows)
        # If data is tokenized during training, a longer sample may come later.
        largest = [*map(max, zip(*self.shapes, lengths, strict=True))]
        source, target = (-(-length // packing.ALIGNMENT) * packing.ALIGNMENT for length in largest)
        fits = [shape for shape in self.shapes if shape[0] >= lengths[0] and shape[1] >= lengths[1]]
        return min(fits, key=sum, default=(source, target))

    def describe(self) -> str:
        """Return the lengths."""
        shown = ", ".join(f"{source} and {target}" for source, target in self.shapes)
        return f"padded to {shown} tokens of source and target"

    def computed_tokens(self, samples: Samples, rows: Rows) -> int:
        """Return the tokens of all rows."""
        assert isinstance(samples, Pairs)
        return self.size * sum(self._shape(samples, rows))


def pair_shapes(batches: Sequence[tuple[Samples, Rows]]) -> list[Lengths]:
    """Return a few pairs of lengths that hold `batches`; the last one holds every pair."""
    longest = np.asarray(
        [
            pairs.lengths_of(rows)
            for pairs, rows in batches
            if isinstance(pairs, Pairs) and len(rows)
        ]
    )
    if not len(longest):
        return [(packing.ALIGNMENT, packing.ALIGNMENT)]
    tops = packing.buckets([batch[:1] for batch in longest], _SOURCE_LENGTHS)
    lengths_in_use: set[Lengths] = set()
    for below, top in zip((0, *tops), tops, strict=False):
        targets = longest[(longest[:, 0] > below) & (longest[:, 0] <= top), 1]
        if len(targets):
            lengths = packing.buckets([np.asarray([target]) for target in targets], _TARGET_LENGTHS)
            lengths_in_use |= {(top, length) for length in lengths}
    # In other epochs a long target may be batched with other sources.
    lengths_in_use.add((max(tops), max(length for _, length in lengths_in_use)))
    return sorted(lengths_in_use)
