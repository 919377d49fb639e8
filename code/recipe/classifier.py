"""A saved classifier that answers texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from recipe.encoding import encode
from recipe.libraries import quieten
from recipe.wire import Label

_BATCH = 32


@dataclass(frozen=True, kw_only=True)
class Classifier:
    """A model and its tokenizer, in float32: the labels are those of training's evaluation."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def classify(self, texts: Sequence[str], top_k: int | None = None) -> list[Label | list[Label]]:
        """For each text its best label, or with `top_k` the list of its `top_k` best labels.

        Scores are probabilities (softmax over the labels).
        """
        ranked = self._probabilities(texts).sort(dim=-1, descending=True)
        names = self.model.config.id2label or {}
        wanted = ranked.values.shape[-1] if top_k is None else top_k
        answers = [
            [{"label": names[number], "score": score} for number, score in pairs[:wanted]]
            for pairs in (
                list(zip(ids, scores, strict=True))
                for ids, scores in zip(ranked.indices.tolist(), ranked.values.tolist(), strict=True)
            )
        ]
        return [answer[0] for answer in answers] if top_k is None else list(answers)

    @torch.inference_mode()
    def _probabilities(self, texts: Sequence[str]) -> torch.Tensor:
        """[len(texts), labels], on the CPU."""
        token_ids = encode(self.tokenizer, texts, self.tokenizer.model_max_length)
        result = torch.empty(len(texts), len(self.model.config.id2label or {}))
        for rows in _by_length(token_ids):
            batch = self.tokenizer.pad(
                {"input_ids": [token_ids[row] for row in rows]}, return_tensors="pt"
            )
            logits = self.model(**batch.to(self.model.device)).logits
            result[rows] = logits.float().softmax(dim=-1).cpu()
        return result


def _by_length(token_ids: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Positions in batches of like length, so that little is padded."""
    order = sorted(range(len(token_ids)), key=lambda row: len(token_ids[row]))
    for start in range(0, len(order), _BATCH):
        yield order[start : start + _BATCH]


def load(model_dir: str) -> Classifier:
    """The classifier in `model_dir`, on an accelerator where there is one."""
    quieten()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForSequenceClassification.from_pretrained(model_dir, dtype=torch.float32)
    found = torch.accelerator.current_accelerator(check_available=True)
    return Classifier(model=model.eval().to(found or "cpu"), tokenizer=tokenizer)
