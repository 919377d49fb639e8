"""Make batches of texts of which some tokens are learned: their successors, tags or originals.

Besides the tensors of all layouts (`batches`), a batch has three tensors [slots], with a slot for
each learned token; only rare batches need more slots than the others. `positions` are the indices
of these tokens in the flattened blocks: the head is computed for them only. `targets` are the
tokens or tags to learn, `NOT_LEARNED` in unused slots. `owners` are the indices of their texts in
the batch. The number `samples` is how many texts a batch can hold.

If the tags of words are evaluated, `within` [slots] has the position of each token in its text, and
`words` is the number of positions that a text may have.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from recipe.batching.batches import Batch, CompositeLayout, Samples
from recipe.batching.packing import Rows

NOT_LEARNED = -100


class TargetSamples(Samples):
    """Base of samples of which some tokens are learned. A label is, or begins with, the number of
    these."""

    lead: ClassVar[int] = 0
    """How many tokens before it a target is learned."""

    def weight(self, rows: Rows) -> int:
        """Return the learned tokens of the samples at `rows`, over which the loss is the mean."""
        return int(self.labels.reshape(len(self.labels), -1)[rows, 0].sum())

    @abstractmethod
    def targets(self, source: Rows) -> tuple[Rows, Rows, Rows | None]:
        """Return which of the tokens at `source` (positions in `token_ids`) are learned, as
        positions in `source`; their targets; and the tokens that replace them, if any do."""


@dataclass(frozen=True)
class Documents(TargetSamples):
    """Samples that are documents. The label of a document is its number of learned tokens."""

    learned: Rows
    """Whether each of `token_ids` is learned; the first one of a document never is."""
    lead: ClassVar[int] = 1

    def targets(self, source: Rows) -> tuple[Rows, Rows, Rows | None]:
        indices = np.flatnonzero(self.learned[source])
        return indices, self.token_ids[source[indices]], None

    def successors(self, row: int) -> tuple[Rows, Rows]:
        """Return the offsets in a document whose successors are learned, and these successors."""
        span = self.span(row)
        indices = np.flatnonzero(self.learned[span])
        return indices - 1, self.token_ids[span.start + indices]


@dataclass(frozen=True)
class TaggedTexts(TargetSamples):
    """Samples whose tokens have tags. The label of each is [how many of its tokens are learned,
    the number of its row]."""

    tags: Rows
    """The tag of each of `token_ids`, NOT_LEARNED for none."""

    def targets(self, source: Rows) -> tuple[Rows, Rows, Rows | None]:
        tags = self.tags[source]
        indices = np.flatnonzero(tags != NOT_LEARNED)
        return indices, tags[indices], None


@dataclass(frozen=True)
class DocumentLayout(CompositeLayout):
    """A layout of documents, of texts with tags or masked ones."""

    learned: int
    """Most learned tokens in a batch; a rare batch has more."""
    words: int = 0
    """Most tokens of a sample whose tags are evaluated; 0 in training."""

    def tensors(self, samples: Samples, rows: Rows) -> Batch:
        """Return the tensors of the texts, and what is learned."""
        assert isinstance(samples, TargetSamples)
        batch, first = self.laid(samples, rows)
        source, owners, within = samples.token_positions(rows)
        indices, targets, replaced = samples.targets(source)
        owners, within = owners[indices], within[indices]
        positions = first[owners] + within - samples.lead
        if replaced is not None:
            batch["input_ids"].view(-1)[positions] = torch.from_numpy(replaced)
        batch |= pad_positions(positions, targets, owners, len(first), self.learned)
        if self.words:
            # Unused slots get the position after the last one, which is cut off.
            padded = np.full(len(batch["positions"]), self.words, dtype=np.int64)
            padded[: len(owners)] = within
            batch |= {"within": torch.from_numpy(padded), "words": self.words}
        return batch


def pad_positions(
    positions: Rows, targets: Rows, owners: Rows, samples: int, learned: int
) -> Batch:
    """Return `positions`, `targets` and `owners` of size `learned`, enlarged in steps of a quarter
    if there are more, and `samples`."""
    step = max(1, learned // 4)
    size = learned + step * max(0, -(-(len(positions) - learned) // step))
    batch: Batch = {"samples": samples}
    for name, values, unused in (
        ("positions", positions, 0), ("targets", targets, NOT_LEARNED), ("owners", owners, 0)
    ):  # fmt: skip
        padded = np.full(size, unused, dtype=np.int64)
        padded[: len(values)] = values
        batch[name] = torch.from_numpy(padded)
    return batch
