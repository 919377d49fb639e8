"""Text classification: labels for each text or pair, or a number (regression); and how well texts
answer a query, of a cross-encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from recipe.errors import ModelError
from recipe.inference import loaded_model as encoder
from recipe.inference.loaded_model import Encoder
from recipe.inference.origin import Origin
from recipe.inference.payloads import Answers, BadRequest, Label, Request, Text, a_text_or_pair
from recipe.inference.tasks import ranking
from recipe.inference.tasks.ranking import Ranking

PARAMETERS = {"top_k", "function_to_apply", "return_all_scores", "return_text"} | encoder.PARAMETERS
_MULTI_LABEL = "multi_label_classification"


@dataclass(frozen=True, kw_only=True)
class Classifier:
    """A saved classifier that answers texts and pairs."""

    encoder: Encoder
    activation: str
    """sigmoid, softmax or none: what makes scores of the model's outputs, unless a request says."""

    def example(self, text: str) -> Request:
        """A request that this task answers."""
        return Request(texts=[text if len(self._columns) < 2 else (text, text)])

    def measure(self, request: Request) -> list[int]:
        """Tokens of each text.

        Raises:
            BadRequest: a parameter or an input is none of this task's.
        """
        request.only(PARAMETERS, "text-classification", nullable={"top_k"})
        ranking.expand(request, self._text, self.encoder.model.config.num_labels or 0)
        return [len(ids) for ids in self.encoder.encode(request)]

    @property
    def _columns(self) -> Sequence[str]:
        """What the recipe trained the model on: one column of texts, or two of pairs."""
        return getattr(self.encoder.model.config, "text_columns", None) or ()

    def _text(self, value: Any) -> Text:
        """An input; a pair also by the names that its columns had in training.

        Raises:
            BadRequest: it is none, or one text where the model was trained on pairs.
        """
        columns = self._columns
        is_pair = len(columns) == 2
        if is_pair and isinstance(value, dict) and set(value) == set(columns):
            value = {"text": value[columns[0]], "text_pair": value[columns[1]]}
        text = a_text_or_pair(value)
        if is_pair and isinstance(text, str):
            raise BadRequest(
                f"The model was trained on pairs of texts ({columns[0]}, {columns[1]}), and an "
                f"input is one text: {text[:60]!r}. Send for example "
                '{"inputs": [{"text": "the first", "text_pair": "the second"}]}.'
            )
        return text

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """For each request an answer for each text: its best label; with `top_k` a list of its best
        labels, all of them where it is null. Of `{"query", "texts"}` the texts by their scores, of
        `{"source_sentence", "sentences"}` the score of each.

        Scores are what transformers' pipeline computes: softmax over the labels; the sigmoid of
        each label where a text may have several, or there is but one; of a regression the number
        itself; and of a cross-encoder what its own configuration names.
        """
        rows = self.encoder.rows(requests, _logits)
        return [self._answers(*each) for each in zip(requests, rows, strict=True)]

    def _answers(self, request: Request, logits: Sequence[torch.Tensor]) -> Answers:
        parameters = request.parameters
        if isinstance(request.raw, Ranking):
            scores = [float(self._scores(each, parameters)[0]) for each in logits]
            return request.raw.answers(scores, request)
        # The pipeline answers a text in no list by a list of one label; a pair by the label alone.
        alone = request.single and ("top_k" in parameters or not isinstance(request.texts[0], str))
        entries = [self._answer(self._scores(each, parameters), parameters) for each in logits]
        return Answers(entries, request.truncated, single=alone)

    def _scores(self, logits: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
        name = parameters.get("function_to_apply", "default")
        name = self.activation if name == "default" else name
        if name == "sigmoid":
            return logits.sigmoid()
        return logits.softmax(-1) if name == "softmax" else logits

    def _answer(self, scores: torch.Tensor, parameters: Mapping[str, Any]) -> Label | list[Label]:
        names: Any = self.encoder.model.config.id2label
        if "top_k" not in parameters:
            if parameters.get("return_all_scores"):
                return [{"label": names[n], "score": s} for n, s in enumerate(scores.tolist())]
            best = scores.max(-1)
            return {"label": names[int(best.indices)], "score": float(best.values)}
        # A stable sort, as the pipeline's: of equal scores the first label comes first.
        ranked = scores.sort(descending=True, stable=True)
        pairs = zip(ranked.indices.tolist(), ranked.values.tolist(), strict=True)
        labels = [{"label": names[number], "score": score} for number, score in pairs]
        return labels[: parameters["top_k"]]


def _logits(output: Any, mask: torch.Tensor) -> Sequence[torch.Tensor]:
    logits: torch.Tensor = output.logits
    return list(logits)


def load(origin: Origin) -> Classifier:
    """The classifier or cross-encoder that `origin` names.

    Raises:
        ModelError: it is a cross-encoder of more parts than a classifier has.
    """
    loaded = encoder.load(origin, AutoModelForSequenceClassification)
    return Classifier(encoder=loaded, activation=_activation(loaded.model.config, origin))


def _activation(config: Any, origin: Origin) -> str:
    """What makes scores of the outputs: what a cross-encoder's files name, else as transformers'
    pipeline decides by the problem and the number of labels."""
    named = origin.sentence_settings.get("activation_fn")
    named = named or (getattr(config, "sentence_transformers", None) or {}).get("activation_fn")
    named = named or getattr(config, "sbert_ce_default_activation_function", None)
    if named is not None:
        known = {"Sigmoid": "sigmoid", "Identity": "none", "Softmax": "softmax"}
        name = str(named).rpartition(".")[2]
        if name not in known:
            raise ModelError(
                f"The cross-encoder {origin.place} names the activation {named!r}.",
                f"These handlers have {', '.join(known)}; bring an inference.py for another one.",
            )
        return known[name]
    if config.problem_type == "regression":
        return "none"
    return "sigmoid" if config.problem_type == _MULTI_LABEL or config.num_labels == 1 else "softmax"
