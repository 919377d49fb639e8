"""What is checked between hyperparameters and data before anything is trained."""

from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig

from recipe import task_table
from recipe.arguments import parse
from recipe.data.labels import SEVERAL, SINGLE
from recipe.errors import HyperparameterError
from recipe.models.pretrained import Source
from recipe.runtime import memory
from recipe.training import preflight
from tests.support.jobs import folders_of, write

CLASSES = ["good", "bad", "so"]


def channels(folder: Path, labels: list[Any]) -> dict[str, Path]:
    rows = [{"text": f"a film of {n}", "label": labels[n % 3]} for n in range(12)]
    return {"train": write(folder, rows)}


def load(folder: Path, labels: list[Any], *argv: str) -> Any:
    given = parse(["--task", "text-classification", *argv])
    return task_table.load("text-classification")(channels(folder, labels), given)


def test_windows_of_long_texts_are_refused_with_what_to_do_instead() -> None:
    with pytest.raises(HyperparameterError, match=r"long_texts has value 'split'.*ModernBERT"):
        parse(["--task", "text-classification", "--long_texts", "split"])


@pytest.mark.parametrize(
    ("argv", "evaluates"),
    [
        ([], True),
        (["--eval_strategy", "no"], False),
        (["--eval_strategy", "no", "--do_eval"], True),
        (["--do_eval", "False"], False),
        (["--do_eval", "False", "--eval_strategy", "epoch"], True),
        (["--eval_strategy", "steps"], True),
    ],
)
def test_an_evaluation_is_made_unless_it_is_declined(argv: list[str], evaluates: bool) -> None:
    assert parse(argv).evaluates is evaluates


def test_without_an_evaluation_all_rows_train(tmp_path: Path) -> None:
    task = load(tmp_path, CLASSES, "--eval_strategy", "no")
    assert task.train.num_rows == 12
    assert "evaluation: none (eval_strategy=no); all rows train" in task.notes
    assert load(tmp_path, CLASSES).train.num_rows < 12


def test_doctor_sees_values_that_the_trainer_refuses_together(tmp_path: Path) -> None:
    folders = folders_of(tmp_path, channels(tmp_path, CLASSES))
    argv = ["--eval_strategy", "no", "--early_stopping_patience", "2"]
    (only,) = preflight.inspect(argv, folders, 2)
    assert (only.level, only.what) == ("error", "hyperparameter")
    assert "early_stopping_patience needs evaluations during training" in only.detail


def test_doctor_says_what_to_give_if_the_weights_do_not_fit(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = folders_of(tmp_path, channels(tmp_path, CLASSES))
    monkeypatch.setattr(memory, "available", lambda: 10_000)
    given = ["--model_name_or_path", str(tiny_model)]
    findings = {one.what: one for one in preflight.inspect(given, folders, 2)}
    assert findings["memory"].level == "warning"
    assert "Give lora_r=16 or fsdp=full_shard or an instance with more memory" in str(
        findings["memory"]
    )
    given += ["--lora_r", "2", "--fsdp", "full_shard"]
    findings = {one.what: one for one in preflight.inspect(given, folders, 2)}
    assert str(findings["memory"]).endswith(". Give an instance with more memory")


@pytest.mark.parametrize(
    ("names", "problem", "expected"),
    [
        (["so", "bad", "good"], SINGLE, ["so", "bad", "good"]),
        (["so", "bad", "good"], SEVERAL, ["so", "bad", "good"]),
        (["so", "bad", "fair"], SINGLE, ["bad", "good", "so"]),
        (["so", "bad", "good", "fair"], SINGLE, ["bad", "good", "so"]),
    ],
)
def test_a_model_that_knows_the_labels_keeps_their_order(
    tmp_path: Path, names: list[str], problem: str, expected: list[str]
) -> None:
    """Its head would begin with the labels interchanged."""
    model = tmp_path / "model"
    BertConfig(
        id2label=dict(enumerate(names)), label2id={name: n for n, name in enumerate(names)}
    ).save_pretrained(model)
    labels: list[Any] = CLASSES if problem == SINGLE else [[CLASSES[0]], [], CLASSES[1:]]
    task = load(tmp_path / "data", labels)
    before = task.train.features["label"]
    shown = [task.data.labels.show(label) for label in task.train["label"]]
    task.take_labels_of(Source(name=str(model), is_local=True))
    assert list(task.data.labels.names) == expected
    after = [sorted(task.data.labels.show(label).split(", ")) for label in task.data.train["label"]]
    assert after == [sorted(label.split(", ")) for label in shown]
    assert task.train.features["label"] == before
