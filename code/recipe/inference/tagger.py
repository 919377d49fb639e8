"""Token classification: the entities in each text, with the characters they stand at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForTokenClassification

from recipe.inference import loaded_model as encoder
from recipe.inference.loaded_model import Encoder, Origin
from recipe.inference.payloads import Answers, Request
from recipe.tokenization.encoding import beginning


@dataclass(frozen=True, kw_only=True)
class Tagger:
    """A saved token classifier that answers texts."""

    encoder: Encoder
    warm_up: Mapping[str, Any] = field(default_factory=dict)

    def measure(self, request: Request) -> list[int]:
        """Tokens of each text. Raises BadRequest where it has parameters: this task has none."""
        request.only(set(), "token-classification")
        return [len(ids) for ids in self.encoder.encode(request)]

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """For each request a list of entities for each text: `entity`, `score` (a probability),
        `index` (of the token), `word`, `start` and `end` (characters). Tokens labelled O are left
        out, as are special tokens."""
        rows = self.encoder.rows(requests, _rows)
        return [
            Answers(
                [
                    self._entities(text, logits)
                    for text, logits in zip(request.texts, each, strict=True)
                ],
                request.truncated,
            )
            for request, each in zip(requests, rows, strict=True)
        ]

    def _entities(self, text: str, logits: torch.Tensor) -> list[dict[str, Any]]:
        tokenizer, limit = self.encoder.tokenizer, self.encoder.max_length
        encoded: Any = tokenizer(
            beginning(tokenizer, text, limit),
            truncation=True,
            max_length=limit,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
        )
        names: Any = self.encoder.model.config.id2label
        best = logits.softmax(-1).max(-1)
        entities = []
        for index, (start, end) in enumerate(encoded["offset_mapping"]):
            name = names[int(best.indices[index])]
            if name != "O" and not encoded["special_tokens_mask"][index]:
                score = float(best.values[index])
                where = {"word": text[start:end], "start": start, "end": end}
                entities.append({"entity": name, "score": score, "index": index, **where})
        return entities


def _rows(output: Any, mask: torch.Tensor) -> list[torch.Tensor]:
    return [logits[: int(row.sum())] for logits, row in zip(output.logits, mask, strict=True)]


def load(origin: Origin) -> Tagger:
    """The token classifier that `origin` names."""
    return Tagger(encoder=encoder.load(origin, AutoModelForTokenClassification))
