"""The report and the model card."""

import csv
import dataclasses
import io
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from huggingface_hub import ModelCard
from markupsafe import Markup
from transformers import TrainingArguments

from recipe.data.files.part import SourceFile
from recipe.data.held_out import DataSets
from recipe.data.labels import NUMBER, SEVERAL, Labels
from recipe.errors import HyperparameterError
from recipe.hyperparameters import Hyperparameters
from recipe.reports import (
    figures,
    last_answers,
    matrix,
    model_card,
    predictions,
    report,
    tracking,
    verdict,
)
from recipe.reports.model_card import Facts
from tests.support.jobs import QUICK, Job
from tests.support.words import write_reviews

PROBE = "<script>document.title='run by a text'</script>"
HISTORY = [
    {"step": 1, "loss": 2.0, "learning_rate": 5e-5},
    {"step": 2, "loss": 1.0, "learning_rate": 2e-5},
    {"step": 2, "eval_loss": 1.5, "eval_accuracy": 0.5, "eval_runtime": 1.0},
]
SINGLE_LABEL = predictions.Predictions(
    split="test",
    labels=Labels(("cost $5$", "<b>bold</b>")),
    outputs=np.array([[2.0, -2.0], [3.0, -3.0], [0.5, 0.0], [-2.0, 2.0]]),
    true=np.array([0, 1, 1, 1]),
    rows=datasets.Dataset.from_list([
        {"text": text, "other": f"other {PROBE}"}
        for text in ("right", f"most wrong {PROBE}", "a little wrong", "x" * 1000)
    ]),
    columns=["text"],
)  # fmt: skip
NOWHERE = DataSets(train=SINGLE_LABEL.rows, evaluation=SINGLE_LABEL.rows, test=None, notes=[])


def material(
    answers: predictions.Predictions | None = SINGLE_LABEL, **changes: Any
) -> report.Material:
    facts = Facts(
        base_model="some/model",
        hyperparameters=Hyperparameters(
            hf_token="hf_planted", hub_model_id="https://me:hf_planted@host/a"
        ).as_text(),
        about=model_card.describe_classifier((answers or SINGLE_LABEL).labels, ("text",)),
        decisions=[("data", "4 rows")],
        metrics={"eval_accuracy": 0.25, "test_accuracy": 0.5, "train_samples_per_second": 8.0},
    )
    values: dict[str, Any] = {
        "facts": facts,
        "history": HISTORY,
        "verdict": verdict.judge(facts, HISTORY, answers, 0, ("test", 4)),
        "warnings": [("leak", f"2 of 4 rows {PROBE}")],
        "sections": () if answers is None else answers.sections(),
        "lengths": np.array([4, 8, 12, 16]),
        "max_length": 20,
        "computed_tokens": 50,
        "phases": {"data": 0.5, "training": 1799.5},
        "price_per_hour": 2.0,
        "hosts": 3,
        "epochs": 449.875,  # 10 tokens a second
    }
    return report.Material(**{**values, **changes})


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the figures out of a page: to draw them takes a second and more."""
    monkeypatch.setattr(figures, "svg", lambda figure: Markup("<svg></svg>"))


def words(page: str) -> str:
    """The page's text without the figures."""
    return re.sub(r"<[^>]+>", " ", re.sub(r"<svg.*?</svg>", "", page, flags=re.S))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of `material()`. Its figures take a second."""
    return report.write(material(), tmp_path_factory.mktemp("report"))


def test_it_is_one_page_with_its_figures(written: Path) -> None:
    page = written.read_text()
    assert [path.name for path in written.parent.iterdir()] == ["report.html"]
    assert page.count("<svg") == 1, "one evaluation makes no figure"
    assert not re.search(r"""(src|href)=["'](?!#|data:)""", page)
    assert "hf_planted" not in page
    assert "prefers-color-scheme: dark" in page
    assert "currentColor" in "".join(re.findall(r"<svg.*?</svg>", page, re.S))
    assert "#1f2328" not in page


