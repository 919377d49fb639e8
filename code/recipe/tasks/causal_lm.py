"""Causal language modelling: how texts, prompts and conversations go on."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from recipe.batching import packing
from recipe.batching.batches import Layout, Samples
from recipe.batching.document_batches import Documents, PackedDocuments, PaddedDocuments
from recipe.data import language_modeling
from recipe.hyperparameters import Hyperparameters
from recipe.models import loading, packed_decoders
from recipe.models.loading import Source
from recipe.reports import figures, generations
from recipe.reports.model_card import About
from recipe.reports.section import Section
from recipe.runtime import xla
from recipe.tasks import judging
from recipe.tasks.base import (
    Batches,
    Finding,
    Model,
    Objective,
    SummedBeside,
    check_best,
    lengths_of,
    named,
    shape_for,
)
from recipe.tokenization import documents as document_tokens

_LONGEST_DOCUMENT = 1024


class _NextTokens(SummedBeside):
    packable: Collection[str] = packed_decoders.DECODERS

    def packs(self, model: PreTrainedModel) -> bool:
        return packed_decoders.can_be_packed(model.config)

    def layout(
        self, model: PreTrainedModel, packed: bool, size: int, pad_id: int, batches: Batches
    ) -> Layout:
        learned = max((samples.weight(rows) for samples, rows in batches), default=1)
        if packed:
            return PackedDocuments(shape_for(model, batches), size, pad_id, 0, learned)
        return PaddedDocuments(packing.buckets(lengths_of(batches)), size, pad_id, learned)

    def prepare(self, model: PreTrainedModel, packed: bool) -> None:
        packed_decoders.take_documents(model)


NEXT_TOKENS: Objective = _NextTokens()
"""The learned tokens of documents; the loss is the mean over these tokens."""


class CausalLm:
    """How texts, prompts and conversations go on."""

    objective: Objective = NEXT_TOKENS

    def __init__(self, channels: Mapping[str, Path], hyperparameters: Hyperparameters) -> None:
        check_best(hyperparameters, ("perplexity", "token_accuracy"))
        self._hyperparameters = hyperparameters
        channels = judging.channels(channels, hyperparameters)
        self._texts = language_modeling.load(channels, hyperparameters)
        self.train, self.found = self._texts.train, self._texts.found

    @property
    def sharded(self) -> frozenset[str]:
        """See base.Sharding."""
        return self._texts.sharded

    def load(self, source: Source) -> Model:
        """As it is."""
        return loading.load_causal(source, self._hyperparameters)

    def longest(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
        """Where longer documents are split or truncated; what serves the model reads more."""
        asked = self._hyperparameters.max_length
        return loading.longest_input(model, tokenizer, asked, _LONGEST_DOCUMENT)

    def samples(
        self, tokenizer: PreTrainedTokenizerBase, max_length: int, rows: Sequence[int] | None = None
    ) -> dict[str, Samples]:
        """Pieces of documents."""
        long_texts = self._hyperparameters.long_texts
        return {
            name: document_tokens.tokenise(name, split, tokenizer, max_length, long_texts)
            for name, split in named(self._texts, rows)
        }

    def lengths(self, tokenizer: PreTrainedTokenizerBase, rows: Sequence[int]) -> list[int]:
        """With the end token."""
        return document_tokens.lengths(self.train.select(rows), tokenizer)

    def pieces(self, length: int, longest: int) -> int:
        """Several, where a long document is split."""
        is_split = document_tokens.splits(self.train, self._hyperparameters.long_texts)
        return sum(1 for _ in document_tokens.pieces(length, longest, is_split))

    def about(self) -> About:
        """A language model."""
        return About(
            title="Language model",
            pipeline="text-generation",
            purpose="go on with texts like those of its data",
            metrics="Losses are means over the learned tokens; the perplexity is e to that power.",
            headline=("perplexity", "token_accuracy", "loss"),
        )

    def findings(self) -> Iterator[Finding]:
        """Nothing beyond what was found."""
        yield from ()

    def sections(self, trainer: Trainer, samples: Mapping[str, Any]) -> Sequence[Section]:
        """The perplexity's curve; how the model goes on, if one process has all of it."""
        history = trainer.state.log_history
        sections = []
        if any("eval_perplexity" in entry for entry in history):
            title = "Perplexity, evaluation data"
            draw = functools.partial(figures.perplexity, history)
            sections.append(Section(title=title, figure=("perplexity", draw)))
        documents = samples["evaluation"]
        if trainer.is_fsdp_enabled or xla.in_use() or not isinstance(documents, Documents):
            return sections
        model: Any = trainer.accelerator.unwrap_model(trainer.model)
        tokenizer: Any = trainer.processing_class
        return [*sections, generations.section(model, tokenizer, documents)]


TASK = CausalLm
