"""What is held out of the training data: a share, groups, the newest rows; repeated rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from recipe import task_table
from recipe.arguments import parse
from recipe.data.held_out import DataSets
from recipe.data.labels import given_weights
from recipe.errors import DataError, HyperparameterError

COUNT = 120
ROWS = [
    {
        "text": f"the text {n}",
        "label": "abc"[n % 3],
        "customer": f"c{n % 7}" if n % 2 else "large",
        "created": f"2024-{1 + n * 37 % 12:02}-{1 + n % 28:02}T10:00:00Z",
        "day": n * 37 % 61,
    }
    for n in range(COUNT)
]


def load(folder: Path, argv: str, rows: Sequence[Any] = ROWS, task: str = "text-classification",
         test: Sequence[Any] = ()) -> DataSets:  # fmt: skip
    channels = {"train": folder / "train"}
    for name, some in {"a": rows[:50], "b": rows[50:]}.items():
        path = folder / "train" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in some))
    if test:
        channels["test"] = folder / "test"
        channels["test"].mkdir()
        (folder / "test" / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in test))
    made: Any = task_table.load(task)(channels, parse(["--task", task, *argv.split()]))
    data: DataSets = made.data
    return data


def numbers(data: DataSets, use: str, column: str = "text") -> list[int]:
    texts = getattr(data, use)[column]
    return [int(str(text).rsplit(" ", 1)[1]) for text in texts]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("", 12),
        ("--validation_split 0.25", 30),
        ("--test_size 0.5", 60),
        ("--val_set_size 0.2", 24),
        ("--validation_split_percentage 5", 6),
        ("--validation_split 0.99", 117),
    ],
)
def test_a_share_is_held_out_by_any_of_its_names(argv: str, expected: int, tmp_path: Path) -> None:
    data = load(tmp_path, argv)
    assert len(data.evaluation) == expected and len(data.train) == COUNT - expected
    assert {*data.train["label"]} == {0, 1, 2}


@pytest.mark.parametrize("value", ["0", "1", "1.5", "2000", "-0.1"])
def test_what_is_no_share_is_refused(value: str, tmp_path: Path) -> None:
    with pytest.raises(HyperparameterError, match=r"validation_split.*share"):
        parse(["--task", "text-classification", "--validation_split", value])


@pytest.mark.parametrize("task", ["text-classification", "sentence-embedding", "causal-lm"])
def test_groups_are_held_out_with_all_their_rows(task: str, tmp_path: Path) -> None:
    rows = [
        {"query": row["text"], "positive": f"so {n}", "customer": row["customer"]}
        if task == "sentence-embedding"
        else {name: cell for name, cell in row.items() if name in ("text", "customer", "label")}
        for n, row in enumerate(ROWS)
    ]
    if task == "causal-lm":
        rows = [{"text": row["text"], "customer": row["customer"]} for row in rows]
    data = load(tmp_path, "--validation_group customer", rows, task)
    column = "query" if task == "sentence-embedding" else "text"
    customers = [
        {ROWS[n]["customer"] for n in numbers(data, use, column)} for use in ("train", "evaluation")
    ]
    assert customers[0] and customers[1] and not customers[0] & customers[1]
    assert "large" in customers[0], "the half of all rows is not held out for a tenth"
    assert len(data.train) + len(data.evaluation) == COUNT
    assert f"{len(customers[1])} of 8 groups by 'customer'" in " ".join(data.notes)


@pytest.mark.parametrize("column", ["created", "day"])
def test_the_newest_rows_are_held_out(column: str, tmp_path: Path) -> None:
    data = load(tmp_path, f"--validation_date {column}")
    old, new = ([ROWS[n][column] for n in numbers(data, use)] for use in ("train", "evaluation"))
    assert max(old) < min(new) and 8 <= len(new) <= 20
    assert f"the newest by {column!r}, from {min(new)} on" in " ".join(data.notes)


@pytest.mark.parametrize(
    ("argv", "change", "message"),
    [
        ("--validation_group custmer", {}, r"custmer.*no such column.*Did you mean customer"),
        ("--validation_group day", {"day": float("nan")}, r"1 of 120 rows .*a.jsonl line 4"),
        ("--validation_group customer", {"customer": ""}, r"1 of 120 rows .*a.jsonl line 4"),
        ("--validation_date created", {"created": "31/12/24"}, r"a.jsonl line 4 has '31/12/24'"),
        ("--validation_group label --validation_date day", {}, "does not go with the other"),
    ],
)
def test_a_column_that_cannot_divide_the_rows_is_refused(
    argv: str, change: dict[str, str], message: str, tmp_path: Path
) -> None:
    rows = [{**row, **(change if n == 3 else {})} for n, row in enumerate(ROWS)]
    with pytest.raises(DataError, match=message):
        load(tmp_path, argv, rows)


def test_a_group_is_one_in_files_of_several_types(tmp_path: Path) -> None:
    def spelled(n: int) -> dict[str, Any]:
        number = n % 9
        return {"day": number if n < 50 else [float(number), f"{number} ", str(number)][n % 3]}

    rows = [
        {"text": row["text"], "label": row["label"], **spelled(n)} for n, row in enumerate(ROWS)
    ]
    data = load(tmp_path, "--validation_group day --validation_split 0.4", rows)
    assert "of 9 groups" in " ".join(data.notes)
    sides = [{n % 9 for n in numbers(data, use)} for use in ("train", "evaluation")]
    assert sides[1] and not sides[0] & sides[1]


def test_without_an_evaluation_none_is_held_out_and_that_is_said(tmp_path: Path) -> None:
    data = load(tmp_path, "--validation_date day --eval_strategy no")
    assert len(data.train) == COUNT and "validation_date not used" in " ".join(data.notes)


def test_a_hold_out_that_is_not_needed_is_said(tmp_path: Path) -> None:
    data = load(tmp_path, "--validation_split 0.3 --validation_group customer", test=ROWS[:9])
    assert len(data.train) == COUNT
    assert "validation_split and validation_group not used" in " ".join(data.notes)


@pytest.mark.parametrize(
    "task", ["text-classification", "question-answering", "sentence-embedding"]
)
def test_repeated_rows_are_left_out_before_others_are_held_out(task: str, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"text": f"the text {n}", "label": "ab"[n % 2]} for n in range(40)
    ]
    if task == "question-answering":
        rows = [{"id": n, "question": f"the text {n}", "context": "Ada", "answers": {"text": ["Ada"], "answer_start": [0]}}
                for n in range(40)]  # fmt: skip
    if task == "sentence-embedding":
        rows = [{"query": f"the text {n}", "positive": f"so {n}"} for n in range(40)]
    again = [{**row, **({"id": 900 + n} if "id" in row else {})} for n, row in enumerate(rows[:15])]
    data = load(tmp_path, "--drop_duplicates True", [*rows, *again], task)
    assert len(data.train) + len(data.evaluation) == 40
    assert "drop_duplicates leaves out 15 of 55 training rows" in " ".join(data.notes)
    assert len(load(tmp_path, "", [*rows, *again], task).train) > 40


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a:2", [2, 1, 1]),
        ("c:0.5, a:3", [3, 1, 0.5]),
        ('{"b": 4, "c": 2}', [1, 4, 2]),
    ],
)
def test_classes_are_weighted_by_hand(given: str, expected: list[float], tmp_path: Path) -> None:
    parsed = parse(["--task", "text-classification", "--class_weights", given])
    assert given_weights(str(parsed.class_weight), ("a", "b", "c")) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("balance", "class_weight has value 'balance'.*Give balanced, or"),
        ("a:x", "Give balanced, or"),
        ("a:-1", "above 0"),
        ("a:nan", "above 0"),
        ("a:1,d:2", "names the class 'd', and the data has a, b, c"),
    ],
)
def test_weights_that_fit_no_class_are_refused(given: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(HyperparameterError, match=message):
        load(tmp_path, f"--class_weight {given}")
