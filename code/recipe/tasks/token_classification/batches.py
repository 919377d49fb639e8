"""Make batches of words with tags. The model's head is computed for tokens with tags only.

A batch has the tensors of any samples (`batches`), `places`, `targets` (NOT_LEARNED in unused
places) and `owners` as in `document_batches`, and `slots`, the number of each place's word in its
sample. `answers` [samples, 1 + 3 * words] has the shape of the model's outputs, in integers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from recipe.batching.batches import Batch, CompositeLayout
from recipe.batching.document_batches import NOT_LEARNED, pad_positions
from recipe.batching.packing import Rows
from recipe.batching.samples import Samples

TAG_IDS, HEADS = "tag_ids", "heads"


@dataclass(frozen=True)
class TaggedSamples(Samples):
    """Samples whose tokens have tags. The label of each is [how many of its tokens are learned,
    the number of its sentence]."""

    tags: Rows
    """The tag of each of `token_ids`, NOT_LEARNED for none."""
    heads: Rows
    """Whether each of `token_ids` is the first piece of a word with a tag."""
    judged: bool = False
    """Whether the model returns answers for each word in addition to losses."""

    def weight(self, rows: Rows) -> int:
        """Return the learned tokens of the samples at `rows`, over which the loss is the mean."""
        return int(self.labels[rows, 0].sum())

    def words(self) -> int:
        """Return a bound on the judged words of a sample, which is the same on every host."""
        return int(self.lengths.max(initial=0)) if self.judged else 0


@dataclass(frozen=True)
class TagLayout(CompositeLayout):
    """A layout of tagged samples."""

    learned: int
    """Most learned tokens in a batch; a rare batch has more."""
    words: int
    """Most judged words of a sample."""

    def tensors(self, samples: Samples, rows: Rows) -> Batch:
        """Return the tensors of the texts, and the learned positions."""
        assert isinstance(samples, TaggedSamples)
        laid, first = self.laid(samples, rows)
        source, owner, within = samples.token_positions(rows)
        indices = np.flatnonzero(samples.tags[source] != NOT_LEARNED)
        source, owner, within = source[indices], owner[indices], within[indices]
        tags = samples.tags[source]
        batch = pad_positions(first[owner] + within, tags, owner, len(first), self.learned)
        # Tokens that are not evaluated go to a slot after the last word, which is cut off.
        slots = np.full(len(batch["places"]), self.words, dtype=np.int64)
        heads = np.flatnonzero(samples.heads[source])
        if self.words and len(heads):
            of_heads = owner[heads]
            starts = np.searchsorted(of_heads, of_heads)
            slots[heads] = np.arange(len(heads)) - starts
        batch["slots"] = torch.from_numpy(slots)
        batch["answers"] = torch.zeros((len(first), 1 + 3 * self.words), dtype=torch.int8)
        return laid | batch