def test_its_figures_are_right(written: Path) -> None:
    text = " ".join(words(written.read_text()).split())
    assert "0.5 test accuracy" in text
    assert "1.0 texts per second 10 tokens per second 20% padding" in text
    assert "30.0 min time" in text
    assert "data 0.500 training 1799.500" in text
    assert "3 cost (3 x 2 an hour)" in text
    assert "1.000 0.333 0.500 3" in text, "precision, recall, F1 and rows of the second class"
    assert "cost" not in " ".join(report._tiles(material(price_per_hour=None)))
    cells = re.findall(
        r'--share:(\d+)%" class="(?:full)?">(\d*)<', matrix.draw(np.array([[1, 1], [0, 4]]), "ab")
    )
    assert cells == [("50", "1"), ("50", "1"), ("0", ""), ("100", "4")]


@pytest.mark.parametrize("columns", [["text"], ["text", "other"]])
@pytest.mark.usefixtures("undrawn")
def test_the_worst_mistake_comes_first_and_is_shown_as_text(
    columns: list[str], tmp_path: Path
) -> None:
    answers = dataclasses.replace(SINGLE_LABEL, columns=columns)
    source = SourceFile(path=tmp_path / "a.csv", name="train/a.csv")
    data = dataclasses.replace(
        NOWHERE, sources=[source], addresses={"test": np.array([2, 9, 4, 7])}
    )
    section = last_answers.write_mistakes(answers, data, tmp_path, "")
    assert (
        section is not None
        and PROBE not in report.write(material(answers, sections=[section]), tmp_path).read_text()
    )
    second = f"\n\nother {PROBE}" * (len(columns) - 1)
    texts = [f"most wrong {PROBE}{second}", f"a little wrong{second}"]
    assert [row[0] for row in section.rows] == texts
    assert [row[-1] for row in section.rows] == ["train/a.csv line 9", "train/a.csv line 4"]
    table = list(csv.DictReader(io.StringIO((tmp_path / "mistakes.csv").read_text())))
    assert [(row["file"], row["line"], row["text"]) for row in table] == [
        ("train/a.csv", "9", texts[0]), ("train/a.csv", "4", texts[1]),
    ]  # fmt: skip
    assert table[0]["true"] == "<b>bold</b>" and float(table[0]["confidence"]) > 0.99


@pytest.mark.parametrize(
    ("labels", "true"),
    [
        (Labels(("a", "b"), SEVERAL), np.array([[1.0, 0.0], [0.0, 0.0]])),
        (Labels(("stars",), NUMBER), np.array([3.1, -3.0], np.float32)),
        (Labels(("good", "loud"), NUMBER), np.array([[3.1, -2.0], [-3.0, 3.0]], np.float32)),
    ],
)
@pytest.mark.usefixtures("undrawn")
def test_sets_of_labels_and_numbers_have_reports_too(
    tmp_path: Path, labels: Labels, true: Any
) -> None:
    given = predictions.Predictions(
        split="evaluation",
        labels=labels,
        outputs=np.array([[2.0, -2.0], [3.0, -3.0]])[:, : len(labels.names)],
        true=true,
        rows=datasets.Dataset.from_list([{"text": "first"}, {"text": "second"}]),
        columns=["text"],
    )
    page = report.write(material(given), tmp_path).read_text()
    assert "confusion" not in words(page).lower()
    drawn = [section for section in given.sections() if section.figure]
    assert len(drawn) == (labels.problem == NUMBER) * len(labels.names)
    assert given.mistakes(9)[1][0].text == "second"
    if labels.problem == NUMBER:
        first, second = (line["true"] for line in given.lines())
        if len(labels.names) == 1:
            assert (first, second) == (3.1, -3.0)
            return
        assert (first, second) == ({"good": 3.1, "loud": -2.0}, {"good": -3.0, "loud": 3.0})
        assert given.mistakes(9)[1][0].true == "good -3, loud 3"
        rows = next(section.rows for section in given.sections() if section.rows)
        assert rows[0] == ["good", pytest.approx(18.605), pytest.approx(9.3025), pytest.approx(-1)]
        base = given.baseline("mse")
        assert base is not None and base.score == pytest.approx((9.3025 + 6.25) / 2)


