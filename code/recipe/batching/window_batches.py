"""Make batches of windows of contexts, with the spans of their answers.

A batch has the tensors of any samples (`batches`), and for each window: `first`, the position of
its first token in the flattened blocks; `lengths`, its tokens (0 in an unused row); `spans`
[size, 2], the first and the last token of the answer. `window_length`, a number, is the most tokens
of a window, and `judged` whether the model returns logits in addition to losses.
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
    """Whether the model returns logits in addition to losses: of evaluation data."""

    def tensors(self, samples: Samples, rows: Rows) -> Batch:
        """Return the tensors of the texts, and the spans of their answers."""
        batch, first = self.laid(samples, rows)
        lengths = np.zeros(self.texts.size, dtype=np.int64)
        lengths[: len(rows)] = samples.lengths[rows]
        spans = np.zeros((self.texts.size, 2), dtype=np.int64)
        spans[: len(rows)] = samples.labels[rows, :2]
        return batch | {
            "first": torch.from_numpy(first),
            "lengths": torch.from_numpy(lengths),
            "spans": torch.from_numpy(spans),
            "window_length": self.tokens,
            "judged": self.judged,
        }
