"""Preferences (DPO): a language model learns which of two answers is better."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from datasets import Dataset
from safetensors.numpy import load, save
from torch import Tensor, nn
from transformers import EvalPrediction, PreTrainedModel, Trainer

from recipe.batching import groups
from recipe.batching.batches import Layout, Samples
from recipe.data.column_names import PROMPT
from recipe.errors import CheckpointError, HyperparameterError
from recipe.models import losses, packed_decoders, pretrained
from recipe.models.pretrained import Source
from recipe.reports import figures, generations, section
from recipe.reports.model_card import About
from recipe.reports.section import Section
from recipe.tasks.base import (
    SHOWN_CHARS,
    WARNING,
    Batches,
    Finding,
    Model,
    Objective,
    Task,
    Tokenizer,
    learned_in,
    named_splits,
    text_layout,
    whole_model,
)
from recipe.tasks.preference import data as preferences
from recipe.tasks.preference import tokens
from recipe.tasks.preference.data import CHOSEN, REJECTED
from recipe.tasks.preference.spec import Options
from recipe.tasks.preference.tokens import AnswerLayout, AnswerPairs
from recipe.tokenization import documents as document_tokens

_LONGEST_DOCUMENT = 1024
_HIGH_RATE = 2e-5
_SCORES = ("reward_accuracy", "reward_margin")
_SHOWN = 6
Array = npt.NDArray[Any]


class PreferenceObjective(Objective):
    """The objective: the increase in log-probability of chosen answers over that of rejected
    ones."""

    packable: Collection[str] = packed_decoders.DECODERS
    has_references = True

    def __init__(self, kind: str, beta: float, smoothing: float) -> None:
        self._kind, self._beta, self._smoothing = kind, beta, smoothing
        self.pairs: dict[str, AnswerPairs] = {}
        """The samples of each split."""
        self.last: tuple[str, Array] | None = None
        """The last evaluation: its split, and the rewards of its pairs [pairs, 2]."""

    def packs(self, model: PreTrainedModel) -> bool:
        return packed_decoders.can_be_packed(model.config)

    def layout(
        self, model: PreTrainedModel, packed: bool, size: int, pad_id: int, batches: Batches
    ) -> Layout:
        documents = groups.text_batches(batches)
        texts = text_layout(model, packed, 2 * size, pad_id, documents)
        return AnswerLayout(texts, learned_in(documents))

    def prepare(self, model: PreTrainedModel, packed: bool) -> None:
        packed_decoders.patch_forward_for_documents(model)
        # Summed over the tokens of an answer, the noise of dropout would exceed what is learned.
        for name, module in model.named_modules():
            if isinstance(module, nn.Dropout) and "lora_dropout" not in name:
                module.p = 0.0
            if isinstance(getattr(module, "attention_dropout", None), float):
                module.attention_dropout = 0.0

    def losses(self, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        return losses.preference_losses(
            -logits[..., 0].float() - labels[:, :2],
            labels[:, 2:],
            self._kind,
            self._beta,
            self._smoothing,
        )

    def score(self, prediction: EvalPrediction) -> dict[str, float]:
        labels = np.asarray(prediction.label_ids)
        logs = -np.asarray(prediction.predictions)[..., 0].astype(np.float64)
        rewards = self._beta * (logs - labels[:, :2])
        is_test = "test" in self.pairs and prediction.label_ids is self.pairs["test"].labels
        self.last = ("test" if is_test else "evaluation"), rewards
        margins = rewards[:, 0] - rewards[:, 1]
        means = zip(("chosen", "rejected"), rewards.mean(axis=0), logs.mean(axis=0), strict=True)
        return {
            "reward_accuracy": float((margins > 0).mean()),
            "reward_margin": float(margins.mean()),
            **{
                name: float(value)
                for answer, reward, log in means
                for name, value in ((f"{answer}_reward", reward), (f"{answer}_logp", log))
            },
        }

    def refer(self, ask: Callable[[Samples], Any]) -> None:
        """Store the log-probabilities of all answers; see `Objective.refer`."""
        for samples in self.pairs.values():
            samples.refer(-np.asarray(ask(samples))[..., 0])

    def references(self) -> bytes:
        """Return the log-probabilities of each split, by the name and digest of its data."""
        return save({
            self._keys[name]: np.ascontiguousarray(samples.labels[:, :2])
            for name, samples in self.pairs.items()
        })  # fmt: skip

    def restore(self, content: bytes) -> None:
        """Restore the log-probabilities that `references` returned."""
        kept = load(content)
        for name, samples in self.pairs.items():
            if self._keys[name] not in kept:
                raise CheckpointError(
                    f"The {name} data has changed since the checkpoint was saved, which has the "
                    "untrained model's log-probabilities of it.",
                    "Start with the same data, or give resume_from_checkpoint=False to train from "
                    "the start.",
                )
            samples.refer(kept[self._keys[name]])

    @functools.cached_property
    def _keys(self) -> Mapping[str, str]:
        """Return the name of each split with the digest of its data, which takes time."""
        return {name: f"{name} {samples.fingerprint()}" for name, samples in self.pairs.items()}


class Preference(Task):
    """Which of two answers to a prompt is better."""

    options: Options
    objective: PreferenceObjective
    data: preferences.Preferences

    def read(self, channels: Mapping[str, Path]) -> None:
        settings = self.data_settings
        self.check_best(_SCORES)
        if not settings.trains:
            raise HyperparameterError(
                "do_train=False leaves nothing to evaluate: rewards measure how training has "
                "changed a model.",
                "Leave it out, or take task=causal-lm for a model's perplexity.",
            )
        kind, smoothing = self.options.loss_type, self.options.label_smoothing
        if smoothing and kind not in ("sigmoid", "robust"):
            raise HyperparameterError(
                f"Hyperparameter label_smoothing has value {smoothing}, which loss_type={kind} "
                "does not use.",
                "Leave it out, or give loss_type=sigmoid or robust.",
            )
        self.data = preferences.load(channels, settings)
        self.train, self.notes = self.data.train, self.data.notes
        self.objective = PreferenceObjective(kind, self.options.beta, smoothing)
        rate, self._warning = settings.learning_rate or 0, ""
        if self.model_settings.lora_r is None and rate > _HIGH_RATE:
            self._warning = (
                f"learning_rate={rate:g} is high for preferences, where all weights are trained: "
                "5e-7 to 5e-6 are usual, with lora_r up to ten times as much"
            )
            self.notes.append(self._warning)

    def load(self, source: Source) -> Model:
        return pretrained.load_causal(source, self.model_settings)

    def longest(self, model: PreTrainedModel, tokenizer: Tokenizer) -> int:
        """Return the length at which a prompt with its answer is cut; serving reads longer
        prompts."""
        max_length = self.data_settings.max_length
        return pretrained.longest_input(model, tokenizer, max_length, _LONGEST_DOCUMENT)

    def tokenise(self, name: str, split: Dataset, tokenizer: Tokenizer, max_length: int) -> Samples:
        are_talks = self.data.are_talks
        pairs = tokens.tokenise(name, split, are_talks, tokenizer, max_length)
        self.objective.pairs[name] = pairs
        return pairs

    def stop_tokens(
        self, tokenizer: Tokenizer, samples: Mapping[str, Samples], max_length: int
    ) -> set[int]:
        pairs = samples["train"]
        assert isinstance(pairs, AnswerPairs)
        return document_tokens.stop_tokens(pairs.chosen(), tokenizer, max_length)

    def lengths(self, tokenizer: Tokenizer, rows: Sequence[int]) -> list[int]:
        return tokens.lengths(self.train.select(rows), self.data.are_talks, tokenizer)

    def findings(self) -> Iterator[Finding]:
        yield from super().findings()
        if self._warning:
            yield Finding(level=WARNING, what="learning rate", detail=self._warning)

    def shown(self, row: Mapping[str, Any]) -> str:
        shown = (f"{name} {row[name][:SHOWN_CHARS]!r}" for name in (PROMPT, CHOSEN, REJECTED))
        return ", ".join(shown)

    def about(self) -> About:
        return About(
            title="Language model",
            pipeline="text-generation",
            purpose="prefer the chosen answers of its data to the rejected ones (DPO, "
            f"{self.options.loss_type} loss, beta {self.options.beta:g})",
            metrics="An answer's reward is beta times the increase of its log-probability by "
            "training. reward_accuracy is the share of pairs whose chosen answer has the higher "
            "reward, and reward_margin the mean difference.",
            headline=(*_SCORES, "loss"),
        )

    def sections(self, trainer: Trainer, samples: Mapping[str, Any]) -> Sequence[Section]:
        """Return the histogram of margins, the pairs at both ends, and generated answers."""
        sections: list[Section] = []
        if self.objective.last is not None:
            split, rewards = self.objective.last
            data = named_splits(self.data)[split]
            margins = rewards[:, 0] - rewards[:, 1]
            order = np.argsort(margins, kind="stable")
            if len(order) > 2 * _SHOWN:
                order = np.concatenate([order[:_SHOWN], order[-_SHOWN:]])
            rows = []
            for pair in order.tolist():
                row = data[int(self.objective.pairs[split].rows[pair])]
                texts = (section.beginning(row[name]) for name in (PROMPT, CHOSEN, REJECTED))
                numbers = (f"{number:+.3f}" for number in (margins[pair], *rewards[pair]))
                rows.append([cell for cells in zip(texts, numbers, strict=True) for cell in cells])
            headings = [("prompt", "margin"), ("chosen", "reward"), ("rejected", "reward")]
            wrong = int((margins <= 0).sum())
            sections += [
                Section(
                    title=f"Margins, {split} data",
                    note=f"{wrong} of {len(margins)} pairs have a margin of 0 or less.",
                    figure=("margins", functools.partial(figures.margins, margins)),
                ),
                Section(
                    title=f"Pairs with the lowest and the highest margins, {split} data",
                    columns=section.texts_with_numbers(*headings),
                    rows=rows,
                ),
            ]
        if whole := whole_model(trainer):
            chosen = self.objective.pairs["evaluation"].chosen()
            sections.append(generations.section(*whole, chosen))
        return sections


TASK = Preference
