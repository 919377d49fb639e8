"""Multiple choice: which of some answers to a question, or endings of a text, is right.

A question with its choices is a list to rerank, one of whose texts is relevant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from scipy.special import softmax  # type: ignore[import-untyped]
from torch import Tensor
from transformers import AutoModelForMultipleChoice, PreTrainedModel

from recipe.data.relevance import QUERY, SCORES, TEXTS
from recipe.models import pretrained, ranking_losses
from recipe.models.sources.origin import Origin
from recipe.reports.last_answers import Baseline, Mistake, PredictedAnswers
from recipe.reports.model_card import About
from recipe.tasks.base import Model, named_splits
from recipe.tasks.multiple_choice import data as questions
from recipe.tasks.multiple_choice.model import patch_forward_for_choices
from recipe.tasks.ranking_scores import Array, JudgedLists, SearchResults
from recipe.tasks.reranking.task import RankingObjective, Reranking

_CERTAIN = 1e4


class Choices(RankingObjective):
    """The objective: the softmax over the choices of a question; the loss is the mean over
    questions."""

    packable = ("bert", "distilbert", "modernbert")
    """These families' heads for choices are those for classes."""

    def __init__(self) -> None:
        super().__init__(listwise=True)

    def packs(self, model: PreTrainedModel) -> bool:
        return super().packs(model) and model.config.model_type in self.packable

    def prepare(self, model: PreTrainedModel, packed: bool) -> None:
        patch_forward_for_choices(model)
        super().prepare(model, packed)

    def list_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy of each list: ListNet's, if the softmax of labels is 1 for the
        right choice."""
        scores, is_there = labels.unbind(-1)
        certain = torch.stack([(scores - 1) * _CERTAIN, is_there], dim=-1)
        return ranking_losses.list_net(logits, certain)

    def list_scores(
        self, scores: Array, lists: JudgedLists, hits: SearchResults
    ) -> dict[str, float]:
        return {"accuracy": float(np.mean([ranks[0] == 1 for ranks in hits.ranks]))}


class MultipleChoice(Reranking):
    """The right one of some choices."""

    is_listwise = True

    def read(self, channels: Mapping[str, Path]) -> None:
        self.check_best(("accuracy",))
        self.data = questions.load(channels, self.data_settings)
        self.objective = Choices()

    def request_columns(self) -> dict[str, str | Sequence[str]]:
        inputs = self.data.inputs
        columns: dict[str, str | Sequence[str]] = {
            role: inputs[role][0] for role in ("context", "question", "choices") if role in inputs
        }
        if endings := inputs.get("endings"):
            columns["choices"] = questions.sort_endings(endings)
        return columns

    def load(self, source: Origin) -> Model:
        what = "a model with a head for choices"
        return pretrained.load_head(AutoModelForMultipleChoice, source, self.model_settings, what)

    def about(self) -> About:
        return About(
            title="Model of multiple choice",
            pipeline="multiple-choice",
            purpose="choose the right answer to a question, or the right ending of a text",
            metrics="Accuracy is the share of questions whose right choice is most probable.",
            headline=("accuracy", "loss"),
        )

    def answers(self) -> ChosenAnswers | None:
        if self.objective.last is None:
            return None
        split, scores, _ = self.objective.last
        data, lists = named_splits(self.data)[split], self.objective.lists[split]
        return ChosenAnswers(split=split, data=data, scores=scores, lists=lists)


@dataclass(frozen=True, kw_only=True)
class ChosenAnswers(PredictedAnswers):
    """The model's last answers on the split that it is evaluated on."""

    data: Dataset
    scores: Array
    """[choices of all rows]"""
    lists: JudgedLists

    def lines(self) -> Iterator[dict[str, Any]]:
        """Return for each row its choice, the right one, and the probability of each."""
        for row, (sample, span) in enumerate(zip(self.data, self.lists.spans(), strict=True)):
            chances = softmax(self.scores[span].astype(np.float32))
            index = int(chances.argmax())
            yield {
                "row": row,
                "choice": sample[TEXTS][index],
                "index": index,
                "true": int(np.argmax(sample[SCORES])),
                "scores": [round(float(chance), 6) for chance in chances],
            }

    def __len__(self) -> int:
        return len(self.data)

    def mistakes(self, most: int) -> tuple[int, list[Mistake]]:
        """Return the questions with a wrong choice, those of the highest probability first."""
        lines = [line for line in self.lines() if line["index"] != line["true"]]
        lines.sort(key=lambda line: -max(line["scores"]))
        chosen = self.data.select([line["row"] for line in lines[:most]])
        return len(lines), [
            Mistake(
                row=line["row"],
                text=sample[QUERY],
                true=sample[TEXTS][line["true"]],
                predicted=line["choice"],
                measure=max(line["scores"]),
            )
            for line, sample in zip(lines, chosen, strict=False)
        ]

    def baseline(self, score: str) -> Baseline | None:
        """Return the accuracy of choosing at random."""
        chance = float(np.mean([1 / (span.stop - span.start) for span in self.lists.spans()]))
        return Baseline(what="choosing at random", score=chance) if score == "accuracy" else None


TASK = MultipleChoice
