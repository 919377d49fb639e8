"""The run that neuron_parallel_compile makes for its graphs; here it computes, to no end."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Reviews = Callable[[int], list[tuple[str, str]]]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.heavy
def test_a_trial_run_takes_a_few_steps_and_writes_nothing(
    tmp_path: Path, tiny_model: Path, reviews: Reviews, train: Run
) -> None:
    rows = [json.dumps({"text": text, "label": label}) for text, label in reviews(80)]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "train.jsonl").write_text("\n".join(rows))
    output = tmp_path / "elsewhere"
    done = train(
        tmp_path,
        {"train": tmp_path / "in"},
        *("--model_id", str(tiny_model), "--epochs", "50", "--batch_size", "4"),
        # What is read from the device is invalid then: here, no numbers.
        *("--lr", "1e30", "--bf16", "False", "--logging_steps", "1"),
        *("--early_stopping_patience", "1", "--save_steps", "1", "--output_dir", str(output)),
        environment={"NEURON_EXTRACT_GRAPHS_ONLY": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "a trial run for its graphs: nothing is written" in done.stdout
    assert not output.exists() and not (tmp_path / "checkpoints").exists()
    assert not list((tmp_path / "model").glob("*"))
    assert not list((tmp_path / "output").rglob("*.json"))
    assert "metric step=10 {'eval_accuracy': " in done.stdout
    assert "metric step=11" not in done.stdout
