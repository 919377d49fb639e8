"""Text classification: one label or several for each text, or a number (regression)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from recipe.inference import loaded_model as encoder
from recipe.inference.loaded_model import Encoder, Origin
from recipe.inference.payloads import Answers, Label, Request

PARAMETERS = {"top_k"}
_MULTI_LABEL = "multi_label_classification"
_THRESHOLD = 0.5


@dataclass(frozen=True, kw_only=True)
class Classifier:
    """A saved classifier that answers texts."""

    encoder: Encoder
    warm_up: Mapping[str, Any] = field(default_factory=dict)

    def measure(self, request: Request) -> list[int]:
        """Tokens of each text.

        Raises:
            BadRequest: a parameter is none of this task's.
        """
        request.only(PARAMETERS, "text-classification")
        return [len(ids) for ids in self.encoder.encode(request)]

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """For each request an answer for each text: its best label; with `top_k` a list of its best
        labels; of a multi-label model the labels of at least 0.5.

        Scores are probabilities: softmax over the labels, or each label's sigmoid where a text may
        have several. A model of one output is a regression, and its score is the number itself.
        """
        rows = self.encoder.rows(requests, lambda output, mask: output.logits)
        return [
            Answers(
                [self._answer(logits, request.parameters.get("top_k")) for logits in each],
                request.truncated,
            )
            for request, each in zip(requests, rows, strict=True)
        ]

    def _answer(self, logits: torch.Tensor, top_k: int | None) -> Label | list[Label]:
        config = self.encoder.model.config
        several = config.problem_type == _MULTI_LABEL
        if len(logits) == 1 and not several:
            return self._labels(logits, 1)[0]
        scores = logits.sigmoid() if several else logits.softmax(-1)
        if top_k is not None:
            return self._labels(scores, top_k)
        labels = self._labels(scores, len(scores) if several else 1)
        return [label for label in labels if label["score"] >= _THRESHOLD] if several else labels[0]

    def _labels(self, scores: torch.Tensor, count: int) -> list[Label]:
        names = self.encoder.model.config.id2label or {}
        best = scores.sort(descending=True)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [{"label": names[number], "score": score} for number, score in list(pairs)[:count]]


def load(origin: Origin) -> Classifier:
    """The classifier that `origin` names."""
    return Classifier(encoder=encoder.load(origin, AutoModelForSequenceClassification))
