"""Taggers and answerers of questions, from `amphora train` to an answered request, and shared."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.job_tree import trained
from tests.support.servers import served

Run = Callable[..., "subprocess.CompletedProcess[str]"]
pytestmark = pytest.mark.heavy
TEXT = "the was good great"


def sentences(count: int) -> list[dict[str, Any]]:
    """Of which each word tells its tag, and a tag that goes on the word before it."""
    drawn, rows = random.Random(count), []
    for _ in range(count):
        words: list[str] = []
        tags: list[str] = []
        for _ in range(drawn.randint(2, 6)):
            kind = drawn.choice(["PER", "LOC", "", ""])
            words += {"PER": ["good", "great"], "LOC": ["bad"]}.get(
                kind, [drawn.choice(["the", "was"])]
            )
            tags += {"PER": ["B-PER", "I-PER"], "LOC": ["B-LOC"]}.get(kind, ["O"])
        rows.append({"tokens": words, "ner_tags": tags})
    return rows


def asked(count: int) -> list[dict[str, Any]]:
    """Of which the answer is what follows `number`."""
    drawn, rows = random.Random(count), []
    for at in range(count):
        words = [drawn.choice(["the", "film", "was", "good"]) for _ in range(drawn.randint(4, 30))]
        number = str(drawn.randint(0, 9))
        words.insert(drawn.randint(0, len(words)), f"number {number}")
        context = " ".join(words)
        answers = {"text": [number], "answer_start": [context.index("number") + 7]}
        rows.append({"id": str(at), "question": "the number", "context": context,
                     "answers": answers})  # fmt: skip
    return rows


MAKE: dict[str, Callable[[int], list[dict[str, Any]]]] = {
    "token-classification": sentences,
    "question-answering": asked,
}


def channels(base: Path, task: str, rows: int) -> dict[str, Path]:
    found = {}
    for name, count in (("train", rows), ("test", 30)):
        found[name] = base / "input" / "data" / name
        found[name].mkdir(parents=True)
        lines = (json.dumps(row) for row in MAKE[task](count))
        (found[name] / "data.jsonl").write_text("\n".join(lines))
    return found


@pytest.mark.parametrize("task", MAKE)
def test_from_train_to_an_answered_request(task: str, tiny_model: Path, tmp_path: Path) -> None:
    channels(tmp_path, task, 300)
    given = {"model_name_or_path": str(tiny_model), "epochs": "5", "lr": "5e-3", "batch_size": "8",
             "max_length": "40", "do_predict": "True", "early_stopping_patience": "4",
             "metric_for_best_model": "f1"}  # fmt: skip
    log = trained(tmp_path, given)
    assert f"task: {task} (column " in log
    metrics = json.loads((tmp_path / "output" / "data" / "metrics.json").read_text())
    assert metrics["eval_f1"] > (0.99 if task == "token-classification" else 60)
    assert "Worst" in (tmp_path / "output" / "data" / "report.html").read_text()
    assert f"pipeline_tag: {task}" in (tmp_path / "model" / "README.md").read_text()
    lines = (tmp_path / "output" / "data" / "predictions.jsonl").read_text().splitlines()
    assert len(lines) == 30
    assert {"row", "true"} <= set(json.loads(lines[0]))
    assert (tmp_path / "model" / "SHA256SUMS").is_file()
    with served(tmp_path) as server:
        if task == "token-classification":
            body = {"inputs": TEXT, "parameters": {"aggregation_strategy": "simple"}}
            (found,) = server.invoke(body).raise_for_status().json()
            assert (found["entity_group"], found["word"]) == ("PER", "good great")
        else:
            body = {"inputs": {"question": "the number", "context": "the film number 7 was good"}}
            found = server.invoke(body).raise_for_status().json()
            assert (found["answer"], found["start"]) == ("7", 16)
            config = json.loads((tmp_path / "model" / "config.json").read_text())
            assert config["question_answering"] == {
                "max_seq_len": 40,
                "doc_stride": 20,
                "max_answer_len": 30,
                "handle_impossible_answer": False,
                "align_to_words": False,
            }


@pytest.mark.timeout(600)
@pytest.mark.parametrize("task", MAKE)
@pytest.mark.long
def test_two_processes_and_shards_train_what_one_does(
    task: str, tiny_model: Path, tmp_path: Path, train: Run
) -> None:
    data = channels(tmp_path, task, 48)
    common = ["--model_id", str(tiny_model), "--epochs", "1", "--lr", "0.05", "--optim", "sgd",
              "--max_length", "40", "--save_strategy", "no"]  # fmt: skip
    config = json.loads((tiny_model / "config.json").read_text())
    still = tmp_path / "still"
    still.mkdir()
    for path in tiny_model.iterdir():
        (still / path.name).write_bytes(path.read_bytes())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (still / "config.json").write_text(json.dumps(config))
    common[1] = str(still)
    ways = {
        "one": (1, ["--batch_size", "16", "--bf16", "False"]),
        "two": (2, ["--batch_size", "8", "--bf16", "False"]),
        "sharded": (2, ["--batch_size", "8", "--bf16", "True", "--mp_parameters", "partitions=2"]),
    }  # fmt: skip
    losses, weights = {}, {}
    for name, (processes, more) in ways.items():
        base = tmp_path / name
        done = train(base, data, *common, *more, processes=processes)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("sharded over 2 processes" in done.stdout) == (name == "sharded")
        metrics = json.loads((base / "output" / "data" / "metrics.json").read_text())
        losses[name] = metrics["eval_loss"]
        weights[name] = load_file(base / "model" / "model.safetensors")
    assert losses["two"] == pytest.approx(losses["one"], rel=5e-5)
    assert losses["sharded"] == pytest.approx(losses["one"], rel=1e-2)
    for key, weight in weights["one"].items():
        assert (weights["two"][key] - weight).abs().max() < 1e-5, key
    assert set(weights["sharded"]) == set(weights["one"])