@pytest.mark.usefixtures("undrawn")
def test_a_run_resumed_after_its_last_evaluation_has_a_report(tmp_path: Path) -> None:
    page = report.write(material(None), tmp_path).read_text()
    assert page.count("<svg") == 1
    assert "mistakes" not in page.lower()


@pytest.mark.usefixtures("undrawn")
def test_it_names_the_job_and_leaves_out_what_is_another_task_s(tmp_path: Path) -> None:
    chosen = Hyperparameters(task="text-classification", class_weight="balanced").as_text()
    facts = dataclasses.replace(material().facts, job_name="reviews-1", hyperparameters=chosen,
                                base_is_local=False)  # fmt: skip
    text = " ".join(words(report.write(material(facts=facts), tmp_path).read_text()).split())
    assert re.search(r"some/model · reviews-1 · 20\d\d-\d\d-\d\d \d\d:\d\d UTC", text)
    assert "class_weight balanced" in text
    assert not re.search(r"mlm_probability|\bbeta\b|loss_type", text)
    assert "train_samples_per_second" not in text, "it would contradict the tile"


@pytest.mark.parametrize(
    ("name", "is_local", "expected"),
    [
        ("google-bert/bert-base-uncased", False, "google-bert/bert-base-uncased"),
        ("/opt/ml/input/data/model", True, None),
    ],
)
def test_the_card_names_the_base_model_if_the_hub_has_it(
    name: str, is_local: bool, expected: str | None
) -> None:
    text = model_card.write(
        dataclasses.replace(material().facts, base_model=name, base_is_local=is_local)
    )
    card = ModelCard(text)
    assert card.data.base_model == expected
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-classification"
    assert f"Fine-tuned from `{name}` to classify texts by 2 labels" in card.text
    assert "| decision | value |\n|---|---|\n| data | 4 rows |\n" in card.text
    assert "| metric | value |\n|---|---|\n| eval_accuracy | 0.25 |\n" in card.text
    assert "hf_planted" not in text


@pytest.mark.parametrize(
    ("requested", "trackers"),
    [
        (None, []),
        ("none", []),
        ("mlflow", ["mlflow"]),
        ("tensorboard, mlflow", ["tensorboard", "mlflow"]),
        ('["tensorboard", "mlflow"]', ["tensorboard", "mlflow"]),
        ("all", ["all"]),
    ],
)
def test_report_to_is_a_name_or_several(requested: str | None, trackers: list[str]) -> None:
    assert tracking.names(requested) == trackers
    with pytest.raises(HyperparameterError, match=r"report_to has value 'mflow': .*mlflow"):
        tracking.names("mflow")


@pytest.mark.parametrize("uri", ["sqlite:////mlflow.db", "foo:bar"])
def test_a_store_of_mlflow_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    arguments = TrainingArguments(str(tmp_path), report_to=["mlflow"], use_cpu=True)
    with pytest.raises(HyperparameterError, match="Set MLFLOW_TRACKING_URI"):
        tracking.run(arguments, {}).__enter__()


