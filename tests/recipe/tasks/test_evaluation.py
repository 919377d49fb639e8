"""Scores of predicted numbers, and the best weights by them."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import Trainer

from recipe.metrics import metric_line
from recipe.tasks.evaluation import score_numbers


@pytest.mark.parametrize("metric", ["pearson", "spearman"])
def test_a_constant_is_never_the_best_and_no_error(metric: str) -> None:
    true = np.asarray([1.0, 2.0, 3.0, 5.0])
    args = SimpleNamespace(
        metric_for_best_model=metric, greater_is_better=True, save_strategy="epoch"
    )
    state = SimpleNamespace(best_metric=None, best_global_step=0, global_step=4)
    trainer: Any = SimpleNamespace(args=args, state=state)

    def is_best(predicted: list[float]) -> bool:
        scores = score_numbers(np.asarray(predicted), true)
        metrics = {f"eval_{name}": value for name, value in scores.items()}
        return Trainer._determine_best_metric(trainer, metrics, None)

    constant = score_numbers(np.zeros(4), true)
    assert math.isnan(constant[metric]) and constant["mse"] > 0
    assert metric not in metric_line(1, 1.0, constant)
    assert not is_best([0.0] * 4)
    state.global_step = 8
    assert is_best([1.0, 2.0, 2.5, 4.0])
    assert state.best_global_step == 8
    assert not is_best([0.0] * 4)
