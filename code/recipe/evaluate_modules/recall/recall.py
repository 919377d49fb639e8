"""Recall, as an `evaluate` module over scikit-learn: evaluate.load("recall") offline.

Arguments, defaults and results are those of the module of that name on the Hugging Face hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate
from sklearn.metrics import recall_score


class Recall(evaluate.Metric):  # type: ignore[misc]
    """Share of a class's texts that are found."""

    def _info(self) -> evaluate.MetricInfo:
        kind: Any = datasets.Value("int32")
        if self.config_name == "multilabel":
            kind = datasets.Sequence(kind)
        return evaluate.MetricInfo(
            description="Share of a class's texts that are found.",
            citation="",
            inputs_description="predictions and references: class ids; average: binary, macro ...",
            features=datasets.Features({"predictions": kind, "references": kind}),
        )

    def _compute(
        self,
        predictions: Sequence[int],
        references: Sequence[int],
        labels: Sequence[int] | None = None,
        pos_label: int = 1,
        average: str | None = "binary",
        sample_weight: Sequence[float] | None = None,
        zero_division: str | float = "warn",
    ) -> dict[str, Any]:
        score = recall_score(
            references,
            predictions,
            labels=labels,
            pos_label=pos_label,
            average=average,
            sample_weight=sample_weight,
            zero_division=zero_division,
        )
        # An array, one score for each class, where average is None.
        return {"recall": score if average is None else float(score)}
