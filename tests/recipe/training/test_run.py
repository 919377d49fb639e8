"""The recipe as users run it: code/train.py in a process of its own, and what it leaves behind."""

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from recipe import metrics
from recipe.errors import ModelError, RecipeError
from recipe.models import lora
from recipe.plan import resolution
from recipe.runtime import memory
from recipe.training import preflight
from tests.support import circulating
from tests.support.jobs import QUICK, Job, folders_of
from tests.support.words import reviews, write_reviews


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, preloaded: Mapping[str, str]
) -> Job:
    """One run with the names and forms of arguments that tutorials use."""
    base = tmp_path_factory.mktemp("job")
    channels = {
        "training": write_reviews(base / "in" / "a" / "data.csv", 160).parent,
        "test": write_reviews(base / "in" / "b" / "data.csv", 20).parent,
    }
    arguments = ["--model_id", str(tiny_model), "--epochs", "3", "--train-batch-size", "8"]
    arguments += ["--lr", "5e-3", "--hub_token", "very-secret", "--max_length", "32"]
    arguments += ["--price_per_hour", "3.6", "--report_to", "tensorboard"]
    return Job(base, channels, arguments, preloaded).finish()


def test_it_learns_and_its_numbers_are_read_by_the_regexes(trained: Job) -> None:
    values = trained.metrics
    assert values["eval_accuracy"] == 1.0
    assert values["eval_f1_macro"] == values["eval_f1_weighted"] == 1.0
    assert values["epoch"] == 3.0
    assert {f"eval_{name}" for name in metrics.SCORES} < set(values)
    lines = trained.log.splitlines()
    results: dict[str, list[float]] = {}
    for definition in metrics.metric_definitions():
        for line in lines:
            if match := re.search(definition["Regex"], line):
                results.setdefault(definition["Name"], []).append(float(match.group(1)))
    values = trained.metrics
    assert len(results["eval_accuracy"]) == 4, "one of them before training"
    report = (trained.output / "report.html").read_text()
    assert f"the model before training had {results['eval_accuracy'][0]:.3g}." in report
    assert results["eval_loss"][-1] == pytest.approx(values["eval_loss"], rel=1e-5)
    assert results["loss"][-1] < results["loss"][0]
    assert 4e-3 < max(results["learning_rate"]) <= 5e-3
    assert "'learning_rate': 0.0000" in trained.log, "no small number to read"
    for regexes in circulating.REGEXES.values():
        for name, regex in regexes:
            where = rf"^  {name} = (\S+)" if "=" in regex else rf"^metric .*'{name}': ([^,}}]+)"
            matches = re.findall(where, trained.log, re.MULTILINE)
            assert circulating.read(trained.log, regex) == list(map(float, matches)), regex
    others = {f"eval_{name}" for name in metrics.OTHER_SCORES}
    named = set(metrics.metric_names()) - set(results) - others
    assert {name for name in named if not name.startswith("test_")} == set()


def test_its_log_and_folder_say_what_was_done(trained: Job) -> None:
    assert "training rows held out" not in trained.log
    assert "csv (comma); text 'review', label 'sentiment'" in trained.log
    assert "2 labels: neg (80 rows), pos (80 rows)" in trained.log
    assert "device          cpu, 1 process" in trained.log
    assert "new weights     2 start at random: classifier.bias, classifier.weight" in trained.log
    assert re.search(r"^environment +Python \S+, torch \S+, transformers", trained.log, re.M)
    assert "about 0 s left" not in trained.log
    assert re.search(
        r"^model written to .*/model: the weights of step \d+, the last$", trained.log, re.M
    )
    assert "\nnext: `amphora serve` answers requests with it" in trained.log
    assert "%|" not in trained.log
    folder = trained.model
    files = "config.json model.safetensors tokenizer.json tokenizer_config.json README.md SHA256SUMS proof.json"
    assert {entry.name for entry in folder.iterdir()} == set(files.split())
    config = json.loads((folder / "config.json").read_text())
    assert config["id2label"] == {"0": "neg", "1": "pos"}
    assert config["label2id"] == {"neg": 0, "pos": 1}
    assert json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"] == 32


