"""Thresholds of several labels: the best ones, kept with the model, used by what serves it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import f1_score

from recipe import arguments
from recipe.errors import HyperparameterError
from recipe.tasks import evaluation
from recipe.tasks.text_classification.task import TextClassification
from tests.support.serving_kit import Handlers
from tests.support.trainings import train


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
        every = [0.5, *probabilities, 1.1]
        best = max(f1(column, true[:, label], each) for each in every)
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


@pytest.mark.parametrize(
    ("setting", "value"), [("class_weight", "balanced"), ("label_smoothing_factor", "0.1")]
)
@pytest.mark.parametrize(
    ("labels", "words"),
    [([["a"], ["a", "b"]], "rows have several labels"), ([0.25, 1.5], "labels are numbers")],
)
def test_what_is_for_classes_is_refused_elsewhere(
    setting: str, value: str, labels: Sequence[Any], words: str, tmp_path: Path
) -> None:
    """Both changed nothing, and nothing said so."""
    rows = [{"text": f"text {n}", "label": labels[n % 2]} for n in range(20)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    hyperparameters = arguments.parse(["--task", "text-classification", f"--{setting}", value])
    with pytest.raises(HyperparameterError, match=f"{setting} has value {value}, but {words}"):
        TextClassification({"train": tmp_path}, hyperparameters)


ROWS = [
    ("several", [{"text": f"text {n}", "label": ["a", "b"][: 1 + n % 2]} for n in range(20)]),
    ("classes", [{"text": f"text {n}", "label": "ab"[n % 2]} for n in range(20)]),
]


@pytest.mark.parametrize(
    ("rows", "more", "said"),
    [
        (1, [], "a row has one label only"),
        (0, ["--do_eval", "False"], "nothing is evaluated"),
        (0, ["--do_train", "False", "--do_eval", "True"], "writes no model"),
    ],
)
def test_what_has_no_threshold_to_tune_is_refused(
    tmp_path: Path, rows: int, more: Sequence[str], said: str
) -> None:
    lines = [json.dumps(row) for row in ROWS[rows][1]]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    argv = ["--model_id", "any", "--tune_thresholds", "True", *more]
    with pytest.raises(HyperparameterError, match=said):
        TextClassification({"train": tmp_path}, arguments.parse(argv))


def reviews(count: int) -> list[dict[str, Any]]:
    """Texts whose words make labels likely, not certain; one of the labels is rare."""
    numbers = random.Random(3)
    rows = []
    for _ in range(count):
        kind = numbers.choice(["good", "bad", "great", "awful"])
        labels = ["kind"] if kind in ("good", "great") else ["harsh"]
        if kind == "great" and numbers.random() < 0.4:
            labels.append("rare")
        rows.append({"text": f"the film was {kind} , truly", "label": labels})
    return rows


@pytest.mark.heavy
@pytest.mark.long
def test_tuned_thresholds_are_kept_and_used(tmp_path: Path, tiny_model: Path) -> None:
    rows = reviews(280)
    channels = {}
    parts = {"train": rows[:200], "validation": rows[200:240], "test": rows[240:]}
    for name, part in parts.items():
        channels[name] = tmp_path / "in" / name
        channels[name].mkdir(parents=True)
        (channels[name] / "data.jsonl").write_text("\n".join(map(json.dumps, part)))
    first = ["--epochs", "4", "--batch_size", "8", "--lr", "5e-3", "--max_length", "32"]
    tuning = ["--tune_thresholds", "True", "--do_predict", "True"]
    done = train(tmp_path / "a", channels, "--model_id", str(tiny_model), *first, *tuning)
    assert done.returncode == 0, done.stderr
    model = tmp_path / "a" / "model"
    thresholds = json.loads((model / "config.json").read_text())["label_thresholds"]
    assert set(thresholds) == {"kind", "harsh", "rare"}
    assert 0 < thresholds["rare"] < 0.5
    assert f"rare {thresholds['rare']:.3g}" in done.stdout
    assert "label_thresholds in config.json" in (model / "README.md").read_text()
    output = tmp_path / "a" / "output" / "data"
    metrics = json.loads((output / "metrics.json").read_text())
    assert metrics["eval_tuned_f1_macro"] > metrics["eval_f1_macro"]
    answers = [json.loads(line) for line in (output / "predictions.jsonl").read_text().splitlines()]
    for answer in answers:
        reached = {name for name, score in answer["scores"].items() if score >= thresholds[name]}
        assert set(answer["labels"]) == reached
    names = sorted(thresholds)
    true, predicted = (
        np.array([[name in answer[key] for name in names] for answer in answers])
        for key in ("true", "labels")
    )
    assert metrics["test_f1_macro"] == pytest.approx(f1_score(true, predicted, average="macro"))

    served = Handlers(model)

    def ask(text: str, **parameters: Any) -> set[str]:
        answer = served.ask({"inputs": text, "parameters": parameters})
        return {entry["label"] for entry in answer}

    assert ask("the film was great , truly", threshold="tuned") == {"kind", "rare"}
    assert ask("the film was great , truly", threshold=0.5) == {"kind"}
    assert ask("the film was bad , truly", threshold="tuned") == {"harsh"}
    assert ask("the film was bad , truly", threshold=0) == {"kind", "harsh", "rare"}

    # Judged alone, the model's thresholds count; trained on, they are those of other weights.
    alone = ["--do_train", "False", "--do_eval", "True", "--max_length", "32"]
    done = train(tmp_path / "b", {"test": channels["test"]}, "--model_id", str(model), *alone)
    assert done.returncode == 0, done.stderr
    judged = json.loads((tmp_path / "b" / "output" / "data" / "metrics.json").read_text())
    assert judged["eval_f1_macro"] == pytest.approx(metrics["test_f1_macro"])
    done = train(tmp_path / "c", channels, "--model_id", str(model), *first[2:], "--epochs", "1")
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "c" / "model" / "config.json").read_text())
    assert "label_thresholds" not in config
