"""Scores of predictions, by `evaluate` modules that lie beside this file: no network is needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import evaluate
import numpy as np
import numpy.typing as npt
from transformers import EvalPrediction

from recipe.metrics import SCORES

MODULES = Path(__file__).resolve().parent / "evaluate_modules"
Integers = npt.NDArray[Any]


def scorer() -> Callable[[Integers, Integers], dict[str, float]]:
    """A function of (predicted, true) class ids to the scores in `metrics.SCORES`."""
    modules = {
        name: evaluate.load(str(MODULES / name), keep_in_memory=True)
        for name in ("accuracy", "precision", "recall", "f1")
    }

    def score(predicted: Integers, true: Integers) -> dict[str, float]:
        values = {}
        for name in SCORES:
            module, _, average = name.partition("_")
            options = {} if module == "accuracy" else {"average": average or "macro"}
            given = {"predictions": predicted, "references": true}
            values[name] = float(modules[module].compute(**given, **options)[module])
        return values

    return score


def compute_metrics() -> Callable[[EvalPrediction], dict[str, float]]:
    """What the Trainer calls with logits [N, classes] and class ids [N] of a whole evaluation."""
    score = scorer()

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        logits = prediction.predictions
        # Some models answer with their hidden states beside the logits.
        logits = logits[0] if isinstance(logits, tuple) else logits
        return score(logits.argmax(axis=-1), np.asarray(prediction.label_ids))

    return compute
