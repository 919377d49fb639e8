"""Make batches of windows of contexts, with the spans of their answers.

A batch has the tensors of any samples (`batches`), and for each window: `first`, the position of
its first token in the flattened blocks; `lengths`, its tokens (0 in an unused place); `spans`
[size, 2], the first and the last token of the answer. `answers` [size, 1 + 2 * tokens] has the
shape of the model's outputs, `at` [tokens] that of the longest window.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from recipe.batching.batches import Batch, CompositeLayout, Samples
from recipe.batching.packing import Rows

NOWHERE = -1


@dataclass(frozen=True)
class Windows(Samples):
    """Samples that are windows. The label of each is [the first token of the answer, its last one,
    the number of the example, the token that stands for no answer]."""

    begins: Rows
    """The first character in the context of each of `token_ids`; NOWHERE for other tokens."""
    ends: Rows
    """The last character (exclusive) of each token in the context."""


@dataclass(frozen=True)
class WindowLayout(CompositeLayout):
    """A layout of windows."""

    tokens: int
    """Tokens of the longest window."""
    judged: bool
    """Whether the model's answers are wanted, not only its losses."""

    def tensors(self, samples: Samples, rows: Rows) -> Batch:
        """Return the tensors of the texts, and the spans of their answers."""
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
