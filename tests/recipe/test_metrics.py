"""Scores, the lines that carry them, and the regexes that read these."""

import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sklearn.metrics import f1_score

from recipe import metrics
from recipe.metrics import metric_line
from recipe.tasks import evaluation
from tests.support import circulating


def read(line: str) -> dict[str, float]:
    """What SageMaker would record of one log line."""
    results = {
        definitions["Name"]: re.search(definitions["Regex"], line)
        for definitions in metrics.metric_definitions()
    }
    return {name: float(match.group(1)) for name, match in results.items() if match}


@pytest.mark.parametrize("value", [2.5e-05, 1e-10, -3.25, 0.0, 1.0, 7, 123456.0, 1.5e17])
def test_a_number_survives_the_line_and_its_regex(value: float) -> None:
    assert read(metrics.metric_line(3, 0.5, {"loss": value}))["loss"] == pytest.approx(value)


def test_lines_are_read_by_their_names_alone() -> None:
    values = {"eval_loss": 0.5, "train_loss": 0.25, "test_loss": 0.125}
    assert read(metrics.metric_line(3, None, values)) == values
    assert read("[rank0]: metric loss=0.5") == {"loss": 0.5}
    assert read("the loss=0.5 of the step") == {}


def test_hf_trainers_own_lines_are_read_by_our_regexes(capsys: pytest.CaptureFixture[str]) -> None:
    def trained(*callbacks: transformers.TrainerCallback) -> list[dict[str, float]]:
        """What HF Trainer logs in a small training, with its own evaluation."""

        class Net(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(2, 1)

            def forward(self, x: Any, labels: Any) -> dict[str, Any]:
                answer = self.layer(x)
                return {"loss": torch.nn.functional.mse_loss(answer, labels), "logits": answer}

        rows = [
            {"x": torch.tensor([n / 8, 1.0]), "labels": torch.tensor([n / 4])} for n in range(8)
        ]
        args = transformers.TrainingArguments(
            output_dir=tempfile.gettempdir(),
            max_steps=4,
            logging_steps=1,
            learning_rate=5e-5,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = transformers.Trainer(
            model=Net(),
            args=args,
            train_dataset=rows,  # type: ignore[arg-type]
            eval_dataset=rows,  # type: ignore[arg-type]
            compute_metrics=lambda prediction: {"accuracy": 0.8125, "f1": 0.4375},
        )
        trainer.remove_callback(transformers.PrinterCallback)
        for callback in callbacks:
            trainer.add_callback(callback)
        trainer.train()
        return trainer.state.log_history

    class PrintsAsTransformers4(transformers.TrainerCallback):
        """As PrinterCallback of transformers 4 prints: the log itself, numbers as they are."""

        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
        ) -> None:
            print({name: value for name, value in logs.items() if name != "total_flos"})

    # The second printer has what the first has left, as it takes total_flos out.
    history = trained(transformers.PrinterCallback(), PrintsAsTransformers4())
    lines = capsys.readouterr().out.splitlines()
    styles = {
        style: "\n".join(f"  5%|#   | 1/4 [00:01<00:02]{line}" for line in lines if mark(line))
        for style, mark in {
            "now": lambda line: "': '" in line or transformers.__version__.startswith("4."),
            "4": lambda line: "': '" not in line,
        }.items()
    }
    names = ["loss", "grad_norm", "learning_rate", "epoch", "train_loss", "train_runtime"]
    for style, text in styles.items():
        actual = circulating.ours(text)
        for name in (*names, "eval_loss", "eval_accuracy", "eval_f1", "eval_samples_per_second"):
            expected = [entry[name] for entry in history if name in entry]
            assert expected, name
            assert actual[name] == pytest.approx(expected, rel=1e-3), (style, name)
        assert not actual["test_loss"]


def test_small_large_and_negative_numbers_are_written_out() -> None:
    values = {"a": 2.5e-5, "b": 1.5e17, "c": -0.25, "d": 1, "e": math.nan, "f": 0.0}
    values |= {"g": math.inf, "h": "text"}
    assert metrics.metric_line(3, 0.5, values) == (
        "metric step=3 {'a': 0.000025, 'b': 150000000000000000.0, 'c': -0.25, 'd': 1.0, "
        "'f': 0.0, 'epoch': 0.5}"
    )


def test_as_a_script_it_prints_definitions_within_the_limits_and_needs_no_package() -> None:
    file = Path(metrics.__file__)
    shown = subprocess.run(
        [sys.executable, "-S", str(file)], capture_output=True, text=True, check=True
    )
    definitions = json.loads(shown.stdout)
    assert definitions == metrics.metric_definitions()
    # CreateTrainingJob takes 40 definitions, names of 255 and regexes of 500 characters.
    for item in (definitions, *map(metrics.metric_definitions, metrics.OF_TASKS)):
        assert len(item) <= 40
        assert all(len(one["Regex"]) <= 500 for one in item)


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
        return transformers.Trainer._determine_best_metric(trainer, metrics, None)

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
    scores = evaluation.score_tokens(transformers.EvalPrediction(answers, np.array([1, 5])))
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
