"""Make batches of texts of which some tokens are learned: their successors, tags or originals.

In addition to the tensors of all layouts (`batches`), a batch has the following ones, whose size is
the same for all but rare fuller batches: `places`, the positions in the flattened blocks of tokens
whose outputs are learned; `targets`, what they learn (`NOT_LEARNED` in unused places); `owners`,
the number of the text in the batch. The model's head is computed for these places only. `answers`
[texts, 2] has the shape of the model's sums. It holds integers, since a model sharded in bfloat16
rounds inputs with fractions.

If the tags of words are evaluated, `slots` has the position of each place in its text, and
`answers` is [texts, 1 + 3 * words].
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
    """Most judged words of a sample."""

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
            # Unused places go to a slot after the last one, which is cut off.
            slots = np.full(len(batch["places"]), self.words, dtype=np.int64)
            slots[: len(owners)] = within
            batch["slots"] = torch.from_numpy(slots)
            batch["answers"] = torch.zeros((len(first), 1 + 3 * self.words), dtype=torch.int8)
        return batch


def pad_positions(
    positions: Rows, targets: Rows, owners: Rows, documents: int, learned: int
) -> Batch:
    """Return `places`, `targets` and `owners` of size `learned`, enlarged in steps of a quarter if
    there are more, and `answers` for the documents."""
    step = max(1, learned // 4)
    size = learned + step * max(0, -(-(len(positions) - learned) // step))
    arrays = {
        "places": np.zeros(size, dtype=np.int64),
        "targets": np.full(size, NOT_LEARNED, dtype=np.int64),
        "owners": np.zeros(size, dtype=np.int64),
    }
    for name, values in (("places", positions), ("targets", targets), ("owners", owners)):
        arrays[name][: len(positions)] = values
    arrays["answers"] = np.zeros((documents, 2), dtype=np.int8)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
