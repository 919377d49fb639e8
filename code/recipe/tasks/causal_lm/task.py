"""Causal language modelling: continuing texts, prompts and conversations."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel, Trainer

from recipe.batching.batches import Layout, Samples
from recipe.batching.document_batches import DocumentLayout, Documents
from recipe.data import language_modeling
from recipe.data.column_names import MESSAGES, PROMPT
from recipe.errors import HyperparameterError
from recipe.models import packed_decoders, pretrained
from recipe.models.sources.origin import Origin
from recipe.reports import generations
from recipe.reports.model_card import About
from recipe.reports.section import Section
from recipe.settings import split_values
from recipe.task_table import TASKS
from recipe.tasks.base import (
    Batches,
    Model,
    Objective,
    Task,
    Tokenizer,
    TokenLosses,
    learned_in,
    text_layout,
    whole_model,
)
from recipe.tasks.causal_lm.answering import Answering, GeneratedAnswers
from recipe.tokenization import chat_template
from recipe.tokenization import documents as document_tokens

_LONGEST_DOCUMENT = 1024


class _NextTokens(TokenLosses):
    packable: Collection[str] = packed_decoders.DECODERS

    def packs(self, model: PreTrainedModel) -> bool:
        return packed_decoders.can_be_packed(model.config)

    def layout(
        self, model: PreTrainedModel, packed: bool, size: int, pad_id: int, batches: Batches
    ) -> Layout:
        texts = text_layout(model, packed, size, pad_id, batches)
        return DocumentLayout(texts, learned_in(batches))

    def prepare(self, model: PreTrainedModel, packed: bool) -> None:
        packed_decoders.patch_forward_for_documents(model)


class _AnsweredTokens(_NextTokens):
    """Also scores answers to prompts in evaluations."""

    generates = True

    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    def look_before(self, trainer: Any) -> None:
        self._answering.answer_before(trainer)

    def generated_scores(self, trainer: Any, samples: Samples) -> dict[str, float]:
        return self._answering.scores(trainer, samples)


NEXT_TOKENS: Objective = _NextTokens()
"""The learned tokens of documents; the loss is the mean over these tokens."""


class CausalLm(Task):
    """Learns to continue texts, prompts and conversations."""

    takes_shards = True
    lengths_are_of_samples = True
    data: language_modeling.Texts
    objective: Objective = NEXT_TOKENS

    def read(self, channels: Mapping[str, Path]) -> None:
        settings, options = self.model_settings, self.options
        scores = split_values(options.generated_scores) if options.do_generate else []
        self.check_best(("perplexity", "token_accuracy", *scores))
        if self.data_settings.predicts and not options.do_generate:
            raise HyperparameterError(
                "do_predict=True asks for answers to prompts, and do_generate is False.",
                "Give do_generate=True, or leave do_predict out.",
            )
        self.data = language_modeling.load(channels, self.data_settings, TASKS["causal-lm"])
        self._answering: Answering | None = None
        if options.do_generate:
            code = channels.get("code")
            self._answering = Answering(settings, self.data, options.generated_scores, code)
            self.objective = _AnsweredTokens(self._answering)

    def request_columns(self) -> dict[str, str | Sequence[str]]:
        columns = super().request_columns()
        if MESSAGES in self.train.column_names and PROMPT in columns:
            return {MESSAGES: columns.pop(PROMPT), **columns}
        return columns

    def load(self, source: Origin) -> Model:
        model, tokenizer = pretrained.load_causal(source, self.model_settings)
        if variables := self.options.chat_template_kwargs:
            chat_template.set_variables(tokenizer, variables)
        if (weight := self.options.router_aux_loss_coef) is not None:
            packed_decoders.set_router_weight(model, weight)
        return model, tokenizer

    def longest(self, model: PreTrainedModel, tokenizer: Tokenizer) -> int:
        """Return the length at which documents are split or truncated; serving reads longer
        prompts."""
        max_length = self.data_settings.max_length
        return pretrained.longest_input(model, tokenizer, max_length, _LONGEST_DOCUMENT)

    def tokenize_split(
        self, name: str, split: Dataset, tokenizer: Tokenizer, max_length: int
    ) -> Samples:
        long_texts = self.data_settings.long_texts
        is_all_learned = self.options.train_on_prompt
        documents = document_tokens.tokenize_split(
            name, split, tokenizer, max_length, long_texts, is_all_learned
        )
        if self._answering is not None:
            self._answering.remember(name, split, documents)
        return documents

    def stop_tokens(
        self, tokenizer: Tokenizer, samples: Mapping[str, Samples], max_length: int
    ) -> set[int]:
        """Return the tokens with which learned turns, completions and texts end."""
        documents = samples["train"]
        assert isinstance(documents, Documents)
        return document_tokens.stop_tokens(documents, tokenizer, max_length)

    def lengths(self, tokenizer: Tokenizer, rows: Sequence[int]) -> list[int]:
        return document_tokens.lengths(self.train.select(rows), tokenizer)

    def pieces(self, length: int, longest: int) -> int:
        is_split = document_tokens.splits(self.train, self.data_settings.long_texts)
        return sum(1 for _ in document_tokens.pieces(length, longest, is_split))

    def about(self) -> About:
        scores = () if self._answering is None else tuple(self._answering.names)
        note = " Answers to prompts are scored in per cent, and by functions of rewards.py."
        return About(
            title="Language model",
            pipeline="text-generation",
            purpose="generate text like that of its data",
            metrics="Losses are means over learned tokens; the perplexity is their exponential."
            + note * bool(scores),
            headline=(*scores, "perplexity", "token_accuracy", "loss"),
        )

    def answers(self) -> GeneratedAnswers | None:
        return None if self._answering is None else self._answering.last

    def sections(self, trainer: Trainer, samples: Mapping[str, Any]) -> Sequence[Section]:
        if self._answering is not None:
            return super().sections(trainer, samples)
        documents = samples["evaluation"]
        if (whole := whole_model(trainer)) and isinstance(documents, Documents):
            return [generations.section(*whole, documents)]
        return ()


TASK = CausalLm
