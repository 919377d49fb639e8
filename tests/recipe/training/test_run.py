"""The recipe as users run it: code/train.py in processes of its own, and what it leaves behind."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file, save_file

from recipe import metrics
from tests.support import circulating
from tests.support.trainings import train
from tests.support.words import reviews


def write_csv(folder: Path, rows: list[tuple[str, str]]) -> Path:
    folder.mkdir(parents=True)
    with (folder / "data.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("review", "sentiment"), *rows])
    return folder


class Trained(NamedTuple):
    output: str
    base: Path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Trained:
    """One run with the names and forms of arguments that tutorials use."""
    base = tmp_path_factory.mktemp("job")
    channels = {
        "training": write_csv(base / "in" / "a", reviews(160)),
        "test": write_csv(base / "in" / "b", reviews(20)),
    }
    arguments = ["--model_id", str(tiny_model), "--epochs", "3", "--train-batch-size", "8"]
    arguments += ["--lr", "5e-3", "--hub_token", "very-secret", "--max_length", "32"]
    arguments += ["--price_per_hour", "3.6", "--report_to", "tensorboard"]
    done = train(base, channels, *arguments)
    assert done.returncode == 0, done.stderr
    return Trained(done.stdout, base)


def test_it_learns_and_metrics_json_says_so(trained: Trained) -> None:
    values = json.loads((trained.base / "output" / "data" / "metrics.json").read_text())
    assert values["eval_accuracy"] == 1.0
    assert values["eval_f1_macro"] == values["eval_f1_weighted"] == 1.0
    assert values["epoch"] == 3.0
    assert {f"eval_{name}" for name in metrics.SCORES} < set(values)


def test_the_regexes_read_its_real_output(trained: Trained) -> None:
    lines = trained.output.splitlines()
    found: dict[str, list[float]] = {}
    for definition in metrics.metric_definitions():
        for line in lines:
            if match := re.search(definition["Regex"], line):
                found.setdefault(definition["Name"], []).append(float(match.group(1)))
    values = json.loads((trained.base / "output" / "data" / "metrics.json").read_text())
    assert len(found["eval_accuracy"]) == 3
    assert found["eval_loss"][-1] == pytest.approx(values["eval_loss"], rel=1e-5)
    assert found["loss"][-1] < found["loss"][0]
    assert 4e-3 < max(found["learning_rate"]) <= 5e-3
    assert "'learning_rate': 0.0000" in trained.output, "no small number to read"
    for regexes in circulating.REGEXES.values():
        for name, regex in regexes:
            where = rf"^  {name} = (\S+)" if "=" in regex else rf"^metric .*'{name}': ([^,}}]+)"
            said = re.findall(where, trained.output, re.MULTILINE)
            assert circulating.read(trained.output, regex) == list(map(float, said)), regex
    others = {f"eval_{name}" for name in metrics.OTHER_SCORES}
    named = set(metrics.metric_names()) - set(found) - others
    assert {name for name in named if not name.startswith("test_")} == set()


def test_it_says_what_it_found(trained: Trained) -> None:
    assert "training rows held out" not in trained.output
    assert "csv (comma); text 'review', label 'sentiment'" in trained.output
    assert "2 labels: neg (80 rows), pos (80 rows)" in trained.output
    assert "device          cpu, 1 process" in trained.output
    assert "new weights     2 start at random: classifier.bias, classifier.weight" in trained.output
    assert re.search(r"^environment +Python \S+, torch \S+, transformers", trained.output, re.M)
    assert "about 0 s left" not in trained.output
    assert re.search(
        r"^model written to .*/model: the weights of step \d+, the last$", trained.output, re.M
    )
    assert "\nnext: `amphora serve` answers requests with it" in trained.output
    assert "%|" not in trained.output


def test_the_model_folder_is_complete(trained: Trained) -> None:
    folder = trained.base / "model"
    names = {entry.name for entry in folder.iterdir()}
    assert names == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
        "SHA256SUMS",
    }
    config = json.loads((folder / "config.json").read_text())
    assert config["id2label"] == {"0": "neg", "1": "pos"}
    assert config["label2id"] == {"neg": 0, "pos": 1}
    assert json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"] == 32


def test_the_card_tells_how_and_how_good_and_no_secret(trained: Trained) -> None:
    card = (trained.base / "model" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    for line in (
        "| eval_accuracy | 1 |",
        "| learning_rate | 0.005 |",
        "| num_train_epochs | 3.0 |",
        "label 'sentiment'",
        "| transformers | ",
    ):
        assert line in card
    assert "very-secret" not in card
    assert "very-secret" not in trained.output


def test_it_leaves_a_report_and_tensorboard_logs(trained: Trained) -> None:
    page = (trained.base / "output" / "data" / "report.html").read_text()
    for words in (
        "Confusion matrix, evaluation data",
        "None of 20 texts.",
        "cost (1 x 3.6 an hour)",
    ):
        assert words in page
    assert "very-secret" not in page
    assert list((trained.base / "output" / "tensorboard").glob("events.out.tfevents.*"))


def test_the_handlers_answer_from_it(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    import inference

    monkeypatch.setenv("AMPHORA_DTYPE", "float32")
    model = inference.model_fn(str(trained.base / "model"))

    def ask(body: Any, accept: str = "application/json") -> Any:
        request = inference.input_fn(json.dumps(body).encode(), "application/json")
        return json.loads(inference.output_fn(inference.predict_fn(request, model), accept)[0])

    good = "the film number 3 was good , truly great"
    bad = "the film number 4 was bad , truly awful"
    texts = [good, bad, "the " * 500 + good, "", bad] * 8
    answers = ask({"inputs": texts})
    assert [answer["label"] for answer in answers[:2]] == ["pos", "neg"]
    assert len(answers) == len(texts)
    alone = [ask(text)[0] for text in texts[:5]]
    for together, single in zip(answers, alone, strict=False):
        assert together["label"] == single["label"]
        assert together["score"] == pytest.approx(single["score"], abs=1e-5)
    ranked = ask({"inputs": good, "parameters": {"top_k": 9}})
    assert [entry["label"] for entry in ranked] == ["pos", "neg"]
    assert sum(entry["score"] for entry in ranked) == pytest.approx(1.0)


@pytest.mark.heavy
def test_two_processes_are_one_job(tmp_path: Path, tiny_model: Path) -> None:
    channels = {"train": write_csv(tmp_path / "in", reviews(75))}
    arguments = ["--model_name_or_path", str(tiny_model), "--epochs", "1", "--batch_size", "4"]
    done = train(tmp_path, channels, *arguments, processes=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("device          cpu, 2 processes") == 1
    assert "8 of 75 training rows held out, stratified, seed 42" in done.stdout
    assert done.stdout.count("model written to") == 1
    # 67 rows in steps of 2 x 4: each process sees its half of the data, not all of it.
    assert "metric step=9 {'eval_loss'" in done.stdout
    assert (tmp_path / "model" / "model.safetensors").is_file()


@pytest.mark.heavy
def test_a_model_channel_and_checkpoints_of_its_own(tmp_path: Path, tiny_model: Path) -> None:
    channels = {"train": write_csv(tmp_path / "in", reviews(40)), "model": tiny_model}
    arguments = ["--max_steps", "2", "--output-dir", str(tmp_path / "kept"), "--bf16", "False"]
    done = train(tmp_path, channels, *arguments, "--save_steps=1", "--save_strategy", "steps")
    assert done.returncode == 0, done.stderr
    assert "float32 (bf16=False is set)" in done.stdout
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [
        "checkpoint-1",
        "checkpoint-2",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--label_column", "sentimant"], ["DataError", "'sentimant'", "sentiment"]),
        pytest.param(
            ["--model_name", "nobody/no-such-model"],
            ["ModelError", "no-such-model", "channel"],
            marks=pytest.mark.heavy,
        ),
    ],
)
def test_a_failing_run_names_the_error_and_leaves_no_model(
    tmp_path: Path,
    tiny_model: Path,
    arguments: list[str],
    words: list[str],
) -> None:
    if "--model_name" not in arguments:
        arguments = ["--model_name", str(tiny_model), *arguments]
    done = train(tmp_path, {"train": write_csv(tmp_path / "in", reviews(20))}, *arguments)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    for word in words:
        assert word in last
    model = tmp_path / "model"
    assert not model.exists() or list(model.iterdir()) == []


@pytest.mark.heavy
def test_without_an_evaluation_there_is_none_and_checkpoints_leave_the_models_folder(
    tmp_path: Path, tiny_model: Path
) -> None:
    channels = {"train": write_csv(tmp_path / "in", reviews(40)), "model": tiny_model}
    # The name of a file need not be UTF-8.
    (tmp_path / "in" / "data.csv").rename(tmp_path / "in" / os.fsdecode(b"caf\xe9.csv"))
    arguments = ["--eval_strategy", "no", "--output_dir", str(tmp_path / "model"), "--epochs", "5"]
    done = train(tmp_path, channels, *arguments, "--max_steps", "2", "--num_labels", "2")
    assert done.returncode == 0, done.stderr
    assert "'eval_" not in done.stdout
    assert "caf\\udce9.csv" in (tmp_path / "model" / "README.md").read_text()
    values = json.loads((tmp_path / "output" / "data" / "metrics.json").read_text())
    assert "train_loss" in values and not any(name.startswith("eval") for name in values)
    assert not list((tmp_path / "model").rglob("*optimizer*"))
    assert list((tmp_path / "checkpoints").rglob("optimizer*"))
    assert f"checkpoints are saved in {tmp_path}/checkpoints" in done.stdout
    assert "max_train_steps=2 overrides num_train_epochs=5" in done.stdout
    assert (tmp_path / "output" / "data" / "report.html").is_file(), done.stdout


@pytest.mark.heavy
def test_do_train_false_judges_a_model_by_its_own_labels_and_writes_no_other(
    trained: Trained, tmp_path: Path, tiny_model: Path
) -> None:
    start = tmp_path / "start"
    shutil.copytree(trained.base / "model", start)
    # The same model with its labels the other way round, as another image may have saved it.
    weights = load_file(start / "model.safetensors")
    for name in ("classifier.weight", "classifier.bias"):
        weights[name] = weights[name].flip(0).contiguous()
    save_file(weights, start / "model.safetensors", {"format": "pt"})
    (start / "SHA256SUMS").unlink()
    config = json.loads((start / "config.json").read_text())
    config |= {"id2label": {"0": "pos", "1": "neg"}, "label2id": {"pos": 0, "neg": 1}}
    (start / "config.json").write_text(json.dumps(config))
    channels = {"test": write_csv(tmp_path / "in", reviews(20)), "model": start}
    done = train(tmp_path, channels, "--do_train", "False", "--do_predict", "True")
    assert done.returncode == 0, done.stderr
    output = tmp_path / "output" / "data"
    assert json.loads((output / "metrics.json").read_text())["eval_accuracy"] == 1.0
    rows = [json.loads(line) for line in (output / "predictions.jsonl").read_text().splitlines()]
    assert [row["true"] for row in rows] == [label for _, label in reviews(20)]
    assert all(row["label"] == row["true"] and row["score"] > 0.5 for row in rows)
    assert not list((tmp_path / "model").rglob("*.safetensors"))
    decided = {line.split(" ")[0] for line in done.stdout.splitlines()}
    assert "evaluation" in decided and not {"batch", "steps", "schedule"} & decided
    assert "'loss'" not in done.stdout and "20 predictions for the evaluation data" in done.stdout
    # A file that is named after the data that is judged.
    (tmp_path / "in" / "data.csv").rename(tmp_path / "in" / "test.csv")
    (tmp_path / "output" / "data" / "metrics.json").unlink()
    done = train(tmp_path, channels, "--do_train", "False", "--do_eval", "True")
    assert done.returncode == 0, done.stderr
    assert json.loads((output / "metrics.json").read_text())["eval_accuracy"] == 1.0
    channels["model"] = tiny_model
    done = train(tmp_path, channels, "--do_train", "False", "--do_eval", "True")
    assert done.returncode != 0
    assert "do_train=False" in done.stderr.splitlines()[-1]
