"""Text to text: summaries, translations, and other pairs of texts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sacrebleu
import torch
from datasets import Dataset
from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped]
from transformers import PreTrainedModel

from recipe import metrics
from recipe.batching.batches import Layout, Samples
from recipe.console import say
from recipe.errors import HyperparameterError
from recipe.models import lora
from recipe.models.pretrained import Source
from recipe.reports.model_card import About
from recipe.reports.section import Section
from recipe.runtime import xla
from recipe.runtime.device import everyones
from recipe.settings import DataSettings
from recipe.tasks.base import Batches, Model, Task, Tokenizer, TokenLosses
from recipe.tasks.text_to_text import data as text_pairs
from recipe.tasks.text_to_text import languages, tokens
from recipe.tasks.text_to_text import model as models
from recipe.tasks.text_to_text.data import SOURCE, TARGET
from recipe.tasks.text_to_text.spec import SUMMARIES, TRANSLATIONS, Options
from recipe.tasks.text_to_text.tokens import PaddedPairs, Pairs

_USUAL, _USUAL_OF_SUMMARIES, _USUAL_TARGET = 512, 1024, 128
_NO_LIMIT = 1 << 30
_SHOWN = 6
_SHOWN_CHARS = 600
_WORD = re.compile(r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff]|[^\W_]+")
_OF_ROUGE = re.compile(r"[a-z0-9]")


@dataclass(frozen=True)
class Written:
    """Text generated for some rows of a data set."""

    rows: Sequence[int]
    texts: Sequence[str]
    lengths: Sequence[int]
    """Token ids of each text, without padding and start tokens."""
    pairs: Pairs
    split: str = "evaluation"

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the entry of do_predict for each row."""
        for row, text, target in zip(self.rows, self.texts, self.targets(), strict=True):
            yield {"row": row, "text": text, "true": target}

    def scores(self, language: str | None) -> dict[str, float]:
        """Return `WRITING_SCORES` against the unchanged targets of the data: from 0 to 100, except
        the mean number of tokens."""
        targets = self.targets()
        kinds = ["rouge1", "rouge2", "rougeL", "rougeLsum"]
        joined = "".join(targets).lower()
        letters = sum(character.isalnum() for character in joined)
        is_latin = len(_OF_ROUGE.findall(joined)) >= 0.8 * letters
        # As in run_summarization.py, if the library's tokenizer finds words.
        scorer = RougeScorer(kinds, use_stemmer=is_latin, tokenizer=None if is_latin else _Words())
        rouge = [scorer.score(true, text) for text, true in zip(self.texts, targets, strict=True)]
        # How sacrebleu splits words: by characters in languages without spaces.
        code = re.split("[_-]", language or "")[0].lower()
        words = "13a"
        if code in ("zh", "zho", "yue"):
            words = "zh"
        elif code in ("ja", "jpn", "th", "tha", "lo", "lao", "km", "khm", "my"):
            words = "char"
        return {
            **{kind: 100 * float(np.mean([one[kind].fmeasure for one in rouge])) for kind in kinds},
            "bleu": float(sacrebleu.corpus_bleu(self.texts, [targets], tokenize=words).score),
            "chrf": float(sacrebleu.corpus_chrf(self.texts, [targets]).score),
            "gen_len": float(np.mean(self.lengths)),
        }

    def targets(self) -> list[str]:
        """Return the targets of `rows`."""
        return list(self.pairs.texts.select(self.rows)[TARGET])

    def sections(self) -> Sequence[Section]:
        """Return a table of some generated texts and their targets."""
        count = len(self.rows)
        chosen = np.linspace(0, count - 1, min(_SHOWN, count)).astype(int).tolist()
        examples = self.pairs.texts.select([self.rows[index] for index in chosen])
        texts = [self.texts[index] for index in chosen]
        rows = zip(examples[SOURCE], texts, examples[TARGET], strict=True)
        section = Section(
            title=f"Generated text, {self.split} data",
            note=f"The scores are of {count} of {len(self.pairs)} rows.",
            columns=("source", "the model", "the data"),
            rows=[*rows],
        )
        return [section]