def test_card_and_report_tell_how_and_how_good_and_no_secret(trained: Job) -> None:
    card = (trained.model / "README.md").read_text()
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
    assert "very-secret" not in trained.log
    page = (trained.output / "report.html").read_text()
    for words in (
        "Confusion matrix, evaluation data",
        "The accuracy is 1 on 20 evaluation rows",
        "None of 20 answers is wrong.",
        "cost (1 x 3.6 an hour)",
    ):
        assert words in page
    decisions = re.findall(r'<td class="label">([\w ]+)</td>', page)
    assert decisions.count("lengths") == decisions.count("truncation") == 1
    header = "file,line,true,predicted,confidence,text"
    assert (trained.output / "mistakes.csv").read_text().splitlines() == [header]
    assert "very-secret" not in page
    assert list((trained.base / "output" / "tensorboard").glob("events.out.tfevents.*"))


def test_a_failing_run_names_the_error_and_leaves_no_model(
    tmp_path: Path, tiny_model: Path, preloaded: Mapping[str, str]
) -> None:
    channels = {"train": write_reviews(tmp_path / "in" / "data.csv", 20)}
    argv = ("--model_name", str(tiny_model), "--label_column", "sentimant")
    job = Job(tmp_path, channels, argv, preloaded).run()
    assert job.codes == {1}
    last = job.errors.strip().splitlines()[-1]
    for word in ("DataError", "'sentimant'", "sentiment"):
        assert word in last
    assert job.errors.count("'sentimant'") == 1 and "Traceback" not in job.errors
    assert not job.files


