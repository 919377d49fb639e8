"""What else the recipe trains: numbers, sets of labels with thresholds, decoders; and how."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import f1_score

from tests.support import causal_kit
from tests.support.jobs import Job, write
from tests.support.serving_kit import Handlers, save
from tests.support.words import reviews

pytestmark = pytest.mark.heavy
FAST = ("--batch_size", "8", "--lr", "5e-3", "--bf16", "False", "--epochs", "4", "--max_length",
        "32")  # fmt: skip
GOOD = "the film number 7 was good , truly great"
BAD = "the film number 8 was bad , truly awful"


def trained(base: Path, model: Path, rows: Sequence[tuple[str, Any]], *argv: str) -> Job:
    """Train on `rows`, and evaluate on the last fifth of them."""
    split = len(rows) * 4 // 5
    named = [{"text": text, "label": label} for text, label in rows]
    channels = {"train": write(base / "train", named[:split]),
                "test": write(base / "test", named[split:], "test")}  # fmt: skip
    job = Job(base, channels, ("--model_id", str(model), *FAST))
    job.run_here(*argv)
    return job


def ask(job: Job, *texts: str, **parameters: Any) -> Any:
    """Return the handlers' answers from the model that was trained."""
    return Handlers(job.model).ask({"inputs": list(texts), "parameters": parameters})


