"""Zero-shot classification: scores of a request's labels for each text, by a model of natural
language inference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from recipe.backend import bounds, loading, turns, zero_shot
from recipe.backend.bounds import Bound
from recipe.backend.loaded_model import LoadedModel
from recipe.backend.requests.payloads import BadRequest, Request, a_text
from recipe.backend.rows import Reading, TokenRow
from recipe.backend.served_task import ServedTask
from recipe.errors import ModelError
from recipe.models.sources.origin import Origin
from recipe.tasks.text_classification.spec import SPECS
from recipe.tokenization.encoding import beginning_of_two

PARAMETERS = {"candidate_labels", "hypothesis_template", "multi_label"}


@dataclass(frozen=True, kw_only=True)
class ZeroShot(ServedTask):
    """A saved model of entailment that answers texts with labels."""

    served = SPECS[0].served["zero-shot-classification"]
    loaded: LoadedModel
    entails: int
    """The position of the logit for entailment."""

    @classmethod
    def load(cls, origin: Origin) -> ZeroShot:
        """Return the model of entailment that `origin` names.

        Raises:
            ModelError: None of its labels is entailment.
        """
        loaded = loading.load(origin, AutoModelForSequenceClassification)
        config: Any = loaded.model.config
        names = {str(name): number for number, name in (config.id2label or {}).items()}
        entails = [number for name, number in names.items() if name.lower().startswith("entail")]
        if not entails:
            raise ModelError(
                f"The model {origin.location} has the labels {', '.join(list(names)[:5])}; none of "
                "them is called entailment.",
                "zero-shot-classification takes a model trained on natural language inference; if "
                "this is one, name its labels in config.json (id2label, label2id).",
            )
        return cls(loaded=loaded, entails=int(entails[0]))

    def example(self, text: str) -> Request:
        return Request(inputs=[text], parameters={"candidate_labels": ["a", "b"]})

    def prepare(self, request: Request) -> Request:
        request = request.checked(PARAMETERS, "zero-shot-classification")
        texts = request.read(a_text)
        count = len(texts)
        labels, hypotheses = zero_shot.labels_and_hypotheses(request, count)
        bounds.hold(Bound.ANSWER, 2 * count * len(labels))
        tokenizer, limit = self.loaded.tokenizer, self.loaded.max_length
        heads = []
        for text in texts:
            head = bounds.beginning(tokenizer, text, limit)
            heads.append(beginning_of_two(tokenizer, head, limit))
            turns.pause()
        values = [(head, hypothesis) for head in heads for hypothesis in hypotheses]
        prepared = self.loaded.encode(request, values, tokenize=self._tokenize)
        truncated = sorted({index // len(labels) for index in prepared.truncated})
        return replace(prepared, values=texts, truncated=truncated)

    def _tokenize(self, pairs: Sequence[tuple[str, str]], limit: int) -> list[TokenRow]:
        """Return the tokens of texts with hypotheses. Raise BadRequest if a hypothesis leaves no
        room for its text."""
        texts, hypotheses = map(list, zip(*pairs, strict=True))
        try:
            # Only the text is cut: a truncated label would be another label.
            encoded: Any = self.loaded.tokenizer(
                texts, hypotheses, truncation="only_first", max_length=limit
            )
        except Exception as error:
            # Tokenizers raise this exception itself if nothing is left of the text.
            raise BadRequest(f"A label is too long for the model, which reads {limit}.") from error
        ids, types = encoded["input_ids"], encoded.get("token_type_ids")
        if any(len(row) > limit for row in ids):
            raise BadRequest(f"A label is too long for the model, which reads {limit} tokens.")
        return [TokenRow(row, types[n] if types else None) for n, row in enumerate(ids)]

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """Return for each request `{"sequence", "labels", "scores"}` for each text, the best label
        first.

        Scores are a softmax over the labels; with `multi_label` each is the label's own probability
        against its contradiction.
        """
        answers = []
        logits_of_requests = self.loaded.rows(requests, Reading.LABELS)
        for prepared, rows in zip(requests, logits_of_requests, strict=True):
            labels, logits = zero_shot.candidate_labels(prepared), iter(rows)
            entries = []
            for text in prepared.values:
                turns.pause()
                outputs = torch.stack([next(logits) for _ in labels])
                if prepared.parameters.get("multi_label") or len(labels) == 1:
                    contradicts = -1 if self.entails == 0 else 0
                    scores = outputs[:, [contradicts, self.entails]].softmax(-1)[:, 1]
                else:
                    scores = outputs[:, self.entails].softmax(-1)
                ranked = scores.sort(descending=True, stable=True)
                names = [labels[number] for number in ranked.indices.tolist()]
                entries.append(
                    {"sequence": text, "labels": names, "scores": ranked.values.tolist()}
                )
            answers.append(prepared.answer(entries, single=prepared.single))
        return answers
