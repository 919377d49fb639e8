"""Scores of predictions, the best weights by them, and the best thresholds of several labels."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import f1_score
from transformers import EvalPrediction, Trainer

from recipe.metrics import metric_line
from recipe.tasks import evaluation


@pytest.mark.parametrize("metric", ["pearson", "spearman"])
def test_a_constant_is_never_the_best_and_no_error(metric: str) -> None:
    true = np.asarray([1.0, 2.0, 3.0, 5.0])
    args = SimpleNamespace(
        metric_for_best_model=metric, greater_is_better=True, save_strategy="epoch"
    )
    state = SimpleNamespace(best_metric=None, best_global_step=0, global_step=4)
    trainer: Any = SimpleNamespace(args=args, state=state)

    def is_best(predicted: list[float]) -> bool:
        scores = evaluation.score_numbers(np.asarray(predicted), true)
        metrics = {f"eval_{name}": value for name, value in scores.items()}
        return Trainer._determine_best_metric(trainer, metrics, None)

    constant = evaluation.score_numbers(np.zeros(4), true)
    assert math.isnan(constant[metric]) and constant["mse"] > 0
    assert metric not in metric_line(1, 1.0, constant)
    assert not is_best([0.0] * 4)
    state.global_step = 8
    assert is_best([1.0, 2.0, 2.5, 4.0])
    assert state.best_global_step == 8
    assert not is_best([0.0] * 4)


def test_perplexity_is_of_all_tokens_alike() -> None:
    answers = np.array([[2.0, 1.0], [10.0, 2.0]])
    scores = evaluation.score_tokens(EvalPrediction(answers, np.array([1, 5])))
    assert scores == {"perplexity": pytest.approx(np.exp(2.0)), "token_accuracy": 0.5}


@pytest.mark.parametrize("seed", range(4))
def test_no_other_threshold_has_a_higher_f1(seed: int) -> None:
    def f1(logits: Any, true: Any, threshold: float) -> float:
        probabilities = 1 / (1 + np.exp(-logits))
        return float(f1_score(true, probabilities >= threshold, zero_division=0))

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
