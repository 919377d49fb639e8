"""Text to text: summaries, translations, and other pairs of texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedModel

from recipe import metrics
from recipe.batching.batches import Layout, Samples
from recipe.batching.text_pairs import PaddedPairs, Pairs, pair_shapes
from recipe.compat import UNBOUNDED
from recipe.console import say
from recipe.data.column_names import SOURCE, TARGET
from recipe.errors import HyperparameterError
from recipe.models import encoder_decoders, lora
from recipe.models.sources.origin import Origin
from recipe.reports.generations import GeneratedTexts
from recipe.reports.model_card import About
from recipe.reports.section import spread_rows
from recipe.runtime.device import gather_objects
from recipe.settings import DataSettings
from recipe.tasks.base import (
    Batches,
    Model,
    Task,
    Tokenizer,
    TokenLosses,
    learned_in,
    whole_model,
)
from recipe.tasks.text_scores import score_texts
from recipe.tasks.text_to_text import data as text_pairs
from recipe.tasks.text_to_text.spec import SUMMARIES, TRANSLATIONS, Options
from recipe.tokenization import encoding, languages
from recipe.tokenization import texts as text_tokens

_USUAL, _USUAL_OF_SUMMARIES, _USUAL_TARGET = 512, 1024, 128


class _TextPairs(TokenLosses):
    def __init__(self, settings: DataSettings, options: Options) -> None:
        self._settings, self._options = settings, options
        self.generates = options.predict_with_generate
        self._has_logged = False
        self.longest_target = 0
        self.last: GeneratedTexts | None = None
        """The text generated in the last evaluation."""

    def layout(
        self, model: PreTrainedModel, packed: bool, size: int, pad_id: int, batches: Batches
    ) -> Layout:
        shift, learned = encoder_decoders.shift_of(model), learned_in(batches)
        return PaddedPairs(pair_shapes(batches), size, pad_id, shift, learned)

    def prepare(self, model: PreTrainedModel, packed: bool) -> None:
        smoothing = float(self._settings.passed.get("label_smoothing_factor", 0.0))
        encoder_decoders.patch_forward_for_pairs(model, smoothing)

    def generated_scores(self, trainer: Any, samples: Samples) -> dict[str, float]:
        """Return the scores of text that all processes generate together, for the same rows each
        time; nothing if weights are sharded or XLA is in use."""
        if not self.generates:
            return {}
        if (whole := whole_model(trainer)) is None:
            if not self._has_logged:
                why = "its weights are sharded" if trainer.is_fsdp_enabled else "XLA is in use"
                say(f"predict_with_generate: no text is generated in evaluations, since {why}")
            self._has_logged = True
            return {}
        assert isinstance(samples, Pairs)
        options = {"max_new_tokens": self.longest_target}
        if self._options.num_beams is not None:
            options["num_beams"] = self._options.num_beams
        most = len(samples) if self._settings.predicts else self._settings.generated_rows
        rows = np.array(spread_rows(len(samples), most))
        by_length = rows[np.argsort(samples.lengths[rows], kind="stable")]
        mine = by_length[trainer.args.process_index :: trainer.args.world_size]
        size, (model, tokenizer) = trainer.args.eval_batch_size, whole
        inner = lora.bare(model).eval()
        generated: list[tuple[int, str, int]] = []
        with torch.no_grad(), trainer.compute_loss_context_manager():
            for batch in (mine[start : start + size] for start in range(0, len(mine), size)):
                sources = [samples.tokens(row)[: samples.sources[row]].tolist() for row in batch]
                inputs = tokenizer.pad(
                    {"input_ids": sources}, padding_side="right", return_tensors="pt", verbose=False
                )
                output = inner.generate(**inputs.to(inner.device), do_sample=False, **options)
                texts = tokenizer.batch_decode(output, skip_special_tokens=True)
                # Without padding and start tokens.
                lengths = (output[:, 1:] != tokenizer.pad_token_id).sum(-1).tolist()
                generated += zip(batch.tolist(), map(str.strip, texts), lengths, strict=True)
        every = sorted(row for part in gather_objects(generated) for row in part)
        numbers, texts, lengths = (list(part) for part in zip(*every, strict=True))
        self.last = GeneratedTexts(numbers, texts, samples.texts)
        scores = score_texts(texts, self.last.targets(), self._settings.target_lang)
        return {**scores, "gen_len": float(np.mean(lengths))}


class TextToText(Task):
    """Learns to generate a target text for a source text."""

    samples_are_rows = True
    options: Options
    objective: _TextPairs

    def read(self, channels: Mapping[str, Path]) -> None:
        settings = self.data_settings
        written = metrics.WRITING_SCORES if self.options.predict_with_generate else ()
        self.check_best(("perplexity", "token_accuracy", *written))
        if settings.predicts and not self.options.predict_with_generate:
            raise HyperparameterError(
                "do_predict=True asks for generated text, but predict_with_generate is False.",
                "Leave one of them out.",
            )
        self.objective = _TextPairs(settings, self.options)
        self.data = text_pairs.load(channels, settings)

    def load(self, source: Origin) -> Model:
        """Return the model with its languages and prefix set."""
        settings, prefix = self.data_settings, self.options.source_prefix
        model, tokenizer = encoder_decoders.load(source, self.model_settings, prefix)
        languages.mark(model, tokenizer, settings.source_lang, settings.target_lang)
        return model, tokenizer

    def longest(self, model: PreTrainedModel, tokenizer: Tokenizer) -> int:
        """Return the length at which sources are cut, also in serving; set that of targets."""
        usual = _USUAL_OF_SUMMARIES if self.data_settings.task == SUMMARIES else _USUAL
        usual = min(usual, tokenizer.model_max_length)
        source = _longest(model, "encoder", "max_length", self.data_settings.max_length, usual)
        requested = self.options.max_target_length
        target = _longest(model, "decoder", "max_target_length", requested, _USUAL_TARGET)
        tokenizer.model_max_length = source
        self.objective.longest_target = target
        generation: Any = model.generation_config
        generation.max_new_tokens, generation.max_length = target, None
        if self.options.num_beams is not None:
            generation.num_beams = self.options.num_beams
        if (generation.min_length or 0) > target:
            say(f"min_length of the model is {generation.min_length}: lowered to {target}")
            generation.min_length = target
        say(f"targets are cut at {target} tokens")
        return source

    def tokenize_split(
        self, name: str, split: Dataset, tokenizer: Tokenizer, max_length: int
    ) -> Samples:
        longest = {SOURCE: max_length, TARGET: self.objective.longest_target}
        prefix = self.options.source_prefix or ""
        return text_tokens.source_target_samples(name, split, tokenizer, prefix, longest)

    def stop_tokens(
        self, tokenizer: Tokenizer, samples: Mapping[str, Samples], max_length: int
    ) -> set[int]:
        return set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}

    def lengths(self, tokenizer: Tokenizer, rows: Sequence[int]) -> list[int]:
        prefix = self.options.source_prefix or ""
        texts = [prefix + text for text in self.train.select(rows)[SOURCE]]
        return [len(ids) for ids in encoding.encode(tokenizer, texts, encoding.UNCUT)]

    def about(self) -> About:
        settings = self.data_settings
        scores: tuple[str, ...] = ("rougeLsum", "rouge1", "chrf", "bleu")
        purpose, title = "generate text from text, as in its data", "Text-to-text model"
        if settings.task == SUMMARIES:
            purpose, title = "summarize texts like those of its data", "Summarization model"
        if settings.task == TRANSLATIONS:
            scores = ("bleu", "chrf", "rougeLsum")
            title, purpose = "Translation model", "translate texts like those of its data"
            if settings.source_lang and settings.target_lang:
                purpose += f", from {settings.source_lang} to {settings.target_lang}"
        if self.options.source_prefix:
            purpose += f". Each source has the prefix {self.options.source_prefix!r}"
        return About(
            title=title,
            pipeline=str(settings.task),
            purpose=purpose,
            metrics="Losses are means over the tokens of targets. ROUGE (F-measure), BLEU and chrF "
            "are from 0 to 100, for the text generated for some rows (generated_rows).",
            headline=(*scores, "perplexity", "loss"),
        )

    def answers(self) -> GeneratedTexts | None:
        last = self.objective.last
        if last is None or self.data.test is None:
            return last
        return dataclasses.replace(last, split="test")


def _longest(
    model: PreTrainedModel, half: str, name: str, requested: int | None, usual: int
) -> int:
    """Return the tokens at which the texts of the encoder or decoder are cut: as requested, or the
    usual number within its positions. Raise HyperparameterError if it has fewer than requested."""
    config: Any = model.config
    names = (f"max_{half}_position_embeddings", "max_position_embeddings")
    limit = next((value for key in names if (value := getattr(config, key, None))), UNBOUNDED)
    if requested is not None and requested > limit:
        raise HyperparameterError(
            f"Hyperparameter {name} has value {requested}, but the model's {half} takes {limit} "
            "tokens.",
            f"Give {limit} or less.",
        )
    return requested or int(min(limit, usual))


TASK = TextToText
