"""Accuracy, as an `evaluate` module over scikit-learn."""

from __future__ import annotations

from collections.abc import Sequence

import datasets
import evaluate
from sklearn.metrics import accuracy_score


class Accuracy(evaluate.Metric):  # type: ignore[misc]
    """Share of predictions that equal their reference."""

    def _info(self) -> evaluate.MetricInfo:
        integer = datasets.Value("int64")
        return evaluate.MetricInfo(
            description="Share of predictions that equal their reference.",
            citation="",
            inputs_description="predictions and references: class ids",
            features=datasets.Features({"predictions": integer, "references": integer}),
        )

    def _compute(self, predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
        return {"accuracy": float(accuracy_score(references, predictions))}
