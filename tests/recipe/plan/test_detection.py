"""Which task a job is for if it is not given, and what the refusal lists."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe import task_table
from recipe.arguments import parse
from recipe.errors import DataError, HyperparameterError
from recipe.plan import detection, resolution

TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
REVIEWS = [{"text": f"a film of {n}", "label": "ab"[n % 2]} for n in range(20)]
TEXTS = [{"text": f"a film of {n}"} for n in range(20)]
PROMPTS = [{"prompt": f"a film of {n}", "completion": f"number {n}"} for n in range(20)]


def model(folder: Path, architecture: str) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    return str(folder)


def detect(
    tmp_path: Path, rows: Sequence[Any], architecture: str = "BertForMaskedLM", *argv: str
) -> tuple[str, str]:
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = parse(["--model_id", model(tmp_path / "model", architecture), *argv])
    return detection.find(given, {"train": data})


@pytest.mark.parametrize(
    ("rows", "architecture", "argv", "task", "why"),
    [
        (REVIEWS, "GPT2LMHeadModel", ["--task", "causal-lm"], "causal-lm", "as given"),
        (
            PROMPTS,
            "BertModel",
            ["--completion_column", "completion"],
            "causal-lm",
            "only this task takes completion_column",
        ),
        (REVIEWS, "BertModel", ["--num_labels", "2"], "text-classification", "takes num_labels"),
        (REVIEWS, "BertModel", [], "text-classification", "by its columns: text 'text', label"),
        (TEXTS, "BertForMaskedLM", [], "masked-lm", "with a masked-LM head, else causal-lm could"),
    ],
)
def test_the_task_is_found_by_hyperparameters_columns_and_model(
    tmp_path: Path, rows: Any, architecture: str, argv: list[str], task: str, why: str
) -> None:
    named, reason = detect(tmp_path, rows, architecture, *argv)
    assert named == task
    assert why in reason


def test_hyperparameters_of_different_tasks_are_refused() -> None:
    with pytest.raises(HyperparameterError, match=r"No task takes.*prompt_column .task=causal-lm"):
        parse(["--prompt_column", "a", "--num_labels", "2"])


def test_the_first_rows_of_large_files_are_enough(tmp_path: Path) -> None:
    """And the last one of them may be cut in two."""
    turns = [{"messages": TURNS, "n": "x" * 3_000}] * 500
    for name in ("train.jsonl", "train.parquet"):
        data = tmp_path / name.partition(".")[2]
        data.mkdir()
        if name.endswith("jsonl"):
            (data / name).write_text("\n".join(map(json.dumps, turns)))
        else:
            pq.write_table(pa.Table.from_pylist(turns), data / name)
        assert detection.find(parse([]), {"train": data})[0] == "causal-lm"


def test_a_refusal_lists_the_tasks_that_may_be_meant_each_with_its_lines(tmp_path: Path) -> None:
    rows = [{"text": f"a film of {n}", "mood": "ab"[n % 2]} for n in range(20)]
    with pytest.raises(HyperparameterError) as refusal:
        detect(tmp_path, rows)
    _, texts, classes = str(refusal.value).splitlines()
    assert texts == "- masked-lm: text 'text'. Give task=masked-lm."
    assert classes.startswith("- text-classification: ")
    assert "its columns are 'text' ('a film of 0'), 'mood' ('a')" in classes
    assert "Give task=text-classification label_column=mood." in classes


@pytest.mark.parametrize(
    ("argv", "rate"),
    [
        ([], 5e-5),
        (["--lora_r", "4"], 2e-4),
        (["--task", "causal-lm"], 2e-5),
        (["--task", "reranking", "--lora_r", "4"], 1e-4),
        (["--task", "reranking", "--lr", "5e-5"], 5e-5),
    ],
)
def test_a_learning_rate_that_is_not_given_is_the_tasks(argv: list[str], rate: float) -> None:
    given = parse(argv)
    task = given.task or "text-classification"
    decided, why = resolution.learning_rate(given, task)
    assert decided == rate
    assert (f"the default of {task}" in why) == ("--lr" not in argv)
    assert ("with LoRA" in why) == ("--lora_r" in argv)


def test_each_task_takes_more_for_adapters() -> None:
    for name, row in task_table.TASKS.items():
        whole, adapters = row.learning_rates
        assert 1e-6 <= whole < adapters <= 3e-4, name


@pytest.mark.parametrize(
    ("task", "row", "named"),
    [
        ("token-classification", {"tokens": ["a"], "tags": ["O"]}, ("text_column", "label_column")),
        (
            "sentence-embedding",
            {"anchor": "a", "positive": "b", "negative": "c"},
            ("label_column", "negative_columns"),
        ),
    ],
)
def test_all_columns_that_are_not_there_are_told_at_once(
    task: str, row: dict[str, Any], named: Sequence[str], tmp_path: Path
) -> None:
    (tmp_path / "train.jsonl").write_text("\n".join([json.dumps(row)] * 9))
    argv = [word for name in named for word in (f"--{name}", f"no_{name}")]
    given = parse(["--model_id", "a/b", "--task", task, *argv])
    with pytest.raises(DataError) as refusal:
        task_table.load(task)({"train": tmp_path}, given)
    for name in named:
        assert f"{name} has value 'no_{name}'" in str(refusal.value)


def test_column_names_that_are_wrong_are_told_at_once_if_no_task_is_given(tmp_path: Path) -> None:
    argv = ["--text_column", "texd,b", "--label_column", "labell"]
    with pytest.raises(DataError) as refusal:
        detect(tmp_path, REVIEWS, "BertForMaskedLM", *argv)
    for word in ("text_column has value 'texd'", "text_column has value 'b'",
                 "label_column has value 'labell'", "Did you mean text? Did you mean label?"):  # fmt: skip
        assert word in str(refusal.value)


def test_wikitext_s_files_are_plain_texts(tmp_path: Path) -> None:
    (tmp_path / "wiki.train.tokens").write_text(" = Rome = \n \n A city , of old .\n" * 9)
    given = parse(["--model_id", "a/b", "--task", "causal-lm"])
    assert len(task_table.load("causal-lm")({"train": tmp_path}, given).train) == 16


def test_columns_of_numbers_or_nothing_are_not_proposed_as_texts(tmp_path: Path) -> None:
    rows = [{"a": str(n % 2), "b": f"a film of {n}", "c": ""} for n in range(20)]
    with pytest.raises(HyperparameterError) as refusal:
        detect(tmp_path, rows)
    assert "Give task=text-classification text_column=b label_column=a. " in str(refusal.value)


def test_of_many_columns_the_text_is_asked_first(tmp_path: Path) -> None:
    rows = [{name: f"{name} film of {n}" for name in "qrstu"} for n in range(20)]
    with pytest.raises(HyperparameterError, match="task=text-classification text_column=q; or"):
        detect(tmp_path, rows)


def test_roles_that_no_task_has_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        HyperparameterError, match=r"No task has data with all .* columns=verse:text"
    ):
        detect(tmp_path, TEXTS, "BertModel", "--columns", "verse:text")