def write(trainer: Any, pairs: Pairs, most: int | None, options: dict[str, Any]) -> Written:
    """Generate text for `most` rows (None: all), the same ones each time, on all processes
    together.

    Args:
        trainer: Its model and tokenizer are used; the weights are whole on each process.
        options: Arguments of `generate`.
    """
    count = len(pairs) if most is None else min(most, len(pairs))
    rows = np.unique(np.linspace(0, len(pairs) - 1, count).astype(int))
    by_length = rows[np.argsort(pairs.lengths[rows], kind="stable")]
    mine = by_length[trainer.args.process_index :: trainer.args.world_size]
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    inner = lora.bare(model)
    inner.eval()
    tokenizer = trainer.processing_class
    texts_by_row: list[tuple[int, str, int]] = []
    size = trainer.args.eval_batch_size
    with torch.no_grad(), trainer.compute_loss_context_manager():
        for start in range(0, len(mine), size):
            batch = mine[start : start + size]
            sources = [pairs.tokens(row)[: pairs.sources[row]].tolist() for row in batch]
            inputs = tokenizer.pad(
                {"input_ids": sources}, padding_side="right", return_tensors="pt", verbose=False
            )
            output = inner.generate(**inputs.to(inner.device), do_sample=False, **options)
            texts = tokenizer.batch_decode(output, skip_special_tokens=True)
            lengths = (output[:, 1:] != tokenizer.pad_token_id).sum(-1).tolist()
            texts_by_row += zip(batch.tolist(), map(str.strip, texts), lengths, strict=True)
    every = sorted(row for part in everyones(texts_by_row) for row in part)
    numbers, texts, lengths = (list(part) for part in zip(*every, strict=True))
    return Written(numbers, texts, lengths, pairs)


class _Words:
    """Splits texts of any script into words for ROUGE, or into characters if words are not spaced.
    The library's own tokenizer knows a to z and 0 to 9 only."""

    def tokenize(self, text: str) -> list[str]:
        """Return words in lower case."""
        return _WORD.findall(text.lower())


class _TextPairs(TokenLosses):
    def __init__(self, settings: DataSettings, options: Options) -> None:
        self._settings, self._options = settings, options
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
        smoothing = float(self._settings.passed.get("label_smoothing_factor", 0.0))
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
        most = None if self._settings.predicts else self._options.generated_rows
        self.last = write(trainer, samples, most, options)
        return self.last.scores(self._settings.target_lang)


class TextToText(Task):
    """Learns to generate a target text for a source text."""

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
        self.train, self.notes = self.data.train, self.data.notes

    def load(self, source: Source) -> Model:
        """Return the model with its languages and prefix set."""
        model, tokenizer = models.load(source, self.model_settings, self.options.source_prefix)
        languages.mark(model, tokenizer, self.data_settings)
        return model, tokenizer

    def longest(self, model: PreTrainedModel, tokenizer: Tokenizer) -> int:
        """Return the length at which sources are cut, also in serving; set that of targets."""
        settings = self.data_settings
        summarises = settings.task == SUMMARIES
        source = _token_limit(model, "encoder", "max_length", settings.max_length)
        if settings.max_length is None:
            usual = _USUAL_OF_SUMMARIES if summarises else _USUAL
            source = min(source, usual, tokenizer.model_max_length)
        target = _token_limit(model, "decoder", "max_target_length", self.options.max_target_length)
        if self.options.max_target_length is None:
            target = min(target, _USUAL_TARGET)
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

    def answers(self) -> Written | None:
        last = self.objective.last
        if last is None or self.data.test is None:
            return last
        return dataclasses.replace(last, split="test")


def _token_limit(model: PreTrainedModel, half: str, name: str, requested: int | None) -> int:
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