def test_without_an_evaluation_there_is_none_and_checkpoints_leave_the_models_folder(
    tmp_path: Path,
    tiny_model: Path,
    preloaded: Mapping[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The name of a file need not be UTF-8.
    data = write_reviews(tmp_path / "in" / os.fsdecode(b"caf\xe9.csv"), 40).parent
    channels = {"train": data, "model": tiny_model}
    argv = ("--eval_strategy", "no", "--max_steps", "2")
    job = Job(tmp_path, channels, argv, {**preloaded, **QUICK})
    job.finish("--output_dir", str(job.model), "--epochs", "5", "--num_labels", "2")
    assert "'eval_" not in job.log
    assert "caf\\udce9.csv" in (job.model / "README.md").read_text()
    assert "train_loss" in job.metrics and not any(name.startswith("eval") for name in job.metrics)
    assert not list(job.model.rglob("*optimizer*"))
    assert list(job.checkpoints.rglob("optimizer*"))
    assert f"checkpoints are saved in {tmp_path}/checkpoints" in job.log
    assert "max_train_steps=2 overrides num_train_epochs=5" in job.log
    (data / os.fsdecode(b"caf\xe9.csv")).rename(data / "a.csv")
    kept = ("--output-dir", str(tmp_path / "kept"), "--bf16", "False", "--save_steps", "1")
    job.run_here("--save_strategy", "steps", *kept)
    assert "float32 (bf16=False is set)" in capsys.readouterr().out
    names = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert names == ["checkpoint-1", "checkpoint-2"]


def test_do_train_false_judges_a_model_by_its_own_labels_and_writes_no_other(
    trained: Job, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = tmp_path / "start"
    shutil.copytree(trained.model, start)
    # The same model with its labels the other way round, as another image may have saved it.
    weights = trained.weights
    for name in ("classifier.weight", "classifier.bias"):
        weights[name] = weights[name].flip(0).contiguous()
    save_file(weights, start / "model.safetensors", {"format": "pt"})
    (start / "SHA256SUMS").unlink()
    config = json.loads((start / "config.json").read_text())
    config |= {"id2label": {"0": "pos", "1": "neg"}, "label2id": {"pos": 0, "neg": 1}}
    (start / "config.json").write_text(json.dumps(config))
    # A file that is named after the data that is judged.
    data = write_reviews(tmp_path / "in" / "test.csv", 20).parent
    job = Job(tmp_path, {"test": data, "model": start}, ("--do_train", "False"))
    assert job.run_here("--do_predict", "True")["eval_accuracy"] == 1.0
    output = capsys.readouterr().out
    rows = [
        json.loads(line) for line in (job.output / "predictions.jsonl").read_text().splitlines()
    ]
    assert [row["true"] for row in rows] == [label for _, label in reviews(20)]
    assert all(row["label"] == row["true"] and row["score"] > 0.5 for row in rows)
    assert not job.files
    decided = {line.split(" ")[0] for line in output.splitlines()}
    assert "evaluation" in decided and not {"batch", "steps", "schedule"} & decided
    assert "'loss'" not in output and "20 predictions for the evaluation data" in output
    (data / "test.csv").rename(data / "data.csv")
    assert job.run_here("--do_eval", "True")["eval_accuracy"] == 1.0
    folders = folders_of(tmp_path, job.channels)
    checked = preflight.inspect([*job.argv, "--do_eval", "True"], folders, 1)
    assert not {"leak"} & {finding.what for finding in checked if finding.level != "ok"}, checked
    few = job.base / "few" / "data.csv"
    for rows in ([("good film", "pos")], [("bad film", "neg")] * 3):
        few.parent.mkdir(exist_ok=True)
        few.write_text("\n".join(map(",".join, [("text", "label"), *rows])))
        capsys.readouterr()
        job = Job(tmp_path, {"test": few.parent, "model": start}, job.argv)
        assert job.run_here("--do_eval", "True")["eval_accuracy"] == 1.0
        assert "train data" not in capsys.readouterr().out
    with pytest.raises(RecipeError, match="do_train=False"):
        Job(tmp_path, {"test": data, "model": tiny_model}, job.argv).run_here("--do_eval", "True")


def test_doctor_tries_steps_with_the_threads_allocator_and_seed_of_a_training(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channels = {"train": write_reviews(tmp_path / "in" / "data.csv", 40).parent}
    argv = ["--model_id", str(tiny_model), "--use_cpu", "True", "--max_length", "32"]
    usual, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    states: list[tuple[int, int]] = []
    real = resolution.load

    def load(*given: Any) -> Any:
        states.append((torch.get_num_threads(), torch.initial_seed()))
        return real(*given)

    monkeypatch.setattr(resolution, "load", load)
    monkeypatch.setattr(memory, "keep_freed", lambda: states.append((0, 0)))
    try:
        for steps in (0, 2):
            torch.set_num_threads(cores + 1)
            torch.manual_seed(1)
            *_, last = preflight.inspect(argv, folders_of(tmp_path, channels), 1, steps)
            assert ("2 steps trained" in last.detail) == (steps > 0), last
    finally:
        torch.set_num_threads(usual)
    assert states == [(0, 0), (cores, 42)] * 2


@pytest.mark.parametrize("case", ["a weight", "an adapter"])
def test_a_model_that_is_saved_wrongly_ends_the_job_with_an_error_and_all_results(
    case: str, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = lora.whole

    def save_another(model: Any, *arguments: Any) -> Any:
        """Return a model with another bias, or whose adapters are merged twice."""
        if case == "an adapter":
            for name, layer in model.named_modules():
                if name.endswith(("query", "value")):
                    layer.scaling["default"] *= 2
        whole = original(model, *arguments)
        if case == "a weight":
            whole.classifier.bias.data[0] += 0.1
        return whole

    monkeypatch.setattr(lora, "whole", save_another)
    channels = {"train": write_reviews(tmp_path / "in" / "data.csv", 20)}
    argv = ["--model_id", str(tiny_model), "--epochs", "3", "--lr", "1e-2", "--bf16", "False"]
    job = Job(tmp_path, channels, argv + ["--lora_r", "4"] * (case == "an adapter"))
    with pytest.raises(ModelError, match=r"model does not answer as the trained one: its raw"):
        job.run_here()
    assert job.files and job.metrics["eval_loss"] > 0
    assert not (job.model / "proof.json").exists()