def test_fractions_are_learned_as_numbers(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [(text, 0.75 if label == "pos" else -1.25) for text, label in reviews(200)]
    job = trained(tmp_path, tiny_model, rows)
    assert "label: a number from -1.25 to 0.75" in capsys.readouterr().out
    assert job.metrics["eval_pearson"] > 0.95
    assert job.metrics["eval_mse"] == pytest.approx(job.metrics["eval_loss"], rel=1e-3)
    good, bad = ask(job, GOOD, BAD)
    assert good["label"] == "label"
    assert (good["score"], bad["score"]) == pytest.approx((0.75, -1.25), abs=0.4)


@pytest.mark.long
def test_a_decoder_is_a_classifier_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = causal_kit.make_model("llama", tmp_path / "start")
    rows = [
        (f"{'the ' * (index % 7)}{text}", label) for index, (text, label) in enumerate(reviews(160))
    ]
    job = trained(tmp_path, model, rows, "--max_length", "96")
    assert "padding token: </s>, the end token" in capsys.readouterr().out
    assert job.metrics["eval_accuracy"] == 1.0
    assert json.loads((job.model / "config.json").read_text())["pad_token_id"] == 0
    answers = ask(job, GOOD, f"the the the the {BAD}")
    assert [answer["label"] for answer in answers] == ["pos", "neg"]


@pytest.mark.parametrize(("kind", "trains"), [("Llama", False), ("Roberta", True)])
def test_two_padding_tokens_change_no_answer(tmp_path: Path, kind: str, trains: bool) -> None:
    start = save(f"{kind}ForSequenceClassification", tmp_path / "start")
    settings = json.loads((start / "config.json").read_text())
    (start / "config.json").write_text(json.dumps({**settings, "pad_token_id": 4}))
    rows = [
        (text[: 40 - index], f"LABEL_{index % 2}") for index, (text, _) in enumerate(reviews(40))
    ]
    job = trained(tmp_path, start, rows, "--do_predict", "True", "--do_train", str(trains))
    lines = (job.output / "predictions.jsonl").read_text().splitlines()
    scores = Handlers(job.model if trains else start).ask(
        {"inputs": [text for text, _ in rows[32:]]}
    )
    assert [json.loads(line)["score"] for line in lines] == pytest.approx(
        [answer["score"] for answer in scores], rel=1e-4
    )


# transformers 5.23 has a new name for it, which transformers 4 does not know.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
def test_what_shapes_a_training_is_passed_on(tmp_path: Path, tiny_model: Path) -> None:
    """Accumulation, checkpointing, smoothing, class weights, and the best model by early stopping."""
    rows = [row for row in reviews(120) if row[1] == "pos" or "0" in row[0]]
    arguments = ["--early_stopping_patience", "1", "--metric_for_best_model", "eval_f1_macro"]
    arguments += ["--early_stopping_threshold", "2", "--class_weight", "balanced"]
    arguments += ["--gradient_accumulation_steps", "2", "--gradient_checkpointing", "True"]
    arguments += ["--label_smoothing_factor", "0.1", "--epochs", "9"]
    job = trained(tmp_path, tiny_model, rows, *arguments)
    assert job.metrics["epoch"] == 2, "no f1 is better by 2, so the second evaluation is the last"
    state = json.loads(next(job.checkpoints.rglob("trainer_state.json")).read_text())
    per_epoch = -(-(len(rows) * 4 // 5) // 16)
    assert state["best_global_step"] in (per_epoch, 2 * per_epoch)


def test_sets_of_labels_and_their_thresholds_are_learned_kept_and_used(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of the labels is rare, and likely only after one of the words."""
    drawn = np.random.default_rng(3)
    labels = {"good": ["kind"], "bad": ["harsh"], "great": ["kind"], "awful": ["harsh"]}
    rows = []
    for _ in range(280):
        word = str(drawn.choice(list(labels)))
        is_rare = word == "great" and drawn.random() < 0.4
        rows.append((f"the film was {word} , truly", labels[word] + ["rare"] * is_rare))
    job = trained(tmp_path, tiny_model, rows, "--tune_thresholds", "True", "--do_predict", "True")
    thresholds = json.loads((job.model / "config.json").read_text())["label_thresholds"]
    assert set(thresholds) == {"kind", "harsh", "rare"}
    assert 0 < thresholds["rare"] < 0.5
    assert f"rare {thresholds['rare']:.3g}" in capsys.readouterr().out
    assert "label_thresholds in config.json" in (job.model / "README.md").read_text()
    assert job.metrics["eval_tuned_f1_macro"] > job.metrics["eval_f1_macro"]
    lines = (job.output / "predictions.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    for answer in answers:
        reached = {name for name, score in answer["scores"].items() if score >= thresholds[name]}
        assert set(answer["labels"]) == reached
    true, predicted = (
        np.array([[name in answer[key] for name in sorted(thresholds)] for answer in answers])
        for key in ("true", "labels")
    )
    tuned = f1_score(true, predicted, average="macro")
    assert job.metrics["eval_tuned_f1_macro"] == pytest.approx(tuned)

    def names(text: str, threshold: Any) -> set[str]:
        (answer,) = ask(job, text, threshold=threshold)
        return {entry["label"] for entry in answer}

    assert names("the film was great , truly", "tuned") == {"kind", "rare"}
    assert names("the film was great , truly", 0.5) == {"kind"}
    assert names("the film was bad , truly", "tuned") == {"harsh"}
    assert names("the film was bad , truly", 0) == {"kind", "harsh", "rare"}

    # Judged alone, the model's thresholds count; trained on, they are those of other weights.
    judged = Job(tmp_path / "b", {"test": job.channels["test"]}, ("--model_id", str(job.model)))
    judged.run_here("--do_train", "False", "--do_eval", "True", "--max_length", "32")
    assert judged.metrics["eval_f1_macro"] == pytest.approx(tuned)
    again = replace(job, base=tmp_path / "c", argv=("--model_id", str(job.model), *FAST))
    again.run_here("--max_steps", "1")
    assert "label_thresholds" not in json.loads((again.model / "config.json").read_text())


def test_both_texts_of_a_pair_are_read_in_their_order(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second text alone decides, and the first is of the other class as often as not: a text that
    is dropped, or a pair the wrong way round, cannot be right more often than by chance."""
    drawn = np.random.default_rng(1)
    kinds = {"pos": ["good", "great"], "neg": ["bad", "awful"]}
    rows = []
    for number in range(260):
        first, second = (str(kind) for kind in drawn.choice(list(kinds), 2))
        texts = [
            f"the film was {drawn.choice(kinds[kind])} number {number}" for kind in (first, second)
        ]
        rows.append({"id": number, "sentence1": texts[0], "sentence2": texts[1], "label": second})
    held = rows[200:]
    channels = {"train": write(tmp_path / "train", rows[:200]), "validation": write(tmp_path / "v", held),
                "test": write(tmp_path / "test", [{**row, "label": -1} for row in held[:9]])}  # fmt: skip
    job = Job(tmp_path, channels, ("--model_id", str(tiny_model), *FAST, "--lr", "3e-3"))
    job.run_here()
    output, metrics = capsys.readouterr().out, job.metrics
    assert metrics["eval_accuracy"] > 0.95
    assert not any(name.startswith("test_") for name in metrics)
    assert "text 'sentence1', text_pair 'sentence2', label 'label'; not read: id" in output
    assert "test/train.jsonl has no value in 'label' and is not used" in output
    columns = json.loads((job.model / "config.json").read_text())["text_columns"]
    assert columns == ["sentence1", "sentence2"]
    card = (job.model / "README.md").read_text()
    assert "# Text pair classifier" in card and "`sentence1` and `sentence2`, in this order" in card
    answers = ask(job, *({name: row[name] for name in reversed(columns)} for row in held))
    plain = ask(job, *({"text": row["sentence1"], "text_pair": row["sentence2"]} for row in held))
    right = [answer["label"] == row["label"] for answer, row in zip(answers, held, strict=True)]
    assert np.mean(right) == pytest.approx(metrics["eval_accuracy"])
    chances = [
        one["score"] if is_right else 1 - one["score"]
        for one, is_right in zip(answers, right, strict=True)
    ]
    assert -np.mean(np.log(chances)) == pytest.approx(metrics["eval_loss"], rel=1e-3)
    assert [answer["score"] for answer in answers] == pytest.approx(
        [entry["score"] for entry in plain]
    )
    with pytest.raises(Exception, match=r"not an object of sentence1 and sentence2"):
        ask(job, held[0]["sentence1"])
    assert re.search(r"new weights +2 start at random", output)
