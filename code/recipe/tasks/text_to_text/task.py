"""Text to text: summaries, translations, and other pairs of texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel, Trainer

from recipe import metrics
from recipe.batching.batches import Layout, Samples
from recipe.console import say
from recipe.errors import HyperparameterError
from recipe.hyperparameters import Hyperparameters
from recipe.models.pretrained import Source
from recipe.reports import figures
from recipe.reports.model_card import About
from recipe.reports.section import Section
from recipe.runtime import xla
from recipe.tasks.base import Batches, Model, Task, Tokenizer, TokenLosses
from recipe.tasks.text_to_text import data as text_pairs
from recipe.tasks.text_to_text import languages, tokens
from recipe.tasks.text_to_text import model as models
from recipe.tasks.text_to_text import scores as writing
from recipe.tasks.text_to_text.data import SOURCE
from recipe.tasks.text_to_text.scores import Written
from recipe.tasks.text_to_text.spec import SUMMARIES, TRANSLATIONS, Options
from recipe.tasks.text_to_text.tokens import PaddedPairs, Pairs

_USUAL, _USUAL_OF_SUMMARIES, _USUAL_TARGET = 512, 1024, 128
_NO_LIMIT = 1 << 30


class _TextPairs(TokenLosses):
    def __init__(self, hyperparameters: Hyperparameters) -> None:
        self._hyperparameters = hyperparameters
        self._options: Options = hyperparameters.options()
        self._has_said = False
        self.longest_target = 0
        self.last: Written | None = None
        """The text generated in the last evaluation."""

    def layout(
        self, model: PreTrainedModel, packed: bool, size: int, pad_id: int, batches: Batches
    ) -> Layout:
        pairs = [(samples, rows) for samples, rows in batches if isinstance(samples, Pairs)]
        learned = max((samples.weight(rows) for samples, rows in pairs), default=1)
        return PaddedPairs(tokens.shapes(pairs), size, pad_id, models.shift_of(model), learned)

    def prepare(self, model: PreTrainedModel, packed: bool) -> None:
        smoothing = float(self._hyperparameters.passed.get("label_smoothing_factor", 0.0))
        models.patch_forward_for_pairs(model, smoothing)

    def generated_scores(self, trainer: Any, samples: Samples) -> dict[str, float]:
        """Return ROUGE, BLEU and chrF; nothing if weights are sharded or XLA is in use."""
        if not self._options.predict_with_generate:
            return {}
        if trainer.is_fsdp_enabled or xla.is_used():
            if not self._has_said:
                why = "its weights are sharded" if trainer.is_fsdp_enabled else "XLA is in use"
                say(f"predict_with_generate: no text is generated in evaluations, since {why}")
            self._has_said = True
            return {}
        assert isinstance(samples, Pairs)
        options = {"max_new_tokens": self.longest_target}
        if self._options.num_beams is not None:
            options["num_beams"] = self._options.num_beams
        most = None if self._hyperparameters.predicts else self._options.generated_rows
        self.last = writing.write(trainer, samples, most, options)
        return self.last.scores(self._hyperparameters.target_lang)


class TextToText(Task):
    """Learns to generate a target text for a source text."""

    options: Options
    objective: _TextPairs

    def read(self, channels: Mapping[str, Path]) -> None:
        hyperparameters = self.hyperparameters
        written = metrics.WRITING_SCORES if self.options.predict_with_generate else ()
        self.check_best(("perplexity", "token_accuracy", *written))
        if hyperparameters.predicts and not self.options.predict_with_generate:
            raise HyperparameterError(
                "do_predict=True asks for generated text, but predict_with_generate is False.",
                "Leave one of them out.",
            )
        self.objective = _TextPairs(hyperparameters)
        self.data = text_pairs.load(channels, hyperparameters)
        self.train, self.notes = self.data.train, self.data.notes

    def load(self, source: Source) -> Model:
        """Return the model with its languages and prefix set."""
        model, tokenizer = models.load(source, self.hyperparameters, self.options.source_prefix)
        languages.mark(model, tokenizer, self.hyperparameters)
        return model, tokenizer

    def longest(self, model: PreTrainedModel, tokenizer: Tokenizer) -> int:
        """Return the length at which sources are cut, also in serving; set that of targets."""
        hyperparameters = self.hyperparameters
        summarises = hyperparameters.task == SUMMARIES
        source = _within(model, "encoder", "max_length", hyperparameters.max_length)
        if hyperparameters.max_length is None:
            usual = _USUAL_OF_SUMMARIES if summarises else _USUAL
            source = min(source, usual, tokenizer.model_max_length)
        target = _within(model, "decoder", "max_target_length", self.options.max_target_length)
        if self.options.max_target_length is None:
            target = min(target, _USUAL_TARGET)
        tokenizer.model_max_length = source
        self.objective.longest_target = target
        settings: Any = model.generation_config
        settings.max_new_tokens, settings.max_length = target, None
        if self.options.num_beams is not None:
            settings.num_beams = self.options.num_beams
        if (settings.min_length or 0) > target:
            say(f"min_length of the model is {settings.min_length}: lowered to {target}")
            settings.min_length = target
        say(f"targets are cut at {target} tokens")
        return source

    def tokenise(self, name: str, split: Dataset, tokenizer: Tokenizer, max_length: int) -> Samples:
        prefix, target = self.options.source_prefix or "", self.objective.longest_target
        return tokens.tokenise(name, split, tokenizer, prefix, max_length, target)

    def stop_tokens(
        self, tokenizer: Tokenizer, samples: Mapping[str, Samples], max_length: int
    ) -> set[int]:
        return set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}

    def lengths(self, tokenizer: Tokenizer, rows: Sequence[int]) -> list[int]:
        prefix = self.options.source_prefix or ""
        texts = [prefix + text for text in self.train.select(rows)[SOURCE]]
        ids, _ = tokens.encoded(tokenizer, texts, _NO_LIMIT >> 8)
        return [len(tokens) for tokens in ids]

    def about(self) -> About:
        hyperparameters = self.hyperparameters
        scores: tuple[str, ...] = ("rougeLsum", "rouge1", "chrf", "bleu")
        purpose, title = "generate text from text, as in its data", "Text-to-text model"
        if hyperparameters.task == SUMMARIES:
            purpose, title = "summarize texts like those of its data", "Summarization model"
        if hyperparameters.task == TRANSLATIONS:
            scores = ("bleu", "chrf", "rougeLsum")
            title, purpose = "Translation model", "translate texts like those of its data"
            if hyperparameters.source_lang and hyperparameters.target_lang:
                purpose += f", from {hyperparameters.source_lang} to {hyperparameters.target_lang}"
        if self.options.source_prefix:
            purpose += f". Each source has the prefix {self.options.source_prefix!r}"
        return About(
            title=title,
            pipeline=str(hyperparameters.task),
            purpose=purpose,
            metrics="Losses are means over the tokens of targets. ROUGE (F-measure), BLEU and chrF "
            "are from 0 to 100, for the text generated for some rows (generated_rows).",
            headline=(*scores, "perplexity", "loss"),
        )

    def sections(self, trainer: Trainer, samples: Mapping[str, Any]) -> Sequence[Section]:
        sections = figures.perplexity_sections(trainer.state.log_history)
        return [*sections, *super().sections(trainer, samples)]

    def answers(self) -> Written | None:
        last = self.objective.last
        if last is None or self.data.test is None:
            return last
        return dataclasses.replace(last, split="test")


def _within(model: PreTrainedModel, half: str, name: str, requested: int | None) -> int:
    """Return the number of tokens that the encoder or decoder takes: as requested, or all its
    positions.

    Raises:
        HyperparameterError: it has fewer positions than requested.
    """
    config: Any = model.config
    names = (f"max_{half}_position_embeddings", "max_position_embeddings")
    limit = next((value for key in names if (value := getattr(config, key, None))), _NO_LIMIT)
    if requested is not None and requested > limit:
        raise HyperparameterError(
            f"Hyperparameter {name} has value {requested}, but the model's {half} takes {limit} "
            "tokens.",
            f"Give {limit} or less.",
        )
    return int(requested or limit)


TASK = TextToText
