"""Windows of contexts with their questions to batches; where an answer starts and ends.

A batch is laid out as that of any samples (`batches`), and beside it has, for each window:
`first`, where in the flattened blocks its first token is; `lengths`, how many tokens it has (0 for
a place that holds none); `spans` [size, 2], the first and the last token of the answer. `answers`
[size, 1 + 2 * tokens] has the shape of what the model says of a batch, `at` [tokens] that of the
longest window.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from recipe.batching.batches import Batch, Beside
from recipe.batching.packing import Rows
from recipe.batching.samples import Samples

NOWHERE = -1


@dataclass(frozen=True)
class Windows(Samples):
    """Samples that are windows. The label of each is [the first token of the answer, its last one,
    the number of the example, the token that stands for no answer]."""

    begins: Rows
    """Where each of `token_ids` begins in its context, in characters; NOWHERE for one that is none
    of the context's."""
    ends: Rows
    """Where it ends there."""
    judged: bool = False
    """Whether the model's answers are wanted, not only its losses."""


@dataclass(frozen=True)
class WindowLayout(Beside):
    """A layout of windows."""

    tokens: int
    """Of the longest window."""
    judged: bool
    """Whether the model's answers are wanted, not only its losses."""

    def tensors(self, samples: Samples, rows: Rows) -> Batch:
        """Return the tensors of the texts, and where their answers are."""
        batch, first = self.laid(samples, rows)
        lengths = np.zeros(self.texts.size, dtype=np.int64)
        lengths[: len(rows)] = samples.lengths[rows]
        spans = np.zeros((self.texts.size, 2), dtype=np.int64)
        spans[: len(rows)] = samples.labels[rows, :2]
        answers = (self.texts.size, 1 + 2 * self.tokens if self.judged else 1)
        return batch | {
            "first": torch.from_numpy(first),
            "lengths": torch.from_numpy(lengths),
            "spans": torch.from_numpy(spans),
            "answers": torch.zeros(answers, dtype=torch.int8),
            "at": torch.zeros(self.tokens, dtype=torch.int8),
        }
