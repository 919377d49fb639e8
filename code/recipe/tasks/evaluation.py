"""Scores of predictions, by scikit-learn and SciPy."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import expit  # type: ignore[import-untyped]
from scipy.stats import pearsonr, spearmanr  # type: ignore[import-untyped]
from sklearn.metrics import (
    accuracy_score,
    f1_score,
    precision_recall_curve,
    precision_score,
    recall_score,
)
from transformers import EvalPrediction

from recipe.metrics import SCORES

_LARGEST_EXPONENT = 709
_BY_CLASS = {"precision": precision_score, "recall": recall_score, "f1": f1_score}
Integers = npt.NDArray[Any]
Floats = npt.NDArray[Any]


def score_classes(predicted: Integers, true: Integers) -> dict[str, float]:
    """Return the scores in `metrics.SCORES` of class ids [N]."""
    values = {}
    for name in SCORES:
        metric, _, average = name.partition("_")
        if metric == "accuracy":
            values[name] = float(accuracy_score(true, predicted))
            continue
        # A class that is never predicted scores 0, without a warning for each evaluation.
        options = {"average": average or "macro", "zero_division": 0}
        values[name] = float(_BY_CLASS[metric](true, predicted, **options))
    return values


def best_thresholds(logits: Floats, true: Floats) -> Floats:
    """Return the threshold [classes] with the highest F1 of each label, midway between two rows.

    It is 0.5 if no other is better, if no row or every row has the label, and if an output is NaN.

    Args:
        logits: [N, classes].
        true: [N, classes], 0 or 1.
    """
    probabilities = expit(logits.astype(np.float64))
    thresholds = np.full(logits.shape[1], 0.5)
    for number, (scores, has) in enumerate(zip(probabilities.T, true.T > 0.5, strict=True)):
        if has.all() or not has.any() or np.isnan(scores).any():
            continue
        precision, recall, reached = precision_recall_curve(has, scores)
        # The last point predicts no row, and has no threshold.
        f1 = 2 * precision[:-1] * recall[:-1] / np.maximum(precision[:-1] + recall[:-1], 1e-12)
        if f1.max() <= f1_score(has, scores >= 0.5, zero_division=0) + 1e-9:
            continue
        midpoints = (np.concatenate([[0.0], reached[:-1]]) + reached) / 2
        best = np.flatnonzero(f1 >= f1.max() - 1e-9)
        thresholds[number] = midpoints[best[np.abs(midpoints[best] - 0.5).argmin()]]
    return thresholds


def score_tokens(prediction: EvalPrediction) -> dict[str, float]:
    """Return perplexity, and the share of learned tokens that the model predicts.

    Predictions are, for each document, the sum of its tokens' losses and the number of correct
    tokens [N, 2]; label ids are the numbers of learned tokens [N].
    """
    sums = np.asarray(prediction.predictions).sum(axis=0, dtype=np.float64)
    loss, is_right = sums / np.asarray(prediction.label_ids).sum()
    # Metrics leave out values that are not finite; a perplexity may be too large for a float.
    perplexity = math.exp(loss) if loss < _LARGEST_EXPONENT else math.inf
    return {"perplexity": perplexity, "token_accuracy": float(is_right)}


def score_sets(logits: Floats, true: Floats, thresholds: Floats | None = None) -> dict[str, float]:
    """Return scores of predicted sets of labels, those that reach their thresholds.

    Args:
        logits: [N, classes].
        true: [N, classes], 0 or 1.
        thresholds: [classes]; None: 0.5.
    """
    is_default = thresholds is None
    predicted = logits >= 0 if is_default else expit(logits.astype(np.float64)) >= thresholds
    true_sets = true > 0.5
    return {
        "accuracy": float((predicted == true_sets).all(axis=1).mean()),
        "f1_micro": float(f1_score(true_sets, predicted, average="micro", zero_division=0)),
        "f1_macro": float(f1_score(true_sets, predicted, average="macro", zero_division=0)),
    }


def score_numbers(predicted: Floats, true: Floats) -> dict[str, float]:
    """Return mean squared error and both correlations of predicted numbers [N].

    Correlations are NaN if either side is constant; then no metric line shows them, and they do not
    choose the best weights.
    """
    scores = {"mse": float(np.square(predicted - true).mean())}
    scores |= {"pearson": math.nan, "spearman": math.nan}
    if len(true) > 1 and np.ptp(predicted) > 0 and np.ptp(true) > 0:
        scores["pearson"] = float(pearsonr(predicted, true).statistic)
        scores["spearman"] = float(spearmanr(predicted, true).statistic)
    return scores


def mean_scores(predicted: Floats, true: Floats) -> dict[str, float]:
    """Return the means of the scores of several numbers [N, numbers]."""
    columns = [score_numbers(*pair) for pair in zip(predicted.T, true.T, strict=True)]
    return {name: float(np.mean([scores[name] for scores in columns])) for name in columns[0]}


def exact_match(true: str, predicted: str) -> float:
    """Return 1 if two answers are equal, apart from case, articles and punctuation."""
    return float(_words(true) == _words(predicted))


def word_f1(true: str, predicted: str) -> float:
    """Return F1 of the words of one answer against those of another, as in SQuAD's scripts."""
    true_words, predicted_words = _words(true), _words(predicted)
    if not true_words or not predicted_words:
        return float(true_words == predicted_words)
    common = sum((Counter(true_words) & Counter(predicted_words)).values())
    return 2 * common / (len(true_words) + len(predicted_words))


def _words(answer: str) -> list[str]:
    bare = answer.lower().translate(dict.fromkeys(map(ord, string.punctuation)))
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()
