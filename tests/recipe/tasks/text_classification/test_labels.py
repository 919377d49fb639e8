"""What else the recipe trains: numbers, sets of labels, decoders, adapters; and how."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import causal_kit
from tests.support.serving_kit import Handlers
from tests.support.trainings import train
from tests.support.words import reviews

FAST = ("--batch_size", "8", "--lr", "5e-3", "--bf16", "False")
GOOD = "the film number 7 was good , truly great"
BAD = "the film number 8 was bad , truly awful"


def write(folder: Path, rows: Sequence[tuple[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    lines = (json.dumps({"text": text, "label": label}) for text, label in rows)
    (folder / "data.jsonl").write_text("\n".join(lines))
    return folder


def trained(
    base: Path,
    model: Path,
    rows: Sequence[tuple[str, Any]],
    *arguments: str,
    **how: Any,
) -> tuple[str, dict[str, float]]:
    """The output and metrics of a run on `rows`, evaluated on its last fifth."""
    split = len(rows) * 4 // 5
    channels = {
        "train": write(base / "in" / "train", rows[:split]),
        "test": write(base / "in" / "test", rows[split:]),
    }
    for name, value in (("--epochs", "4"), ("--max_length", "32")):
        arguments = arguments if name in arguments else (name, value, *arguments)
    done = train(base, channels, "--model_id", str(model), *FAST, *arguments, **how)
    assert done.returncode == 0, done.stderr
    metrics: dict[str, float] = json.loads((base / "output" / "data" / "metrics.json").read_text())
    return done.stdout, metrics


def ask(base: Path, *texts: str, **parameters: Any) -> Any:
    """Return the handlers' answers from the model that was trained in `base`."""
    return Handlers(base / "model").ask({"inputs": list(texts), "parameters": parameters})


@pytest.mark.heavy
def test_fractions_are_learned_as_numbers(tmp_path: Path, tiny_model: Path) -> None:
    rows = [(text, 0.75 if label == "pos" else -1.25) for text, label in reviews(200)]
    output, metrics = trained(tmp_path, tiny_model, rows)
    assert "label: a number from -1.25 to 0.75" in output
    assert metrics["eval_pearson"] > 0.95
    assert metrics["eval_mse"] == pytest.approx(metrics["eval_loss"], rel=1e-3)
    good, bad = ask(tmp_path, GOOD, BAD)
    assert good["label"] == "label"
    assert (good["score"], bad["score"]) == pytest.approx((0.75, -1.25), abs=0.4)


@pytest.mark.heavy
def test_lists_are_learned_as_sets_of_labels(tmp_path: Path, tiny_model: Path) -> None:
    names = {"pos": ["kind", "short"], "neg": ["harsh"]}
    # Each number stands in a row of either kind: it would be a way to tell them apart, too.
    rows = [
        (re.sub(r"\d+", str(row // 2), text), names[label])
        for row, (text, label) in enumerate(reviews(160))
    ]
    _, metrics = trained(tmp_path, tiny_model, rows, "--epochs", "6")
    assert metrics["eval_f1_micro"] == metrics["eval_accuracy"] == 1.0
    good, bad = (
        {each["label"] for each in answer if each["score"] >= 0.5}
        for answer in ask(tmp_path, GOOD, BAD, top_k=None)
    )
    assert (good, bad) == ({"kind", "short"}, {"harsh"})


@pytest.mark.heavy
@pytest.mark.long
def test_a_decoder_is_a_classifier_too(tmp_path: Path) -> None:
    model = causal_kit.make_model("llama", tmp_path / "start")
    rows = [(f"{'the ' * (at % 7)}{text}", label) for at, (text, label) in enumerate(reviews(160))]
    output, metrics = trained(tmp_path, model, rows, "--max_length", "96")
    assert "padding token: </s>, the end token" in output
    assert metrics["eval_accuracy"] == 1.0
    assert json.loads((tmp_path / "model" / "config.json").read_text())["pad_token_id"] == 0
    answers = ask(tmp_path, GOOD, f"the the the the {BAD}")
    assert [each["label"] for each in answers] == ["pos", "neg"]


# peft 0.21 asks transformers 5 by an old name.
@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.long
def test_an_adapter_alone_is_saved_where_it_is_asked_for(tmp_path: Path, tiny_model: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    arguments = ["--lora_r", "4", "--lora_save", "adapter", "--lora_target_modules", "query,value"]
    trained(tmp_path, tiny_model, reviews(40), *arguments)
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "config.json"} < names
    assert "model.safetensors" not in names
    base = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=2)
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "model"))
    assert adapted.peft_config["default"].target_modules == {"query", "value"}


@pytest.mark.heavy
def test_what_shapes_a_training_is_passed_on(tmp_path: Path, tiny_model: Path) -> None:
    """Accumulation, checkpointing, smoothing, class weights, and the best model by early stopping."""
    rows = [row for row in reviews(120) if row[1] == "pos" or "0" in row[0]]
    arguments = ["--early_stopping_patience", "1", "--metric_for_best_model", "eval_f1_macro"]
    arguments += ["--early_stopping_threshold", "2", "--class_weight", "balanced"]
    arguments += ["--gradient_accumulation_steps", "2", "--gradient_checkpointing", "True"]
    arguments += ["--label_smoothing_factor", "0.1", "--epochs", "9"]
    _, metrics = trained(tmp_path, tiny_model, rows, *arguments)
    assert metrics["epoch"] == 2, "no f1 is better by 2, so the second evaluation is the last"
    state = json.loads(next((tmp_path / "checkpoints").rglob("trainer_state.json")).read_text())
    per_epoch = -(-(len(rows) * 4 // 5) // 16)
    assert state["best_global_step"] in (per_epoch, 2 * per_epoch)
    assert not (tmp_path / "output" / "tensorboard").exists()