@pytest.mark.heavy
def test_a_run_has_metrics_by_step_and_no_secret(
    tmp_path: Path, tiny_model: Path, preloaded: Mapping[str, str]
) -> None:
    def values(folder: Path) -> dict[str, list[str]]:
        """File name to its lines, of what MLflow's file store keeps in `folder`."""
        return {path.name: path.read_text().splitlines() for path in folder.iterdir()}

    counts = {"train": 80, "validation": 20, "test": 20}
    data = {
        name: write_reviews(tmp_path / name / f"{name}.csv", rows).parent
        for name, rows in counts.items()
    }
    arguments = ["--model_id", str(tiny_model), "--batch_size", "8", "--epochs", "2"]
    arguments += ["--report_to", "mlflow,tensorboard", "--logging_steps", "5", "--max_length", "32"]
    arguments += ["--hf_token", "hf_planted", "--hub_token", "hf_planted"]
    # A resumed job continues its run, also with another value of what changes no weight.
    job = Job(tmp_path, data, arguments, {**preloaded, **QUICK, "TRAINING_JOB_NAME": "reviews-1"})
    assert 75 in job.interrupt("metric step=10", "--eval_strategy", "epoch").codes
    job.finish("--eval_batch_size", "4")
    store = tmp_path / "output" / "data" / "mlflow"
    (run,) = [path.parent for path in store.glob("*/*/meta.yaml")]
    meta = (run / "meta.yaml").read_text()
    assert "status: 3" in meta, "it is not FINISHED"
    assert "run_name: reviews-1" in meta
    metrics = values(run / "metrics")
    steps = [line.split()[2] for line in metrics["loss"]]
    assert steps == ["5", "10", "15", "20"]
    assert [line.split()[2] for line in metrics["eval_accuracy"]] == ["0", "10", "20"]
    assert [line.split()[2] for line in metrics["test_accuracy"]] == ["20"]
    parameters = values(run / "params")
    assert parameters["recipe.num_train_epochs"] == ["2.0"]
    assert parameters["learning_rate"] == ["5e-05"]
    assert not [
        path for path in store.rglob("*") if path.is_file() and "hf_planted" in path.read_text()
    ]
    folder = tmp_path / "output" / "tensorboard" / "reviews-1"
    # The evaluation after training has a file of its own, if it begins in another second.
    assert sum(path.name.startswith("events.") for path in folder.iterdir()) in (2, 3)
    # On a new instance, MLflow's folder is absent.
    shutil.rmtree(store)
    job.finish("--eval_batch_size", "4")
    assert "MLflow's store has no run" in job.log
    (run,) = [path.parent for path in store.glob("*/*/meta.yaml")]
    assert "run_name: reviews-1" in (run / "meta.yaml").read_text()


@pytest.mark.heavy
def test_a_run_of_wandb_is_kept_offline_without_its_key(
    tmp_path: Path, tiny_model: Path, preloaded: Mapping[str, str]
) -> None:
    data = {"train": write_reviews(tmp_path / "in" / "train.csv", 40).parent}
    arguments = ["--model_id", str(tiny_model), "--max_steps", "4", "--logging_steps", "1"]
    arguments += ["--report_to", "wandb", "--hf_token", "hf_planted"]
    job = Job(tmp_path, data, arguments, {**preloaded, **QUICK})
    assert 0 not in job.run(WANDB_MODE="online", WANDB_API_KEY="").codes
    assert "WANDB_API_KEY is not set" in job.errors + job.log
    key = "0123456789abcdef" * 2 + "planted0"
    environ = {"WANDB_MODE": "offline", "WANDB_API_KEY": key, "TRAINING_JOB_NAME": "reviews-1"}
    assert job.interrupt("metric step=2", **environ).codes == {75}
    job.finish(**environ)
    store = tmp_path / "output/data/wandb"
    runs = sorted(store.glob("offline-run-*/*.wandb"))
    assert [len({run.name for run in runs}), len(runs)] == [1, 2]
    kept = runs[0].read_bytes()
    assert b"reviews-1" in kept
    assert b"train/loss" in kept and b"num_train_epochs" in kept
    written = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    assert not [path for path, kept in written.items() if b"hf_planted" in kept]
    assert not [path for path, kept in written.items() if key.encode() in kept]
    assert key not in job.log + job.errors


def judged(
    metrics: Mapping[str, float], answers: Any = None, history: Any = (), planned: int = 0
) -> verdict.Verdict:
    facts = dataclasses.replace(material().facts, metrics=metrics)
    return verdict.judge(facts, history, answers, planned, ("evaluation", 50))


