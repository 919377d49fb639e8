"""Documents to batches for learning the next token; which tokens are learned is said for each.

A batch is laid out as that of any samples (`batches`), and beside it has, of one size for all
batches but a rare fuller one: `places`, where in the flattened blocks a token stands whose
successor is learned; `targets`, that successor (`NOT_LEARNED` where a place is unused); `owners`,
the number of its document in the batch. So a model's head runs on these places only. `answers`
[documents, 2] has the shape of their sums; whole numbers, as inputs with a fraction are rounded by
a model that is sharded in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from recipe.batching.batches import Batch, Beside, Samples
from recipe.batching.packing import Rows

NOT_LEARNED = -100


@dataclass(frozen=True)
class Documents(Samples):
    """Samples that are documents. The label of each is how many of its tokens are learned."""

    learned: Rows
    """Whether each of `token_ids` is learned; the first one of a document never is."""

    def weight(self, rows: Rows) -> int:
        """Learned tokens of the documents at `rows`: the loss is the mean over these."""
        return int(self.labels[rows].sum())

    def successors(self, row: int) -> tuple[Rows, Rows]:
        """Offsets in a document whose successor is learned, and these successors."""
        span = self.span(row)
        at = np.flatnonzero(self.learned[span])
        return at - 1, self.token_ids[span.start + at]


@dataclass(frozen=True)
class DocumentLayout(Beside):
    """A layout of documents."""

    learned: int
    """Most learned tokens in a batch, but for a rare one."""

    def tensors(self, samples: Samples, rows: Rows) -> Batch:
        """Return the tensors of the documents, and what is learned."""
        assert isinstance(samples, Documents)
        batch, first = self.laid(samples, rows)
        source, owner, within = samples.places(rows)
        at = np.flatnonzero(samples.learned[source])
        # Where the token before it stands: the first one of a document is never learned.
        places = (first[owner] + within)[at] - 1
        targets = samples.token_ids[source[at]]
        return batch | of_places(places, targets, owner[at], len(first), self.learned)


def of_places(places: Rows, targets: Rows, owners: Rows, documents: int, learned: int) -> Batch:
    """Return `places`, `targets` and `owners` in `learned` places; in more, by steps of a quarter,
    where that is more; and `answers` for so many documents."""
    step = max(1, learned // 4)
    size = learned + step * max(0, -(-(len(places) - learned) // step))
    arrays = {
        "places": np.zeros(size, dtype=np.int64),
        "targets": np.full(size, NOT_LEARNED, dtype=np.int64),
        "owners": np.zeros(size, dtype=np.int64),
    }
    for name, values in (("places", places), ("targets", targets), ("owners", owners)):
        arrays[name][: len(places)] = values
    arrays["answers"] = np.zeros((documents, 2), dtype=np.int8)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
