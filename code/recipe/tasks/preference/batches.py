"""Make batches of pairs of answers to one prompt: a chosen and a rejected document.

A batch is one of twice as many documents (`document_batches`), the chosen one of each pair before
the rejected one; `answers` is [pairs, 2, 2].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from recipe.batching.batches import Batch, Samples
from recipe.batching.document_batches import DocumentLayout, Documents
from recipe.batching.packing import Rows

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class AnswerPairs(Samples):
    """Samples that are pairs of answers, each with its prompt.

    Labels are float32 [pairs, 4]: the log-probabilities of the chosen and of the rejected answer
    before training, which are NaN until `refer` sets them; and the tokens of each answer.
    """

    documents: Documents
    """The chosen and the rejected document of each pair, concatenated."""
    rows: Rows
    """The row of each pair in the data."""

    @classmethod
    def from_documents(cls, documents: Documents, rows: Rows) -> AnswerPairs:
        """Return the pairs of documents 0 and 1, 2 and 3, ..., of these rows."""
        labels = np.full((len(rows), 4), np.nan, dtype=np.float32)
        labels[:, 2:] = documents.labels.reshape(-1, 2)
        starts = documents.starts[::2]
        return cls(documents.token_ids, starts, labels, documents=documents, rows=rows)

    @property
    def text_lengths(self) -> Rows:
        return self.documents.lengths

    def fingerprint(self) -> str:
        """Return a hash of the tokens, without the log-probabilities that a model gives them."""
        return self.documents.fingerprint()

    def both(self, rows: Rows) -> Rows:
        """Return the numbers of the documents of the pairs at `rows`."""
        return np.stack([2 * rows, 2 * rows + 1], axis=1).ravel()

    def chosen(self) -> Documents:
        """Return the chosen document of each pair."""
        rows = 2 * np.arange(len(self))
        source, _, _ = self.documents.token_positions(rows)
        starts = np.concatenate([[0], np.cumsum(self.documents.lengths[rows])])
        learned = self.documents.learned[source]
        counts = self.documents.labels[rows]
        return Documents(self.documents.token_ids[source], starts, counts, learned)

    def refer(self, log_probabilities: Floats) -> None:
        """Set the log-probabilities [pairs, 2] of the model before training."""
        self.labels[:, :2] = log_probabilities


def documents_of(batches: Sequence[tuple[Samples, Rows]]) -> list[tuple[Samples, Rows]]:
    """Return the documents of each of some batches of pairs."""
    return [
        (samples.documents, samples.both(rows))
        for samples, rows in batches
        if isinstance(samples, AnswerPairs)
    ]


@dataclass(frozen=True)
class AnswerLayout(DocumentLayout):
    """A layout of both documents of each pair."""

    def tensors(self, samples: Samples, rows: Rows) -> Batch:
        """Return the tensors of the documents, and `answers` by pairs."""
        assert isinstance(samples, AnswerPairs)
        batch = super().tensors(samples.documents, samples.both(rows))
        return {**batch, "answers": batch["answers"].view(-1, 2, 2)}

    def describe(self) -> str:
        return f"with two answers each {super().describe()}"

    def computed_tokens(self, samples: Samples, rows: Rows) -> int:
        assert isinstance(samples, AnswerPairs)
        return super().computed_tokens(samples.documents, samples.both(rows))
