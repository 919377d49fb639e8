"""Token classification: the entities in each text, with the characters they stand at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForTokenClassification

from recipe.inference import loaded_model as encoder
from recipe.inference.answers import plain
from recipe.inference.loaded_model import Encoder, Row
from recipe.inference.origin import Origin
from recipe.inference.payloads import Answers, BadRequest, Request, a_text
from recipe.inference.tasks import pipelines
from recipe.tokenization.encoding import beginning

PARAMETERS = {
    "aggregation_strategy", "ignore_labels", "stride", "is_split_into_words", "delimiter",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Tagger:
    """A saved token classifier that answers texts."""

    encoder: Encoder
    pipeline: Any
    """transformers' own: it cuts texts into chunks, and makes entities of the scores that are
    computed here for all requests together."""

    def example(self, text: str) -> Request:
        """A request that this task answers."""
        return Request(texts=[text])

    def measure(self, request: Request) -> list[int]:
        """Tokens of each text.

        Raises:
            BadRequest: a parameter or an input is none of this task's.
        """
        if request.prepared is None:
            request.only(PARAMETERS, "token-classification")
            self._read(request)
            before, _, _ = self.pipeline._sanitize_parameters(**request.parameters)
            request.prepared = [self._chunks(text, before) for text in request.texts]
            if "stride" not in request.parameters:
                request.truncated = [
                    place
                    for place, (chunk,) in enumerate(request.prepared)
                    if chunk["attention_mask"].sum() >= self.encoder.max_length
                    and self._is_longer(request.texts[place])
                ]
        return [sum(int(c["attention_mask"].sum()) for c in chunks) for chunks in request.prepared]

    def _read(self, request: Request) -> None:
        asked = request.parameters
        if "delimiter" in asked and not asked.get("is_split_into_words"):
            raise BadRequest("delimiter goes with is_split_into_words only.")
        if "stride" in asked and asked.get("aggregation_strategy", "none") == "none":
            raise BadRequest("stride takes an aggregation_strategy: simple, first, average or max.")
        if asked.get("stride", 0) >= self.encoder.max_length - 2:
            raise BadRequest(f"stride must be less than the {self.encoder.max_length} tokens read.")
        if asked.get("is_split_into_words"):
            if all(isinstance(each, str) for each in request.texts):
                request.texts = [list(request.texts)]
            request.read(_words)
        else:
            request.read(a_text)

    def _chunks(self, text: str | list[str], before: dict[str, Any]) -> list[dict[str, Any]]:
        if isinstance(text, str) and "tokenizer_params" not in before:
            text = beginning(self.encoder.tokenizer, text, self.encoder.max_length)
        return list(self.pipeline.preprocess(text, **before))

    def _is_longer(self, text: str | list[str]) -> bool:
        limit = self.encoder.max_length
        if isinstance(text, str):
            return self.encoder.is_longer(text, limit)
        encoded = self.encoder.tokenizer(text, is_split_into_words=True, verbose=False)
        return len(encoded["input_ids"]) > limit

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """For each request a list of entities for each text, as transformers' pipeline makes them:
        `entity`, `score` (a probability), `index` (of the token), `word`, `start` and `end`
        (characters); with an aggregation_strategy `entity_group` in the place of entity and index.
        Tokens labelled O, or as `ignore_labels` says, are left out, as are special tokens."""
        for request in requests:
            self.measure(request)
        chunks = [chunk for request in requests for chunks in request.prepared for chunk in chunks]
        logits = iter(self.encoder.forward([_row(chunk) for chunk in chunks], _rows))
        answers: list[Any] = []
        for request in requests:
            _, _, after = self.pipeline._sanitize_parameters(**request.parameters)
            entities = []
            for each in request.prepared:
                scored = [{**chunk, "logits": next(logits).unsqueeze(0)} for chunk in each]
                entities.append(plain(self.pipeline.postprocess(scored, **after)))
            answers.append(Answers(entities, request.truncated, request.single))
        return answers


def _words(value: Any) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(w, str) for w in value):
        raise BadRequest("With is_split_into_words an input is a list of words.")
    return value


def _row(chunk: dict[str, Any]) -> Row:
    count = int(chunk["attention_mask"].sum())
    types = chunk["token_type_ids"][0, :count].tolist() if "token_type_ids" in chunk else None
    return Row(chunk["input_ids"][0, :count].tolist(), types if types and any(types) else None)


def _rows(output: Any, mask: torch.Tensor) -> list[torch.Tensor]:
    return [logits[: int(row.sum())] for logits, row in zip(output.logits, mask, strict=True)]


def load(origin: Origin) -> Tagger:
    """The token classifier that `origin` names."""
    loaded = encoder.load(origin, AutoModelForTokenClassification)
    return Tagger(encoder=loaded, pipeline=pipelines.around("token-classification", loaded))
