"""Multiple choice: which of some answers to a question, or endings of a text, is right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForMultipleChoice, EvalPrediction, PreTrainedModel

from recipe.batching import groups
from recipe.batching.groups import Groups
from recipe.batching.samples import Samples
from recipe.data import values
from recipe.data.held_out import DataSets
from recipe.models import pretrained, ranking_losses
from recipe.models.pretrained import Source
from recipe.reports import section
from recipe.reports.model_card import About
from recipe.reports.section import Section
from recipe.tasks.base import (
    SHOWN_CHARS,
    EncoderObjective,
    Model,
    Task,
    Tokenizer,
    judged_split,
)
from recipe.tasks.multiple_choice import data as questions
from recipe.tasks.multiple_choice.data import ANSWER, CHOICES, CONTEXT, QUESTION
from recipe.tasks.multiple_choice.model import pairs_of, patch_forward_for_choices
from recipe.tokenization import texts as text_tokens

_AT_ONCE = 10_000
_WORST = 12


class Choices(EncoderObjective):
    """The objective: the softmax over the choices of a sample; the loss is the mean over samples.

    Labels are [samples, 2]: the position of the right choice, and how many choices there are.
    """

    packable = ("bert", "distilbert", "modernbert")
    """These families' heads for choices are those for classes."""

    def __init__(self) -> None:
        self.last: tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]] | None = None
        """The probabilities and the right choices of the last evaluation."""

    def packs(self, model: PreTrainedModel) -> bool:
        return super().packs(model) and model.config.model_type in self.packable

    def prepare(self, model: PreTrainedModel, packed: bool) -> None:
        patch_forward_for_choices(model)
        super().prepare(model, packed)
        ranking_losses.patch_forward_for_groups(model)

    def losses(self, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        return functional.cross_entropy(_scores(logits, labels), labels[:, 0], reduction="none")

    def score(self, prediction: EvalPrediction) -> dict[str, float]:
        labels = torch.from_numpy(np.asarray(prediction.label_ids))
        scores = _scores(torch.from_numpy(np.asarray(prediction.predictions)), labels)
        self.last = scores.softmax(-1).numpy(), labels[:, 0].numpy()
        return {"accuracy": float((scores.argmax(-1) == labels[:, 0]).float().mean())}


def _scores(logits: Tensor, labels: Tensor) -> Tensor:
    """Return logits [samples, most] in float32, minus infinity where there is no choice."""
    positions = torch.arange(logits.shape[1], device=logits.device)
    # A batch's place without a sample keeps one choice, so that its loss is finite.
    return logits[..., 0].float().masked_fill(positions >= labels[:, 1:].clamp(min=1), -torch.inf)


class MultipleChoice(Task):
    """The right one of some choices."""

    objective: Choices
    data: DataSets

    def read(self, channels: Mapping[str, Path]) -> None:
        self.check_best(("accuracy",))
        self.data = questions.load(channels, self.data_settings)
        self.train, self.notes = self.data.train, self.data.notes
        self.objective = Choices()

    def load(self, source: Source) -> Model:
        return pretrained.load_head(
            AutoModelForMultipleChoice,
            source,
            self.model_settings,
            adapters=None,
            what="a model with a head for choices",
        )

    def longest(self, model: PreTrainedModel, tokenizer: Tokenizer) -> int:
        """Return the most tokens of a question with a choice, also in serving."""
        max_length = self.data_settings.max_length
        length = pretrained.longest_text(model, tokenizer, max_length, pretrained.PAIR_OF_TEXTS)
        tokenizer.model_max_length = length
        return length

    def tokenise(self, name: str, split: Dataset, tokenizer: Tokenizer, max_length: int) -> Samples:
        """Return groups: for each question a pair of texts for each choice."""
        texts = text_tokens.samples(_pairs(split), tokenizer, max_length)
        answers = np.asarray(split[ANSWER][:], dtype=np.int64)
        counts = np.asarray([len(choices) for choices in split[CHOICES]], dtype=np.int64)
        labels = np.stack([answers, counts], axis=1)
        return Groups.from_texts(texts, groups.consecutive(counts), labels)

    def lengths(self, tokenizer: Tokenizer, rows: Sequence[int]) -> list[int]:
        return text_tokens.lengths(_pairs(self.train.select(rows)), tokenizer)

    def about(self) -> About:
        return About(
            title="Model of multiple choice",
            pipeline="multiple-choice",
            purpose="choose the right answer to a question, or the right ending of a text",
            metrics="Accuracy is the share of questions whose right choice is most probable.",
            headline=("accuracy", "loss"),
        )

    def shown(self, row: Mapping[str, Any]) -> str:
        question = f"{row[CONTEXT]} {row[QUESTION]}".strip()[-SHOWN_CHARS:]
        choice = row[CHOICES][row[ANSWER]][:SHOWN_CHARS]
        return f"{question!r}: {choice!r}, of {len(row[CHOICES])} choices"

    def answers(self) -> ChosenAnswers | None:
        if self.objective.last is None:
            return None
        probabilities, true = self.objective.last
        split, data = judged_split(self.data)
        return ChosenAnswers(split=split, data=data, probabilities=probabilities, true=true)


def _pairs(split: Dataset) -> Dataset:
    """Return a row for each choice: the two texts that the model reads."""

    def columns() -> Iterator[tuple[list[str], list[str], list[int]]]:
        for some in values.tables(split, _AT_ONCE):
            pairs = [
                pair
                for row in some.to_pylist()
                for pair in pairs_of(row[CONTEXT], row[QUESTION], row[CHOICES])
            ]
            texts, others = zip(*pairs, strict=True)
            yield list(texts), list(others), [0] * len(pairs)

    return text_tokens.labelled_pairs(columns(), pa.int64())


@dataclass(frozen=True, kw_only=True)
class ChosenAnswers:
    """The model's last answers on the split that it is evaluated on."""

    split: str
    data: Dataset
    probabilities: npt.NDArray[np.float32]
    """[rows, most]: 0 for missing choices."""
    true: npt.NDArray[np.int64]

    @property
    def chosen(self) -> npt.NDArray[np.int64]:
        """Return the most probable choice of each row."""
        chosen: npt.NDArray[np.int64] = self.probabilities.argmax(axis=1)
        return chosen

    def lines(self) -> Iterator[dict[str, Any]]:
        """Return for each row its choice, the right one, and the probability of each."""
        for row, (choice, true) in enumerate(zip(self.chosen, self.true, strict=True)):
            choices = self.data[row][CHOICES]
            yield {
                "row": row,
                "choice": choices[choice],
                "index": int(choice),
                "true": int(true),
                "scores": [round(float(p), 6) for p in self.probabilities[row, : len(choices)]],
            }

    def sections(self) -> list[Section]:
        """Return the accuracy by the position of the right choice, and the most confident wrong
        answers."""
        right = self.chosen == self.true
        positions = [
            [str(position), f"{right[mask].mean():.1%}", f"{(self.chosen == position).mean():.1%}",
             str(int(mask.sum()))]
            for position in range(self.probabilities.shape[1])
            if (mask := self.true == position).any()
        ]  # fmt: skip
        sure = self.probabilities.max(axis=1)
        wrong = np.flatnonzero(~right)
        worst = wrong[np.argsort(-sure[wrong], kind="stable")][:_WORST].tolist()
        shown = []
        for row in worst:
            sample = self.data[row]
            texts = (
                f"{sample[CONTEXT]} {sample[QUESTION]}".strip(),
                *(sample[CHOICES][index] for index in (self.true[row], self.chosen[row])),
            )
            shown.append([*map(section.beginning, texts), f"{sure[row]:.1%}"])
        return [
            Section(
                title=f"Positions of the right choice, {self.split} data",
                note="A model that has learned nothing may prefer a position.",
                columns=section.numbers(
                    "place, from 0", "accuracy", "share of the answers", "count"
                ),
                rows=positions,
            ),
            Section(
                title=f"Worst answers, {self.split} data",
                note=f"{len(wrong)} of {len(right)} answers are wrong.",
                columns=section.texts("question", "right choice", "answer")
                + section.numbers("probability"),
                rows=shown,
            ),
        ]


TASK = MultipleChoice