def test_the_verdict_compares_with_the_usual_answer_and_the_model_before() -> None:
    true = np.array([0, 0, 0, 1, 2, 2])
    outputs = np.eye(3)[[0, 0, 0, 0, 1, 1]]
    answers = predictions.Predictions(
        split="test", labels=Labels(("a", "b", "c")), outputs=outputs, true=true,
        rows=datasets.Dataset.from_dict({"text": ["t"] * 6}), columns=["text"],
    )  # fmt: skip
    before = [
        {"step": 0, "eval_accuracy": 0.6},
        {"step": 9, "eval_loss": 1.0, "eval_accuracy": 0.5},
    ]
    bad = judged({"test_accuracy": 0.5}, answers, before)
    assert bad.is_warning and bad.sentences == [
        "The accuracy is 0.5 on 6 test rows (\u00b1 0.40, as there are few); always answering 'a' would "
        "give 0.5; the model before training had 0.6 on the evaluation rows.",
        "So training has not made it better than that.",
        "1 of 3 classes are never predicted: c.",
    ]
    good = judged({"test_accuracy": 0.9}, dataclasses.replace(answers, outputs=np.eye(3)[true]))
    assert not good.is_warning and len(good.sentences) == 1


@pytest.mark.parametrize(
    ("metrics", "history", "planned", "expected"),
    [
        ({}, [], 0, "Nothing was evaluated"),
        ({"eval_loss": 0.5}, [{"step": 40, "loss": 1.0}], 90, "ended training after 40 of 90 steps"),
        ({"eval_loss": 0.5}, [{"step": 40, "loss": 1.0}], 40, ""),
        ({"eval_loss": 1.5}, [{"step": 4, "eval_loss": 1.0}, {"step": 8, "eval_loss": 1.5}], 0,
         "lowest at step 4 \\(1\\) and is 1.5 at the end"),
        ({"eval_accuracy": 0.8}, [{"step": 4, "eval_loss": 1.0, "eval_accuracy": 0.7},
                                  {"step": 8, "eval_loss": 1.5, "eval_accuracy": 0.8}], 0, ""),
    ],
)  # fmt: skip
def test_the_verdict_names_what_was_cut_or_too_long(
    metrics: Mapping[str, float], history: Any, planned: int, expected: str
) -> None:
    sentences = judged(metrics, None, history, planned).sentences
    assert re.search(expected, sentences[-1])
    assert len(sentences) == 1 + bool(expected and metrics)


def test_a_matrix_of_many_classes_names_the_usual_confusions() -> None:
    names = [f"class <{number}>" for number in range(100)]
    counts = np.eye(100, dtype=int) * 9
    counts[3, 7], counts[8, 2] = 5, 6
    page = matrix.draw(counts, names)
    assert "of number" not in matrix.draw(
        counts[:9, :9], [f"a department of number {n}" for n in range(9)]
    )
    assert page.count("<rect") == 102 and "class &lt;3&gt; as class &lt;7&gt;: 5" in page
    assert matrix.confusions(counts, names) == [
        [names[8], names[2], 6, "40%"], [names[3], names[7], 5, "36%"],
    ]  # fmt: skip


def test_a_score_s_axis_ends_at_its_highest_value() -> None:
    history = [
        {"step": step, "eval_loss": 1.0, "eval_f1": score} for step, score in ((1, 0.98), (2, 1.0))
    ]
    axes = figures.evaluation(history).axes[0]
    assert axes.get_ylim()[1] == 1 and axes.get_ylim()[0] < 0.95


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/opt/ml/input/data/model", "a model of the channel"),
        ("/models/bge-small/model", "bge-small"),
        ("/cache/models--BAAI--bge-small/snapshots/ab12", "BAAI/bge-small"),
    ],
)
def test_the_base_model_is_named_without_its_path(path: str, name: str) -> None:
    assert report.base_name(dataclasses.replace(material().facts, base_model=path)) == name
