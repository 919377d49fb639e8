"""Make batches of documents for next-token prediction. Each token is marked as learned or not.

In addition to the tensors of all layouts (`batches`), a batch has the following ones, whose size is
the same for all but rare fuller batches: `places`, the positions in the flattened blocks of tokens
whose successors are learned; `targets`, these successors (`NOT_LEARNED` in unused places);
`owners`, the number of the document in the batch. The model's head is computed for these places
only. `answers` [documents, 2] has the shape of the model's sums. It holds integers, since a model
sharded in bfloat16 rounds inputs with fractions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from recipe.batching.batches import Batch, CompositeLayout, Samples
from recipe.batching.packing import Rows

NOT_LEARNED = -100


@dataclass(frozen=True)
class Documents(Samples):
    """Samples that are documents. The label of a document is its number of learned tokens."""

    learned: Rows
    """Whether each of `token_ids` is learned; the first one of a document never is."""

    def weight(self, rows: Rows) -> int:
        """Return the learned tokens of the documents at `rows`, over which the loss is the mean."""
        return int(self.labels[rows].sum())

    def successors(self, row: int) -> tuple[Rows, Rows]:
        """Return the offsets in a document whose successors are learned, and these successors."""
        span = self.span(row)
        indices = np.flatnonzero(self.learned[span])
        return indices - 1, self.token_ids[span.start + indices]


@dataclass(frozen=True)
class DocumentLayout(CompositeLayout):
    """A layout of documents."""

    learned: int
    """Most learned tokens in a batch; a rare batch has more."""

    def tensors(self, samples: Samples, rows: Rows) -> Batch:
        """Return the tensors of the documents, and what is learned."""
        assert isinstance(samples, Documents)
        batch, first = self.laid(samples, rows)
        source, owner, within = samples.token_positions(rows)
        indices = np.flatnonzero(samples.learned[source])
        # The position of the token before it; the first token of a document is never learned.
        positions = (first[owner] + within)[indices] - 1
        targets = samples.token_ids[source[indices]]
        return batch | pad_positions(positions, targets, owner[indices], len(first), self.learned)


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
