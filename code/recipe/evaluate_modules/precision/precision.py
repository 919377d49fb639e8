"""Precision, as an `evaluate` module over scikit-learn."""

from __future__ import annotations

from collections.abc import Sequence

import datasets
import evaluate
from sklearn.metrics import precision_score


class Precision(evaluate.Metric):  # type: ignore[misc]
    """Share of a class's predictions that are right; classes are averaged by `average`."""

    def _info(self) -> evaluate.MetricInfo:
        integer = datasets.Value("int64")
        return evaluate.MetricInfo(
            description="Share of a class's predictions that are right.",
            citation="",
            inputs_description="predictions and references: class ids; average: macro, weighted",
            features=datasets.Features({"predictions": integer, "references": integer}),
        )

    def _compute(
        self, predictions: Sequence[int], references: Sequence[int], average: str = "macro"
    ) -> dict[str, float]:
        # A class that is never predicted scores 0, without a warning for each evaluation.
        score = precision_score(references, predictions, average=average, zero_division=0)
        return {"precision": float(score)}
