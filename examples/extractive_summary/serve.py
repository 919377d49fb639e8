"""Answer documents with the sentences that summarize them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import AutoModelForSequenceClassification

from recipe.backend import bounds, loading
from recipe.backend.bounds import Bound
from recipe.backend.loaded_model import LoadedModel
from recipe.backend.requests.payloads import BadRequest, Request, a_text
from recipe.backend.rows import Reading, TokenRow
from recipe.backend.served_task import ServedTask
from recipe.models.sources.origin import Origin
from recipe.tokenization.encoding import encode_pairs

from .spec import SPECS, pairs_of

_EXAMPLE = '{"inputs": {"sentences": ["It rained.", "Ada won."]}, "parameters": {"top_k": 1}}'


@dataclass(frozen=True, kw_only=True)
class Extractor(ServedTask):
    """A saved model that scores sentences."""

    served = SPECS[0].served["extractive-summarization"]
    loaded: LoadedModel

    @classmethod
    def load(cls, origin: Origin) -> Extractor:
        """Return the model that `origin` names."""
        return cls(loaded=loading.load(origin, AutoModelForSequenceClassification))

    def example(self, text: str) -> Request:
        return Request(inputs=[{"sentences": [text, text]}])

    def prepare(self, request: Request) -> Request:
        """Return the rows of each sentence with its neighbours."""
        request = request.checked({"top_k"}, "extractive-summarization")
        documents = request.read(_a_document)
        bounds.hold(Bound.ROWS, sum(map(len, documents)))
        rows = [self._rows(sentences) for sentences in documents]
        sizes = [len(row.ids) for some in rows for row in some]
        return replace(request, values=documents, sizes=sizes, work=rows)

    def _rows(self, sentences: Sequence[str]) -> list[TokenRow]:
        config: Any = self.loaded.model.config
        rows = []
        for text, context in pairs_of(sentences, config.neighbours):
            bounds.hold_text(text, context)
            (ids,), types = encode_pairs(
                self.loaded.tokenizer, [text], [context], self.loaded.max_length
            )
            rows.append(TokenRow(ids, types[0] if types else None))
        return rows

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """Return the `top_k` best sentences of each document (3), in its order, and all scores."""
        rows = [row for prepared in requests for some in prepared.work for row in some]
        logits = iter(self.loaded.forward(rows, Reading.LABELS))
        answers: list[Any] = []
        for prepared in requests:
            count = prepared.parameters.get("top_k", 3)
            entries = []
            for sentences in prepared.values:
                scores = [float(next(logits)[0].sigmoid()) for _ in sentences]
                ranked = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
                best = sorted(ranked[:count])
                entries.append({"summary": [sentences[index] for index in best], "scores": scores})
            answers.append(prepared.answer(entries, single=prepared.single))
        return answers


def _a_document(value: Any) -> list[str]:
    sentences = value.get("sentences") if isinstance(value, dict) and len(value) == 1 else None
    if not isinstance(sentences, list) or not sentences:
        raise BadRequest(f"An input is {str(value)[:60]!r}. Send for example {_EXAMPLE}")
    return [a_text(text) for text in sentences]
