"""Train a score for each sentence of a document, with its neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, EvalPrediction

from recipe.batching.samples import Samples
from recipe.data import held_out
from recipe.data.column_names import ADDRESS, LABEL, PAIR, TEXT
from recipe.data.reading import ReadFile, read_columns
from recipe.errors import DataError, Problems
from recipe.models import pretrained
from recipe.models.sources.origin import Origin
from recipe.reports.model_card import About
from recipe.tasks.base import EncoderObjective, Model, Task, Tokenizer
from recipe.tokenization import texts

from .spec import SPECS, Options, pairs_of

SENTENCES, IN_SUMMARY = "sentences", "in_summary"


class _Chosen(EncoderObjective):
    def losses(self, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        return functional.binary_cross_entropy_with_logits(
            logits[:, 0].float(), labels, reduction="none"
        )

    def score(self, prediction: EvalPrediction) -> dict[str, float]:
        is_chosen = np.asarray(prediction.predictions)[:, 0] > 0
        return {"accuracy": float((is_chosen == np.asarray(prediction.label_ids)).mean())}


class ExtractiveSummary(Task):
    """Scores of the sentences of documents."""

    lengths_are_of_samples = True
    sample_kind = pretrained.PAIR_OF_TEXTS
    options: Options
    objective = _Chosen()

    def read(self, channels: Mapping[str, Path]) -> None:
        """Read documents as lists of sentences, and which of these are in the summary."""
        self.check_best(("accuracy",))
        notes: list[str] = []
        reading = read_columns(channels, SPECS[0], self.data_settings, notes)
        tables: dict[str, list[pa.Table]] = {}
        problems = Problems()
        for file in reading.files:
            with problems.noted():
                tables.setdefault(file.split, []).append(_documents(file))
        problems.check()
        uses, lines = held_out.build(
            reading, tables, self.data_settings, "document", lambda rows: f"{len(rows)} documents"
        )
        self.data = held_out.DataSets(**uses, notes=[*notes, *lines])

    def load(self, source: Origin) -> Model:
        """Load the model with a head of one number."""
        architecture, settings = AutoModelForSequenceClassification, self.model_settings
        model, tokenizer = pretrained.load_head(
            architecture, source, settings, "a model of summaries", ["in summary"]
        )
        config: Any = model.config
        config.problem_type, config.neighbours = None, self.options.neighbours
        return model, tokenizer

    def tokenize_split(
        self, name: str, split: datasets.Dataset, tokenizer: Tokenizer, max_length: int
    ) -> Samples:
        """Return a sample for each sentence."""
        return texts.samples(self._pairs(split), tokenizer, max_length)

    def lengths(self, tokenizer: Tokenizer, rows: Sequence[int]) -> list[int]:
        """Count the tokens of each sentence with its neighbours."""
        return texts.lengths(self._pairs(self.train.select(rows)), tokenizer)

    def _pairs(self, split: datasets.Dataset) -> datasets.Dataset:
        pairs = [
            pair for row in split[SENTENCES] for pair in pairs_of(row, self.options.neighbours)
        ]
        return datasets.Dataset.from_dict(
            {
                TEXT: [text for text, _ in pairs],
                PAIR: [context for _, context in pairs],
                LABEL: [float(mark) for row in split[IN_SUMMARY] for mark in row],
            }
        )

    def about(self) -> About:
        """Describe the model for its card."""
        return About(
            title="Extractive summarizer",
            pipeline="text-classification",
            purpose="choose the sentences of a document that summarize it",
            metrics="Accuracy is of sentences.",
            headline=("accuracy", "loss"),
        )


def _documents(file: ReadFile) -> pa.Table:
    """Return the documents of a file.

    Raises:
        DataError: a row has no sentences, or not a 0 or 1 for each.
    """
    names = file.columns[SENTENCES], file.columns[IN_SUMMARY]
    kept = []
    for first, batch in file.part.batches(list(names)):
        for number, row in enumerate(batch.to_pylist(), first):
            sentences, marks = (row[name] or [] for name in names)
            if not sentences or len(marks) != len(sentences) or not set(marks) <= {0, 1}:
                raise DataError(
                    f"{file.part.where(number)} has {len(sentences)} sentences, and not a 0 or 1 "
                    "for each.",
                    'Write rows as {"sentences": ["It rained."], "in_summary": [1]}.',
                )
            address = file.part.address(number)
            kept.append({SENTENCES: sentences, IN_SUMMARY: marks, ADDRESS: address})
    kinds = {
        SENTENCES: pa.list_(pa.large_string()),
        IN_SUMMARY: pa.list_(pa.int64()),
        ADDRESS: pa.int64(),
    }
    return pa.Table.from_pylist(kept, schema=pa.schema(list(kinds.items())))


TASK = ExtractiveSummary
