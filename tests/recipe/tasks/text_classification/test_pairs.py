"""A training on pairs from files to answers. The truth is known: the second text alone decides, and
the first one is of the other class as often as not, so that a text that is dropped, or a pair the
wrong way round, cannot be right more often than by chance."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import random
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from recipe.backend.requests.payloads import BadRequest
from recipe.paths import from_environment
from recipe.training import preflight
from tests.support.serving_kit import Handlers
from tests.support.trainings import train

pytestmark = pytest.mark.heavy
KINDS = {"pos": ["good", "great"], "neg": ["bad", "awful"]}
HEADER = ("id", "sentence1", "sentence2", "label")
Row = tuple[int, str, str, str]


def rows(count: int, seed: int) -> list[Row]:
    draw = random.Random(seed)

    def words(kind: str) -> str:
        filler = draw.sample(["the", "film", "was", "truly", ","], draw.randrange(1, 5))
        return " ".join([*filler, draw.choice(KINDS[kind]), f"number {draw.randrange(100)}"])

    found = []
    for number in range(count):
        first, second = draw.choice(list(KINDS)), draw.choice(list(KINDS))
        found.append((number, words(first), words(second), second))
    return found


def write(folder: Path, table: list[Row], header: tuple[str, ...] = HEADER) -> Path:
    folder.mkdir(parents=True)
    lines = ["\t".join(map(str, row)) for row in (header, *table)]
    (folder / "data.tsv").write_text("\n".join(lines) + "\n")
    return folder


class Trained(NamedTuple):
    output: str
    base: Path
    channels: dict[str, Path]
    arguments: list[str]


TEST = rows(60, 2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Trained:
    base = tmp_path_factory.mktemp("pairs")
    hidden = [(*row[:3], "-1") for row in rows(9, 3)]
    channels = {
        "train": write(base / "in" / "train", rows(320, 1)),
        "validation": write(base / "in" / "validation", TEST),
        "test": write(base / "in" / "test", hidden),
    }
    arguments = ["--model_id", str(tiny_model), "--epochs", "4", "--train-batch-size", "8"]
    arguments += [
        "--lr",
        "3e-3",
        "--save_steps",
        "50",
        "--save_total_limit",
        "9",
        "--bf16",
        "False",
    ]
    done = train(base, channels, *arguments)
    assert done.returncode == 0, done.stderr
    return Trained(done.stdout, base, channels, arguments)


def test_both_texts_are_read_in_their_order(trained: Trained) -> None:
    values = json.loads((trained.base / "output" / "data" / "metrics.json").read_text())
    assert values["eval_accuracy"] > 0.95
    assert not any(name.startswith("test_") for name in values)
    assert "text 'sentence1', text_pair 'sentence2', label 'label'; not read: id" in trained.output
    assert "samples packed into" in trained.output
    assert "test/data.tsv has no labels and is not used" in trained.output


def test_what_is_left_behind_tells_of_pairs(trained: Trained) -> None:
    model = trained.base / "model"
    assert json.loads((model / "config.json").read_text())["text_columns"] == list(HEADER[1:3])
    card = (model / "README.md").read_text()
    assert "# Text pair classifier" in card
    assert "`sentence1` and `sentence2`, in this order" in card
    report = (trained.base / "output" / "data" / "report.html").read_text()
    assert "There is no report" not in trained.output
    assert ("<hr>" in report) == ("Worst mistakes" in report and "None of" not in report)


def test_doctor_shows_both_texts(trained: Trained) -> None:
    places = from_environment({"SAGEMAKER_BASE_DIR": str(trained.base)})
    places = dataclasses.replace(places, channels=trained.channels)
    found = list(preflight.inspect(trained.arguments, places, 1))
    assert {each.level for each in found} == {preflight.OK}
    _, first, second, label = rows(320, 1)[0]
    assert f"{label}: {first!r} + {second!r}" in [each.detail for each in found]
    lengths = next(each.detail for each in found if each.what == "lengths")
    tokenizer = AutoTokenizer.from_pretrained(trained.base / "model")
    longest = max(len(tokenizer(row[1], row[2])["input_ids"]) for row in rows(320, 1))
    assert f"longest {longest} tokens" in lengths


def test_anyone_s_transformers_has_the_logits_of_the_evaluation(trained: Trained) -> None:
    """Asked as a user asks: the loss over the same rows is the one that training measured."""
    folder = trained.base / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    _, first, second, names = zip(*TEST, strict=True)
    inputs = tokenizer(list(first), list(second), padding=True, return_tensors="pt")
    assert inputs["token_type_ids"].any()
    labels = torch.tensor([model.config.label2id[name] for name in names])
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(**inputs).logits, labels)
    values = json.loads((trained.base / "output" / "data" / "metrics.json").read_text())
    assert float(loss) == pytest.approx(values["eval_loss"], rel=1e-4)


def test_the_handlers_answer_pairs_as_the_evaluation_did(trained: Trained) -> None:
    served = Handlers(trained.base / "model")
    _, first, second, names = zip(*TEST, strict=True)
    both = list(zip(first, second, strict=True))
    out = io.StringIO()
    csv.writer(out).writerows([("text", "text_pair"), *both])
    of_json, of_names, of_csv = served.ask_all(
        [
            {"inputs": [{"text": one, "text_pair": two} for one, two in both]},
            {"inputs": [{"sentence2": two, "sentence1": one} for one, two in both]},
            (out.getvalue().encode(), "text/csv"),
        ]
    )
    for answers in (of_names, of_csv):
        assert [each["label"] for each in answers] == [each["label"] for each in of_json]
        scores = [each["score"] for each in of_json]
        assert [each["score"] for each in answers] == pytest.approx(scores, abs=1e-6)
    values = json.loads((trained.base / "output" / "data" / "metrics.json").read_text())
    right = sum(each["label"] == name for each, name in zip(of_json, names, strict=True))
    assert right / len(names) == pytest.approx(values["eval_accuracy"])
    true = [each["score"] if each["label"] == name else 1 - each["score"]
            for each, name in zip(of_json, names, strict=True)]  # fmt: skip
    loss = -sum(map(math.log, true)) / len(true)
    assert loss == pytest.approx(values["eval_loss"], rel=1e-3)
    with pytest.raises(BadRequest, match=r"pairs of texts \(sentence1, sentence2\)"):
        served.ask({"inputs": first[0]})
