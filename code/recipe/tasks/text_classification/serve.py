"""Text classification: labels for each text or pair, or numbers (regression); and the scores of a
cross-encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from recipe.backend import bounds, loaded_model, loading, turns
from recipe.backend.bounds import Bound
from recipe.backend.loaded_model import LoadedModel
from recipe.backend.requests import ranking
from recipe.backend.requests.payloads import BadRequest, Label, Request, Text, a_text, read_record
from recipe.backend.rows import Reading
from recipe.backend.served_task import ServedTask
from recipe.errors import ModelError
from recipe.models.sources.origin import Origin
from recipe.spec import TEXT, TEXT_PAIR, Form
from recipe.tasks.text_classification.spec import RANKING, SPECS

PARAMETERS = {
    "top_k", "function_to_apply", "return_all_scores", "return_text", "threshold",
} | loaded_model.PARAMETERS  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Classifier(ServedTask):
    """A saved classifier that answers texts and pairs."""

    served = SPECS[0].served["text-classification"]
    loaded: LoadedModel
    activation: str
    """sigmoid, softmax or none: converts logits to scores, unless a request names another."""

    @classmethod
    def load(cls, origin: Origin) -> Classifier:
        """Return the classifier or cross-encoder that `origin` names.

        Raises:
            ModelError: It cannot be loaded, or names an unsupported activation.
        """
        loaded = loading.load(origin, AutoModelForSequenceClassification)
        return cls(loaded=loaded, activation=activation_of(loaded.model.config, origin))

    def example(self, text: str) -> Request:
        inputs = [text if len(self.loaded.columns) < 2 else [text, text]]
        return Request(inputs=inputs, parameters={"top_k": None})

    def probes(self) -> Sequence[Request]:
        requests = [*super().probes()]
        if self._thresholds:
            last = requests[-1]
            requests.append(replace(last, parameters={"threshold": "tuned"}))
        return requests

    @property
    def lacking(self) -> Set[str]:
        """Return the routes of rankings, if the model has several labels."""
        return frozenset() if self.ranks else {*RANKING}

    @property
    def ranks(self) -> bool:
        """Return whether the model has one label, by which texts can be ranked."""
        return bool(self.loaded.model.config.num_labels == 1)

    @property
    def form(self) -> str:
        return "rank" if self.ranks else self.served.form

    def describe(self) -> dict[str, Any]:
        """Describe the model with `labels`, the number of its classes."""
        return super().describe() | {"labels": self.loaded.model.config.num_labels}

    def prepare(self, request: Request) -> Request:
        request = request.checked(PARAMETERS, "text-classification", nullable={"top_k"})
        config: Any = self.loaded.model.config
        labels = config.num_labels or 0
        is_best_alone = labels < 2 or config.problem_type != "regression"
        if not is_best_alone and "return_all_scores" not in request.parameters:
            request = replace(request, parameters={"top_k": None, **request.parameters})
        pairs = ranking.pairs(request, labels)
        values = request.read(self.text_or_pair) if pairs is None else pairs
        chosen = 1
        if not {"top_k", "threshold", "return_all_scores"}.isdisjoint(request.parameters):
            chosen = min(request.parameters.get("top_k") or labels, labels)
        bounds.hold(Bound.ANSWER, 2 * chosen * len(values))
        threshold = request.parameters.get("threshold")
        if threshold is not None and pairs is not None:
            raise BadRequest("threshold applies to labels, but this request asks for a ranking.")
        applied = request.parameters.get("function_to_apply", "sigmoid")
        if threshold == "tuned" and applied not in ("sigmoid", "default"):
            raise BadRequest(
                f"function_to_apply is {applied}, but tuned thresholds apply to the "
                "probabilities of sigmoid. Leave it out, or give threshold a number."
            )
        if threshold == "tuned" and not self._thresholds:
            raise BadRequest(
                'threshold is "tuned", but the model has no label_thresholds in its config.json '
                "(training with tune_thresholds=True writes them). Give a number from 0 to 1."
            )
        return self.loaded.encode(request, values)

    def text_or_pair(self, value: Any) -> Text:
        """Return an input's text or pair, which may be a list, or have the names of the columns in
        training. Raise BadRequest if it is neither, or one text and the model takes pairs."""
        columns = self.loaded.columns
        if not isinstance(value, (dict, list)) and len(columns) < 2:
            return a_text(value)
        pair = value[0] if isinstance(value, list) and len(value) == 1 else value
        if isinstance(pair, list) and len(pair) == 2:
            return a_text(pair[0]), a_text(pair[1])
        named = zip((TEXT, TEXT_PAIR), columns.values(), strict=False)
        trained = Form(tuple(replace(column, names=(name,)) for column, name in named))
        forms = [form for form in self.served.inputs if len(form.columns) >= len(columns)]
        cells = read_record(value, [trained, *forms] if columns else forms)
        return (cells["text"], cells["text_pair"]) if "text_pair" in cells else str(cells["text"])

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """Return for each request an answer for each text: its best label; with `top_k` a list of
        its best labels (null: all); with `threshold` a list of those that reach it. Of `{"query",
        "texts"}` the texts by their scores, of `{"source_sentence", "sentences"}` the score of
        each.

        Scores are what transformers' pipeline computes: softmax over the labels; the sigmoid of
        each label if a text may have several, or there is but one; of a regression the number
        itself (of several all, also without top_k); and of a cross-encoder what its own
        configuration names.
        """
        answers = []
        logits = self.loaded.rows(requests, Reading.LABELS)
        for prepared, rows in zip(requests, logits, strict=True):
            turns.pause()
            name = prepared.parameters.get("function_to_apply", "default")
            name = self.activation if name == "default" else name
            # In float32, the sigmoid of all logits above 17 is 1.
            ranks = [float(row[0]) for row in rows]
            if name == "sigmoid":
                rows = [row.sigmoid() for row in rows]
            elif name == "softmax":
                rows = [row.softmax(-1) for row in rows]
            if ranking.parts(prepared) is not None:
                answers.append(ranking.answer(prepared, [float(row[0]) for row in rows], ranks))
                continue
            # For a single text the pipeline returns a list with one label; for a pair, or an object
            # with a text, the label.
            chooses = not {"top_k", "threshold"}.isdisjoint(prepared.parameters)
            single = prepared.single and (chooses or not isinstance(prepared.inputs[0], str))
            entries = [self._labels(row, prepared.parameters) for row in rows]
            answers.append(prepared.answer(entries, single=single))
        return answers

    def _labels(self, scores: torch.Tensor, parameters: Mapping[str, Any]) -> Label | list[Label]:
        """Return the best label of a text's scores, or as many as the request asks for."""
        names: Any = self.loaded.model.config.id2label
        threshold = parameters.get("threshold")
        if "top_k" not in parameters and threshold is None:
            if parameters.get("return_all_scores"):
                return [{"label": names[n], "score": s} for n, s in enumerate(scores.tolist())]
            best = scores.max(-1)
            return {"label": names[int(best.indices)], "score": float(best.values)}
        # A stable sort, as the pipeline's: of equal scores the first label comes first.
        ranked = scores.sort(descending=True, stable=True)
        pairs = zip(ranked.indices.tolist(), ranked.values.tolist(), strict=True)
        tuned, usual = (self._thresholds, 0.5) if threshold == "tuned" else ({}, threshold)
        labels = [
            {"label": names[number], "score": score}
            for number, score in pairs
            if threshold is None or score >= tuned.get(names[number], usual)
        ]
        return labels[: parameters.get("top_k")]

    @property
    def _thresholds(self) -> Mapping[str, Any]:
        """Return the tuned threshold of each label, if training tuned them."""
        kept = getattr(self.loaded.model.config, "label_thresholds", None)
        return kept if isinstance(kept, dict) else {}


def activation_of(config: Any, origin: Origin) -> str:
    """Return the activation that converts logits to scores: that of a cross-encoder's files, else
    the choice of transformers' pipeline by the problem and the number of labels.

    The latter also replaces Identity in a cross-encoder's files, as in pipelines and TEI, so that
    scores are probabilities.

    Raises:
        ModelError: The files name an unsupported activation.
    """
    named = origin.sentence_settings.get("activation_fn")
    named = named or (getattr(config, "sentence_transformers", None) or {}).get("activation_fn")
    named = named or getattr(config, "sbert_ce_default_activation_function", None)
    if named is not None:
        known = {"Sigmoid": "sigmoid", "Identity": "", "Softmax": "softmax"}
        name = str(named).rpartition(".")[2]
        if name not in known:
            raise ModelError(
                f"The cross-encoder {origin.location} names the activation {named!r}.",
                f"These handlers have {', '.join(known)}; bring an inference.py for another one.",
            )
        if known[name]:
            return known[name]
    if config.problem_type == "regression":
        return "none"
    is_multi_label = config.problem_type == "multi_label_classification"
    return "sigmoid" if is_multi_label or config.num_labels == 1 else "softmax"
