from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from recipe import metrics

FILE = Path(metrics.__file__)


def read(line: str) -> dict[str, float]:
    """What SageMaker would record of one log line."""
    found = {each["Name"]: re.search(each["Regex"], line) for each in metrics.metric_definitions()}
    return {name: float(match.group(1)) for name, match in found.items() if match}


@pytest.mark.parametrize("value", [2.5e-05, 1e-10, -3.25, 0.0, 1.0, 7, 123456.0, 1.5e17])
def test_a_number_survives_the_line_and_its_regex(value: float) -> None:
    assert read(metrics.metric_line({"step": 3, "loss": value}))["loss"] == pytest.approx(value)


def test_names_that_end_alike_are_told_apart() -> None:
    line = metrics.metric_line({"eval_loss": 0.5, "train_loss": 0.25, "test_loss": 0.125})
    assert read(line) == {"eval_loss": 0.5, "train_loss": 0.25, "test_loss": 0.125}


def test_a_prefix_of_the_launcher_does_not_hide_the_line() -> None:
    assert read("[rank0]: metric loss=0.5") == {"loss": 0.5}


def test_what_is_no_finite_number_is_left_out() -> None:
    values = {"loss": float("nan"), "grad_norm": float("inf"), "x": "text", "epoch": 1.0}
    assert metrics.metric_line(values) == "metric epoch=1"


def test_other_lines_are_not_read() -> None:
    assert read("the loss=0.5 of the step") == {}


def test_as_a_script_it_prints_definitions_within_the_limits_and_needs_no_package() -> None:
    shown = subprocess.run(
        [sys.executable, "-S", str(FILE)], capture_output=True, text=True, check=True
    )
    definitions = json.loads(shown.stdout)
    assert definitions == metrics.metric_definitions()
    # CreateTrainingJob takes 40 definitions, names of 255 and regexes of 500 characters.
    assert len(definitions) <= 40
    assert all(len(each["Regex"]) <= 500 for each in definitions)
