"""Accuracy, as an `evaluate` module over scikit-learn: evaluate.load("accuracy") offline.

Arguments, defaults and results are those of the module of that name on the Hugging Face hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate
from sklearn.metrics import accuracy_score


class Accuracy(evaluate.Metric):  # type: ignore[misc]
    """Share of predictions that equal their reference."""

    def _info(self) -> evaluate.MetricInfo:
        kind: Any = datasets.Value("int32")
        if self.config_name == "multilabel":
            kind = datasets.Sequence(kind)
        return evaluate.MetricInfo(
            description="Share of predictions that equal their reference.",
            citation="",
            inputs_description="predictions and references: class ids",
            features=datasets.Features({"predictions": kind, "references": kind}),
        )

    def _compute(
        self,
        predictions: Sequence[int],
        references: Sequence[int],
        normalize: bool = True,
        sample_weight: Sequence[float] | None = None,
    ) -> dict[str, float]:
        score = accuracy_score(
            references, predictions, normalize=normalize, sample_weight=sample_weight
        )
        return {"accuracy": float(score)}
