"""Masked language modelling: predicting masked tokens or words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel, Trainer

from recipe.batching.batches import Layout, Samples
from recipe.data import language_modeling
from recipe.models import packed_encoders, pretrained
from recipe.models.pretrained import Source
from recipe.reports import figures
from recipe.reports.model_card import About
from recipe.reports.section import Section
from recipe.settings import TRUNCATE
from recipe.task_table import TASKS
from recipe.tasks.base import (
    Batches,
    EncoderObjective,
    Model,
    Objective,
    Task,
    Tokenizer,
    TokenLosses,
    text_layout,
    whole_model,
)
from recipe.tasks.masked_lm import model as masked_models
from recipe.tasks.masked_lm import report as fillings
from recipe.tasks.masked_lm import tokens as masked_texts
from recipe.tasks.masked_lm.batches import MaskedLayout, MaskedTexts
from recipe.tasks.masked_lm.spec import Options
from recipe.tokenization import encoding


class _MaskedTokens(EncoderObjective, TokenLosses):
    def layout(
        self, model: PreTrainedModel, packed: bool, size: int, pad_id: int, batches: Batches
    ) -> Layout:
        rooms = [
            samples.room(rows) for samples, rows in batches if isinstance(samples, MaskedTexts)
        ]
        texts = text_layout(model, packed, size, pad_id, batches)
        return MaskedLayout(texts, max(rooms, default=1))

    def prepare(self, model: PreTrainedModel, packed: bool) -> None:
        if not packed:
            packed_encoders.patch_forward_for_lengths(model)
        masked_models.patch_forward_for_masking(model)


MASKED_TOKENS: Objective = _MaskedTokens()
"""The masked tokens of texts; the loss is the mean over these tokens."""


class MaskedLm(Task):
    """Learns to predict masked tokens or words."""

    options: Options
    data: language_modeling.Texts
    objective: Objective = MASKED_TOKENS

    def read(self, channels: Mapping[str, Path]) -> None:
        self.check_best(("perplexity", "token_accuracy"))
        self.data = language_modeling.load(channels, self.hyperparameters, TASKS["masked-lm"])
        self.train, self.notes = self.data.train, self.data.notes

    def load(self, source: Source) -> Model:
        return masked_models.load(source, self.hyperparameters)

    def longest(self, model: PreTrainedModel, tokenizer: Tokenizer) -> int:
        """Return the length at which texts are split or truncated, also in serving."""
        encoding.refuse_types(model, tokenizer)
        return pretrained.longest_text(model, tokenizer, self.hyperparameters.max_length)

    def tokenise(self, name: str, split: Dataset, tokenizer: Tokenizer, max_length: int) -> Samples:
        truncates = self.hyperparameters.long_texts == TRUNCATE
        return masked_texts.tokenise(name, split, tokenizer, max_length, self.options, truncates)

    def lengths(self, tokenizer: Tokenizer, rows: Sequence[int]) -> list[int]:
        return masked_texts.lengths(self.train.select(rows), tokenizer)

    def pieces(self, length: int, longest: int) -> int:
        truncates = self.hyperparameters.long_texts == TRUNCATE
        return 1 if truncates else -(-length // longest)

    def about(self) -> About:
        return About(
            title="Masked language model",
            pipeline="fill-mask",
            purpose="predict masked tokens in texts like those of its data",
            metrics="Losses are means over masked tokens, which are the same in all evaluations; "
            "the perplexity is their exponential.",
            headline=("perplexity", "token_accuracy", "loss"),
        )

    def sections(self, trainer: Trainer, samples: Mapping[str, Any]) -> Sequence[Section]:
        sections = figures.perplexity_sections(trainer.state.log_history)
        texts = samples["evaluation"]
        if (whole := whole_model(trainer)) and isinstance(texts, MaskedTexts):
            sections.append(fillings.section(*whole, texts))
        return sections


TASK = MaskedLm
