"""The report on a job's rows: each fault of the data is found, with its rows, and nothing else."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from recipe import task_table
from recipe.hyperparameters import Hyperparameters
from recipe.plan import data_report
from recipe.tasks.base import WARNING, Finding

Rows = list[dict[str, Any]]
CLEAN: Rows = [{"text": f"text {n}", "label": "ab"[n % 2]} for n in range(40)]
TEST: Rows = [{"text": f"other {n}", "label": "ab"[n % 2]} for n in range(6)]
TAGGED: Rows = [{"tokens": ["w", str(n)], "ner_tags": ["O", "B-LOC"]} for n in range(12)]
OTHERS: Rows = [{"tokens": ["x", str(n)], "ner_tags": ["O", "B-LOC"]} for n in range(12)]
PROMPTS: Rows = [{"prompt": "Translate.", "completion": f"text {n}"} for n in range(12)]
SPOKEN: Rows = [{"prompt": "Translate.", "completion": f"more {n}"} for n in range(12)]


def findings(task: str, folder: Path, train: Rows, test: Rows) -> dict[str, Finding]:
    channels = {}
    for name, rows in (("train", train), ("test", test)):
        channels[name] = folder / name
        channels[name].mkdir()
        lines = "\n".join(map(json.dumps, rows))
        (channels[name] / "rows.jsonl").write_text(lines)
    made = task_table.load(task)(channels, Hyperparameters(task=task))
    return {
        row_finding.what: row_finding
        for row_finding in data_report._row_findings(data_report.named_splits(made.data))
    }


CASES: dict[str, tuple[str, Rows, Rows, dict[str, str]]] = {
    "clean": ("text-classification", CLEAN, TEST, {}),
    "leak": (
        "text-classification", CLEAN, [*TEST, CLEAN[3], CLEAN[4]],
        {"leak": "2 of 8 evaluation rows are in the training data.*row 6: 'text 3'"},
    ),
    "leak with another label": (
        "text-classification", CLEAN, [*TEST, {"text": "text 3", "label": "a"}],
        {"leak": "1 of 7 evaluation rows"},
    ),
    "contradiction": (
        "text-classification", [*CLEAN, {"text": "text 7", "label": "a"}], TEST,
        {"contradiction": "2 of 41 training rows.*rows 7 and 40: 'text 7'"},
    ),
    "encoding": (
        "text-classification", [*CLEAN, *({"text": f"{text} {n}", "label": "a"} for n, text in enumerate(
            ["caf\u00e9 in S\u00c3O", "caf\u00c3\u00a9", "it\u00e2\u20ac\u2122s", "caf\ufffd"]))], TEST,
        {"encoding": "3 of 44 training rows .*row 41: 'caf"},
    ),
    "empty": (
        "text-classification", [*CLEAN, {"text": " ", "label": "a"}], [*TEST, {"text": "", "label": "b"}],
        {"empty rows": "2 rows have no text"},
    ),
    "tags": (
        "token-classification", [*TAGGED, {"tokens": ["w", "3"], "ner_tags": ["O", "O"]}],
        [*OTHERS, TAGGED[1]],
        {"contradiction": "2 of 13 .*rows 3 and 12", "leak": "1 of 13 evaluation rows"},
    ),
    "prompts may be equal": ("causal-lm", PROMPTS, SPOKEN, {}),
    "prompts with completions": ("causal-lm", PROMPTS, [*SPOKEN, PROMPTS[5]], {"leak": "1 of 13 "}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_warnings_name_the_rows(name: str, tmp_path: Path) -> None:
    task, train, test, expected = CASES[name]
    actual = findings(task, tmp_path, train, test)
    warnings = {what: row for what, row in actual.items() if row.level == WARNING}
    assert warnings.keys() == expected.keys()
    for what, pattern in expected.items():
        assert re.search(pattern, f"{warnings[what]} {warnings[what].example}")
        assert "such as" not in str(warnings[what]), "the model card shows no rows"
    assert actual.keys() - warnings.keys() <= {"repeated rows"}


def test_repeated_rows_are_counted(tmp_path: Path) -> None:
    actual = findings("text-classification", tmp_path, [*CLEAN, *CLEAN[:10]], TEST)
    assert str(actual["repeated rows"]).startswith(
        "10 of 50 training rows repeat another one (20.0%)"
    )


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a", "b", "a"]),
        pa.array(["a", "b", "a"], pa.large_string()),
        pa.array([b"a", b"b", b"a"]),
        pa.array([1, 2, 1]),
        pa.array([True, False, True]),
        pa.array([None, "b", None]),
        pa.array([["a", "b"], ["a"], ["a", "b"]]),
        pa.array([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]], pa.large_list(pa.float64())),
        pa.array([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]], pa.list_(pa.float64(), 2)),
        pa.array([[["a"], ["b"]], [["b"], []], [["a"], ["b"]]]),
        pa.array([{"a": 1}, {"a": 2}, {"a": 1}]),
        pa.array([[{"a": 1}], [{"a": 2}], [{"a": 1}]]),
        pa.array([], pa.large_string()),
    ],
    ids=lambda column: str(column.type),
)
def test_columns_of_every_type_are_compared(column: pa.Array) -> None:
    seeds = np.full(len(column), 7, np.uint64)
    hashes = data_report._chained(column, seeds)
    assert not len(column) or (hashes[0] == hashes[2] != hashes[1])
    assert data_report._chained(column[1:], seeds[1:]).tolist() == hashes[1:].tolist()
