"""Zero-shot classification: how well labels that a request names go with each text, by a model that
tells whether a sentence follows from another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from recipe.errors import ModelError
from recipe.inference import loaded_model
from recipe.inference.loaded_model import Encoder, Row
from recipe.inference.origin import Origin
from recipe.inference.payloads import Answers, BadRequest, Request, a_text
from recipe.tokenization.encoding import beginning

PARAMETERS = {"candidate_labels", "hypothesis_template", "multi_label"}
_TEMPLATE = "This example is {}."


@dataclass(frozen=True, kw_only=True)
class ZeroShot:
    """A saved model of entailment that answers texts with labels."""

    encoder: Encoder
    entails: int
    """The output that says that the second text follows from the first."""

    def example(self, text: str) -> Request:
        """A request that this task answers."""
        return Request(texts=[text], parameters={"candidate_labels": ["a", "b"]})

    def measure(self, request: Request) -> list[int]:
        """Tokens of each text with each label.

        Raises:
            BadRequest: a parameter or an input is none of this task's, or there are no labels.
        """
        if request.prepared is None:
            request.only(PARAMETERS, "zero-shot-classification")
            request.read(a_text)
            labels = _labels(request)
            template = request.parameters.get("hypothesis_template", _TEMPLATE)
            _check_template(template)
            hypotheses = [template.format(label) for label in labels]
            request.prepared = [self._rows(text, hypotheses) for text in request.texts]
            limit = self.encoder.max_length
            request.truncated = [
                place
                for place, rows in enumerate(request.prepared)
                if any(len(row.ids) == limit for row in rows)
                and any(
                    self.encoder.is_longer((request.texts[place], each), limit)
                    for each in hypotheses
                )
            ]
        return [len(row.ids) for rows in request.prepared for row in rows]

    def _rows(self, text: str, hypotheses: Sequence[str]) -> list[Row]:
        tokenizer, limit = self.encoder.tokenizer, self.encoder.max_length
        text = beginning(tokenizer, text, limit)
        try:
            # What is cut is the text: without the end of a label, the answer is another label's.
            encoded: Any = tokenizer(
                [text] * len(hypotheses),
                list(hypotheses),
                truncation="only_first",
                max_length=limit,
            )
        except Exception as error:
            # Tokenizers raise this bare, where nothing is left of the text.
            raise BadRequest(f"A label is too long for the model, which reads {limit}.") from error
        ids, types = encoded["input_ids"], encoded.get("token_type_ids")
        if any(len(each) > limit for each in ids):
            raise BadRequest(f"A label is too long for the model, which reads {limit} tokens.")
        return [Row(each, types[n] if types else None) for n, each in enumerate(ids)]

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """For each request `{"sequence", "labels", "scores"}` for each text, the best label first.

        Scores are a softmax over the labels; with `multi_label` each is the label's own probability
        against its contradiction.
        """
        for request in requests:
            self.measure(request)
        rows = [row for request in requests for rows in request.prepared for row in rows]
        logits = iter(self.encoder.forward(rows, lambda output, mask: list(output.logits)))
        return [
            Answers(
                [
                    self._answer(request, text, torch.stack([next(logits) for _ in rows]))
                    for text, rows in zip(request.texts, request.prepared, strict=True)
                ],
                request.truncated,
                request.single,
            )
            for request in requests
        ]

    def _answer(self, request: Request, text: str, logits: torch.Tensor) -> dict[str, Any]:
        labels = _labels(request)
        if request.parameters.get("multi_label") or len(labels) == 1:
            contradicts = -1 if self.entails == 0 else 0
            scores = logits[:, [contradicts, self.entails]].softmax(-1)[:, 1]
        else:
            scores = logits[:, self.entails].softmax(-1)
        ranked = scores.sort(descending=True, stable=True)
        return {
            "sequence": text,
            "labels": [labels[number] for number in ranked.indices.tolist()],
            "scores": ranked.values.tolist(),
        }


def _labels(request: Request) -> list[str]:
    given = request.parameters.get("candidate_labels", [])
    labels = [each.strip() for each in given.split(",")] if isinstance(given, str) else given
    if not any(labels):
        raise BadRequest(
            "candidate_labels names no label. Send for example "
            '{"inputs": "a text", "parameters": {"candidate_labels": ["sports", "politics"]}}.'
        )
    return [label for label in labels if label]


def _check_template(template: str) -> None:
    try:
        fields = [each[1:] for each in Formatter().parse(template) if each[1] is not None]
    except ValueError:
        fields = []
    # A field with a width, or of an attribute, is none that anybody needs here.
    if not fields or any(name not in ("", "0") or spec or turn for name, spec, turn in fields):
        raise BadRequest(
            f"hypothesis_template is {template[:60]!r}. Write {{}} where the label goes, as in "
            f"{_TEMPLATE!r}."
        )


def load(origin: Origin) -> ZeroShot:
    """The model of entailment that `origin` names.

    Raises:
        ModelError: it does not say which of its labels means that a text follows from another.
    """
    loaded = loaded_model.load(origin, AutoModelForSequenceClassification)
    config: Any = loaded.model.config
    names = {str(name): number for number, name in (config.id2label or {}).items()}
    found = [number for name, number in names.items() if name.lower().startswith("entail")]
    if not found:
        raise ModelError(
            f"The model {origin.place} has the labels {', '.join(list(names)[:5])}, of which none "
            "is called entailment.",
            "zero-shot-classification takes a model trained on natural language inference; if this "
            "is one, name its labels in config.json (id2label, label2id).",
        )
    return ZeroShot(encoder=loaded, entails=int(found[0]))
