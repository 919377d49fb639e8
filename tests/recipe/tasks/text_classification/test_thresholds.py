"""Thresholds of several labels: the best ones, kept with the model, used by what serves it."""

from typing import Any

import numpy as np
import pytest
from sklearn.metrics import f1_score

from recipe.tasks import evaluation


def f1(logits: Any, true: Any, threshold: float) -> float:
    probabilities = 1 / (1 + np.exp(-logits))
    return float(f1_score(true, probabilities >= threshold, zero_division=0))


@pytest.mark.parametrize("seed", range(20))
def test_no_other_threshold_has_a_higher_f1(seed: int) -> None:
    numbers = np.random.default_rng(seed)
    # Of 12 values only, so that rows are equal to each other.
    logits = np.round(numbers.normal(-1, 2, (40, 3)), 0)
    true = (logits + numbers.normal(0, 2, logits.shape) > 0).astype(float)
    for label, threshold in enumerate(evaluation.best_thresholds(logits, true)):
        column = logits[:, label]
        probabilities = 1 / (1 + np.exp(-column))
        every = {0.5, 1.1, *probabilities}
        best = max(f1(column, true[:, label], item) for item in every)
        assert f1(column, true[:, label], threshold) == pytest.approx(best)
        assert 0 < threshold < 1
        assert threshold == 0.5 or threshold not in probabilities, (
            "rounding in serving may change the answer"
        )
        if f1(column, true[:, label], 0.5) == pytest.approx(best):
            assert threshold == 0.5


def test_labels_that_no_row_or_each_row_has_keep_theirs() -> None:
    logits = np.linspace(-3, 3, 10)[:, None].repeat(2, axis=1)
    true = np.stack([np.zeros(10), np.ones(10)], axis=1)
    assert evaluation.best_thresholds(logits, true).tolist() == [0.5, 0.5]
