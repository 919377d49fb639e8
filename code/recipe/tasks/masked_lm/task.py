"""Masked language modelling: predicting masked tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForMaskedLM, PreTrainedModel, Trainer

from recipe.batching.batches import Layout, Samples
from recipe.batching.document_batches import DocumentLayout
from recipe.data import language_modeling
from recipe.errors import ModelError
from recipe.models import lora, packed_decoders, packed_encoders, pretrained
from recipe.models.packed_decoders import States
from recipe.models.packed_encoders import Family
from recipe.models.sources.origin import Origin
from recipe.reports.model_card import About
from recipe.reports.section import Section, spread_rows
from recipe.settings import TRUNCATE, ModelSettings
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
from recipe.tasks.masked_lm import tokens as masked_texts
from recipe.tasks.masked_lm.batches import MaskedTexts
from recipe.tasks.masked_lm.spec import Options
from recipe.tokenization import encoding

_SHOWN = 6


class _MaskedTokens(EncoderObjective, TokenLosses):
    def layout(
        self, model: PreTrainedModel, packed: bool, size: int, pad_id: int, batches: Batches
    ) -> Layout:
        rooms = [
            samples.room(rows) for samples, rows in batches if isinstance(samples, MaskedTexts)
        ]
        texts = text_layout(model, packed, size, pad_id, batches)
        return DocumentLayout(texts, max(rooms, default=1))

    def prepare(self, model: PreTrainedModel, packed: bool) -> None:
        if not packed:
            packed_encoders.patch_forward_for_lengths(model)
        patch_forward_for_masking(model)


MASKED_TOKENS: Objective = _MaskedTokens()
"""The masked tokens of texts; the loss is the mean over these tokens."""


class MaskedLm(Task):
    """Learns to predict masked tokens."""

    options: Options
    data: language_modeling.Texts
    objective: Objective = MASKED_TOKENS

    def read(self, channels: Mapping[str, Path]) -> None:
        self.check_best(("perplexity", "token_accuracy"))
        self.data = language_modeling.load(channels, self.data_settings, TASKS["masked-lm"])

    def load(self, source: Origin) -> Model:
        return load_model(source, self.model_settings)

    def longest(self, model: PreTrainedModel, tokenizer: Tokenizer) -> int:
        """Return the length at which texts are split or truncated."""
        encoding.refuse_types(model, tokenizer)
        return pretrained.longest_text(model, tokenizer, self.data_settings.max_length)

    def tokenize_split(
        self, name: str, split: Dataset, tokenizer: Tokenizer, max_length: int
    ) -> Samples:
        truncates = self.data_settings.long_texts == TRUNCATE
        return masked_texts.tokenize_split(
            name, split, tokenizer, max_length, self.options, truncates
        )

    def lengths(self, tokenizer: Tokenizer, rows: Sequence[int]) -> list[int]:
        return masked_texts.lengths(self.train.select(rows), tokenizer)

    def pieces(self, length: int, longest: int) -> int:
        truncates = self.data_settings.long_texts == TRUNCATE
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
        texts, whole = samples["evaluation"], whole_model(trainer)
        if whole is None or not isinstance(texts, MaskedTexts):
            return ()
        model, tokenizer = lora.bare(whole[0]), whole[1]
        model.eval()
        masked = np.flatnonzero(texts.labels)
        chosen = masked[spread_rows(len(masked), _SHOWN)]
        names = ("cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id")
        ends = {getattr(tokenizer, name, None) for name in names}
        rows = []
        for row in chosen.tolist():
            source = np.arange(texts.starts[row], texts.starts[row + 1])
            indices, _ = texts.masked(source)
            ids = texts.tokens(row).astype(np.int64)
            true = ids[indices].tolist()
            ids[indices] = texts.masking.mask_id
            inputs = torch.from_numpy(ids)[None].to(model.device)
            with torch.inference_mode():
                output = model(input_ids=inputs, attention_mask=torch.ones_like(inputs))
            predicted = output.logits[0, torch.from_numpy(indices).to(model.device)].argmax(-1)
            shown = tokenizer.decode([token for token in ids.tolist() if token not in ends])
            answers = (_listed(tokenizer, tokens) for tokens in (predicted.tolist(), true))
            rows.append((str(shown), *answers))
        columns, title = ("text", "the model", "the data"), "Predicted tokens, evaluation data"
        return [Section(title=title, columns=columns, rows=rows)]


def _listed(tokenizer: Tokenizer, ids: list[int]) -> str:
    return ", ".join(str(tokenizer.decode([token])).strip() for token in ids)


def load_model(source: Origin, settings: ModelSettings) -> Model:
    """Return the masked language model in float32, and its tokenizer.

    Raises:
        ModelError: it cannot be reached or loaded, is no such model, has no mask, knows fewer
            tokens than its tokenizer, or lacks the head that LoRA needs.
    """
    model, tokenizer, new = pretrained.read(AutoModelForMaskedLM, source, settings)
    config: Any = model.config
    if config.is_encoder_decoder:
        raise ModelError(
            f"The model {source.location} is of type {config.model_type}, an encoder with a "
            "decoder, which generates text and does not fill masks.",
            "Give an encoder such as a BERT, or another task.",
        )
    if tokenizer.mask_token_id is None:
        raise ModelError(
            f"The tokenizer of {source.location} has no mask token.",
            "Give a model that was pretrained by masking, or set mask_token in its "
            "tokenizer_config.json.",
        )
    what = "a masked language model"
    pretrained.note_new_head(source, new, settings, what)
    if new and settings.lora_r is not None:
        raise ModelError(
            f"The model {source.location} lacks {len(new)} weights of {what} ({new[0]} ...), whose "
            "head would stay random with LoRA.",
            "Give a model that was saved with its head, or leave lora_r out.",
        )
    model = lora.wrap(model, settings, None, tokenizer=tokenizer)
    return model, tokenizer


def patch_forward_for_masking(model: Any) -> None:
    """Let `model` also take batches of masked texts, with the results of
    `patch_forward_for_tokens`."""
    family = packed_encoders.family_of(lora.bare(model).config)
    packed_decoders.patch_forward_for_tokens(model, functools.partial(_states, family))


def _states(
    family: Family | None, model: Any, usual: Callable[..., Any], inputs: dict[str, Any]
) -> States:
    if family is None:
        logits = usual(**inputs).logits
        return States(logits, packed_decoders.identity_head, model.config.vocab_size)
    segments = inputs.get("segments")
    if segments is None:
        hidden = model.base_model(**inputs).last_hidden_state
    else:
        hidden = packed_encoders.states(model, family, inputs, segments)
    return States(hidden, functools.partial(family.masked, model), model.config.vocab_size)


TASK = MaskedLm
