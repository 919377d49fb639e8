"""Windows of contexts with their questions to batches; where an answer starts and ends.

A batch is laid out as that of any samples (`batches`), and beside it has, for each window:
`first`, where in the flattened blocks its first token is; `lengths`, how many tokens it has (0 for
a place that holds none); `spans` [size, 2], the first and the last token of the answer. `answers`
[size, 1 + 2 * tokens] has the shape of what the model says of a batch, `at` [tokens] that of the
longest window.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

from recipe.batching.batches import Batch, Packed, Padded
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

    def fingerprint(self) -> str:
        """What tells this data apart from other data."""
        if self.shards is not None:
            return self.shards.digest
        digest = hashlib.sha256(np.ascontiguousarray(self.begins).data)
        return f"{super().fingerprint()}-{digest.hexdigest()[:16]}"


@dataclass(frozen=True)
class PackedWindows(Packed):
    """Windows end to end in blocks of one shape."""

    tokens: int
    """Of the longest window."""
    judged: bool

    def tensors(self, samples: Samples, rows: Rows) -> Batch:
        """What Packed gives, and what is wanted."""
        batch = super().tensors(samples, rows)
        return batch | _wanted(samples, rows, self.size, self.tokens, self.judged)


@dataclass(frozen=True)
class PaddedWindows(Padded):
    """A window in each row, padded to one of a few lengths."""

    tokens: int
    """Of the longest window."""
    judged: bool

    def tensors(self, samples: Samples, rows: Rows) -> Batch:
        """What Padded gives, and what is wanted."""
        batch = super().tensors(samples, rows)
        first = np.arange(self.size) * batch["input_ids"].shape[1]
        targets = _wanted(samples, rows, self.size, self.tokens, self.judged)
        return batch | {"first": torch.from_numpy(first)} | targets


def _wanted(samples: Samples, rows: Rows, size: int, tokens: int, judged: bool) -> Batch:
    lengths, spans = np.zeros(size, dtype=np.int64), np.zeros((size, 2), dtype=np.int64)
    lengths[: len(rows)] = samples.lengths[rows]
    spans[: len(rows)] = samples.labels[rows, :2]
    arrays = {"lengths": lengths, "spans": spans}
    targets = torch.zeros((size, 1 + 2 * tokens if judged else 1), dtype=torch.int8)
    at = torch.zeros(tokens, dtype=torch.int8)
    return {name: torch.from_numpy(a) for name, a in arrays.items()} | {
        "answers": targets,
        "at": at,
    }
