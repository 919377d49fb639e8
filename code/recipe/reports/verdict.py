"""Say in words how good a trained model is."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recipe.errors import join_names
from recipe.metrics import LOWER_IS_BETTER
from recipe.reports.last_answers import PredictedAnswers
from recipe.reports.model_card import PARTIAL, Facts

_FEW_ROWS = 1_000
_NAMES_SHOWN = 8
_RISEN = 1.1
"""The last evaluation loss by the lowest one, above which a training was too long."""


@dataclass
class Verdict:
    """Sentences about a model, and whether one of them is a warning."""

    sentences: list[str] = field(default_factory=list)
    is_warning: bool = False

    def warn(self, sentence: str) -> None:
        """Add a warning."""
        self.sentences.append(sentence)
        self.is_warning = True


def prefix_of(metrics: Mapping[str, float]) -> str:
    """Return the prefix of the scores that count: those of test data, if there are any."""
    return "test" if any(name.startswith("test_") for name in metrics) else "eval"


def judge(
    facts: Facts,
    history: Sequence[Mapping[str, Any]],
    answers: PredictedAnswers | None,
    planned_steps: int,
    evaluated: tuple[str, int],
) -> Verdict:
    """Judge a training.

    Args:
        history: The Trainer's log.
        answers: The last answers, if the task keeps them.
        planned_steps: Steps before a budget left some out.
        evaluated: The split of the scores, and its rows.
    """
    verdict, metrics = Verdict(), facts.metrics
    prefix = prefix_of(metrics)
    name = next((name for name in facts.about.headline if f"{prefix}_{name}" in metrics), None)
    if name is None:
        verdict.sentences.append("Nothing was evaluated, so how good the model is is not known.")
    else:
        _judge_score(verdict, name, metrics[f"{prefix}_{name}"], history, answers, evaluated)
    evaluations = [entry for entry in history if "eval_loss" in entry]
    if evaluations:
        least = min(evaluations, key=operator.itemgetter("eval_loss"))
        last = evaluations[-1]
        key = f"eval_{name}"
        sign = -1 if name in LOWER_IS_BETTER else 1
        # The loss may rise while more answers become right.
        is_worse = key not in last or sign * last[key] <= sign * least[key]
        if last["eval_loss"] > _RISEN * least["eval_loss"] and is_worse:
            verdict.sentences.append(
                f"The evaluation loss was lowest at step {least['step']} "
                f"({least['eval_loss']:.3g}) and is {last['eval_loss']:.3g} at the end: fewer "
                "epochs, or early_stopping_patience=1, may be better."
            )
    steps = max((int(entry["step"]) for entry in history if "step" in entry), default=0)
    if facts.partial:
        verdict.warn(PARTIAL.format(**facts.partial))
    elif steps < planned_steps:
        verdict.warn(f"The budget ended training after {steps} of {planned_steps} steps.")
    return verdict


def _judge_score(
    verdict: Verdict,
    name: str,
    score: float,
    history: Sequence[Mapping[str, Any]],
    answers: PredictedAnswers | None,
    evaluated: tuple[str, int],
) -> None:
    """Add sentences about the score that counts most."""
    split, count = evaluated if answers is None else (answers.split, len(answers))
    margin = ""
    if name == "accuracy" and 0 < count < _FEW_ROWS:
        half = 1.96 * math.sqrt(score * (1 - score) / count)
        margin = f" (± {half:.2f}, as there are few)"
    shown = name.replace("_at_", "@").replace("_", " ")
    sentence = f"The {shown} is {score:.3g} on {count:,} {split} rows{margin}"
    baseline = answers.baseline(name) if answers is not None else None
    others = [f"{baseline.what} would give {baseline.score:.3g}"] if baseline else []
    before = [entry[f"eval_{name}"] for entry in history
              if entry.get("step") == 0 and f"eval_{name}" in entry]  # fmt: skip
    rows = "" if split == "evaluation" else " on the evaluation rows"
    others += [f"the model before training had {value:.3g}{rows}" for value in before]
    verdict.sentences.append("; ".join([sentence, *others]) + ".")
    sign = -1 if name in LOWER_IS_BETTER else 1
    known = [*([baseline.score] if baseline else []), *before]
    if any(sign * score <= sign * other for other in known):
        verdict.warn("So training has not made it better than that.")
    if answers is not None and (never := answers.never_predicted()):
        names, all_of = join_names(never, _NAMES_SHOWN), answers.class_count()
        verdict.warn(f"{len(never)} of {all_of} classes are never predicted: {names}.")
