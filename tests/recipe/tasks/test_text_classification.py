"""What else the recipe trains: numbers, sets of labels with thresholds, decoders; and how."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from sklearn.metrics import f1_score

from tests.support.jobs import Job, write
from tests.support.serving_kit import Handlers, save
from tests.support.words import reviews

pytestmark = pytest.mark.heavy
FAST = ("--batch_size", "8", "--lr", "5e-3", "--bf16", "False", "--epochs", "4", "--max_length",
        "32")  # fmt: skip


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


def test_fractions_are_learned_as_numbers(tmp_path: Path, tiny_model: Path) -> None:
    rows = [(text, 0.75 if label == "pos" else -1.25) for text, label in reviews(200)]
    job = trained(tmp_path, tiny_model, rows)
    assert job.metrics["eval_pearson"] > 0.95
    good, bad = ask(job, "the film was good , truly great", "the film was bad , truly awful")
    assert (good["score"], bad["score"]) == pytest.approx((0.75, -1.25), abs=0.4)


def test_several_numbers_are_learned_written_and_served(tmp_path: Path, tiny_model: Path) -> None:
    drawn = np.random.default_rng(3)
    rows = []
    for number in range(240):
        word = str(drawn.choice(["good", "great", "bad", "awful"]))
        rows.append({"text": f"the film was {word} , truly {number}", "valence": 0.75 - 2 * (word in "bad awful"),
                     "arousal": 3 * (word in "great awful")})  # fmt: skip
    channels = {
        "train": write(tmp_path / "train", rows[:200]),
        "validation": write(tmp_path / "v", rows[200:]),
    }
    job = Job(
        tmp_path,
        channels,
        ("--model_id", str(tiny_model), *FAST, "--label_column", "valence,arousal"),
    )
    job.run_here("--do_predict", "True", "--epochs", "12", has_report=True)
    config = json.loads((job.model / "config.json").read_text())
    assert (config["problem_type"], config["id2label"]) == (
        "regression",
        {"0": "valence", "1": "arousal"},
    )
    lines = [
        json.loads(line) for line in (job.output / "predictions.jsonl").read_text().splitlines()
    ]
    assert [line["true"] for line in lines] == [
        {n: row[n] for n in line["true"]} for line, row in zip(lines, rows[200:], strict=True)
    ]
    predicted, true = (
        np.array([[*line[key].values()] for line in lines]) for key in ("value", "true")
    )
    assert job.metrics["eval_mse"] == pytest.approx(np.square(predicted - true).mean(), rel=1e-4)
    assert job.metrics["eval_loss"] == pytest.approx(job.metrics["eval_mse"], rel=1e-4)
    pearsons = [np.corrcoef(*pair)[0, 1] for pair in zip(predicted.T, true.T, strict=True)]
    assert job.metrics["eval_pearson"] == pytest.approx(np.mean(pearsons), rel=1e-4)
    assert min(pearsons) > 0.9
    assert "predict 2 numbers, `valence`, `arousal`" in (job.model / "README.md").read_text()
    texts = [row["text"] for row in rows[200:]]
    make: Any = transformers.pipeline
    plain = make(
        "text-classification", str(job.model), device="cpu", function_to_apply="none", top_k=None
    )(texts)
    answers = ask(job, *texts)
    for answer, wanted, line in zip(answers, plain, lines, strict=True):
        assert [entry["label"] for entry in answer] == [entry["label"] for entry in wanted]
        for entry, other in zip(answer, wanted, strict=True):
            assert entry["score"] == pytest.approx(other["score"], abs=1e-4)
            assert entry["score"] == pytest.approx(line["value"][entry["label"]], abs=1e-4)
    (alone,) = ask(job, texts[0])
    assert [entry["label"] for entry in alone] == [entry["label"] for entry in answers[0]]

    # Judged alone, with the columns in another order, the numbers keep the places of the model.
    judged = Job(tmp_path / "b", {"test": channels["validation"]}, ("--model_id", str(job.model)))
    named = ("--label_column", "arousal,valence", "--max_length", "32", "--bf16", "False")
    judged.run_here("--do_train", "False", "--do_eval", "True", *named)
    assert judged.metrics["eval_mse"] == pytest.approx(job.metrics["eval_mse"], rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "padding", "argv"),
    [("Llama", 4, ["--do_train", "False"]), ("Llama", None, []), ("Roberta", 1, [])],
)
def test_answers_are_those_of_the_evaluation_with_any_padding_tokens(
    tmp_path: Path, kind: str, padding: int | None, argv: list[str]
) -> None:
    start = save(f"{kind}ForSequenceClassification", tmp_path / "model")
    tokens = {} if padding else {"pad_token": None, "eos_token": "[SEP]"}
    edits = {"config.json": {"pad_token_id": padding}, "tokenizer_config.json": tokens}
    for name, values in edits.items():
        settings = json.loads((start / name).read_text())
        (start / name).write_text(json.dumps({**settings, **values}))
    # The token 1 is [UNK], which they have.
    texts = [text[: 40 - index] for index, (text, _) in enumerate(reviews(40))]
    labelled = [(text, f"LABEL_{len(text) % 2}") for text in texts]
    job = trained(tmp_path, start, labelled, "--do_predict", "True", *argv)
    lines = (job.output / "predictions.jsonl").read_text().splitlines()
    assert [json.loads(line)["score"] for line in lines] == pytest.approx(
        [answer["score"] for answer in ask(job, *texts[32:])], rel=1e-4
    )


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
    trained = json.loads((job.model / "config.json").read_text())["trained_task"]["columns"]
    assert trained == {"text": "sentence1", "text_pair": "sentence2"}
    columns = trained.values()
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
