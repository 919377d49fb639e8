"""Every row has the file and the line from which it was read."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe import paths, task_table
from recipe.data.held_out import DataSets
from recipe.errors import DataError
from recipe.hyperparameters import Hyperparameters
from recipe.tasks.base import named_splits

COUNT = 57
REVIEWS = [{"text": f"the film {n}, said\nmark{n}.", "label": "ab"[n % 2]} for n in range(COUNT)]
TAGGED = [{"tokens": ["w", f"mark{n}."], "ner_tags": ["O", "B-LOC"]} for n in range(COUNT)]
QUESTIONS = [{"question": f"Who is mark{n}.?", "context": "Ada.", "answers": {"text": ["Ada"], "answer_start": [0]}}
         for n in range(COUNT)]  # fmt: skip
RANKED = [
    {"query": f"mark{n}.", "positive": f"yes {n}", "negative": f"no {n}"} for n in range(COUNT)
]
CHOICES = [{"question": f"mark{n}.", "choices": ["x", "y"], "answer": "x"} for n in range(COUNT)]
PAIRS = [{"source": f"mark{n}.", "target": f"the {n}"} for n in range(COUNT)]
CHATS = [{"messages": [{"role": "user", "content": f"mark{n}."}, {"role": "assistant", "content": "so"}]}
         for n in range(COUNT)]  # fmt: skip
Rows = Sequence[dict[str, Any]]


def write_file(path: Path, rows: Rows) -> None:
    """Write rows in the format of the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=7)
    elif path.suffix == ".json":
        path.write_text(json.dumps(list(rows), indent=1))
    elif path.suffix == ".csv":
        pd.DataFrame(rows).to_csv(path, index=False)
    else:
        lines = "".join(
            json.dumps(row) + "\n" * (1 + number % 3) for number, row in enumerate(rows)
        )
        data = lines.encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def source_text(location: str) -> str:
    """Return what the file has at `FILE line N` or `FILE row N`, a CSV cell's further lines too."""
    match = re.fullmatch(r"(.+) (line|row) (\d+)", location)
    assert match, location
    path, unit, number = Path(match[1]), match[2], int(match[3])
    if unit == "row":
        rows = (
            pq.read_table(path).to_pylist()
            if path.suffix == ".parquet"
            else json.loads(path.read_text())
        )
        return json.dumps(rows[number])
    data = path.read_bytes()
    lines = (gzip.decompress(data) if path.suffix == ".gz" else data).decode().splitlines()
    return "\n".join(lines[number - 1 : number + 1])


def check_rows(data: DataSets) -> int:
    """Check the location of each row of all splits by the marker in it; return their number."""
    count = 0
    for use, split in named_splits(data).items():
        for number, row in enumerate(split):
            marker = re.search(r"mark\d+\.", json.dumps(row))
            assert marker and marker[0] in source_text(data.where(use, number)), (use, number)
            assert data.entry(use, number)["file"].endswith(
                data.where(use, number).split("/")[-1].split(" ")[0]
            )
            count += 1
    return count


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "jsonl.gz", "json", "parquet"])
@pytest.mark.parametrize("layout", ["held out", "files", "split column", "test", "dropped"])
def test_each_row_of_a_classifier_has_its_line(suffix: str, layout: str, tmp_path: Path) -> None:
    rows: Rows = REVIEWS
    given = Hyperparameters(task="text-classification", seed=3)
    channels = {"train": tmp_path / "train"}
    kept = COUNT
    if layout == "files":
        write_file(tmp_path / "train" / f"b.{suffix}", rows[:20])
        write_file(tmp_path / "train" / "more" / f"a.{suffix}", rows[20:])
    elif layout == "test":
        write_file(tmp_path / "train" / f"t.{suffix}", rows[:40])
        write_file(tmp_path / "test" / f"t.{suffix}", rows[40:])
        channels["test"] = tmp_path / "test"
    elif layout == "split column":
        names = ("train", "train", "test", "validation")
        rows = [{**row, "split": names[n % 4]} for n, row in enumerate(rows)]
        write_file(tmp_path / "train" / f"t.{suffix}", rows)
    elif layout == "dropped":
        rows = [
            {**row, "label": "NA" if n % 5 == 1 else row["label"]} for n, row in enumerate(rows)
        ]
        write_file(tmp_path / "train" / f"t.{suffix}", rows)
        given = Hyperparameters(task="text-classification", seed=3, missing_labels="NA")
        kept -= sum(row["label"] == "NA" for row in rows)
    else:
        write_file(tmp_path / "train" / f"t.{suffix}", rows)
    made = task_table.load("text-classification")(channels, given)
    assert check_rows(made.data) == kept
    assert made.data.entry("train", 0)["file"].startswith("train/")


@pytest.mark.parametrize("linked", ["file", "folder", "renamed"])
def test_messages_name_the_file_that_a_link_leads_to(linked: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine" / "reviews.csv"
    write_file(mine, REVIEWS)
    train = tmp_path / "input" / "data" / "train"
    train.parent.mkdir(parents=True)
    if linked == "folder":
        train.symlink_to(mine.parent)
    else:
        train.mkdir()
        (train / ("reviews.csv" if linked == "file" else "train.csv")).symlink_to(mine)
    folders = paths.from_environment({"SAGEMAKER_BASE_DIR": str(tmp_path)})
    given = Hyperparameters(task="text-classification")
    made = task_table.load("text-classification")(folders.channels, given)
    file, name = {
        "file": (mine, "reviews.csv"),
        "folder": (mine, "train/reviews.csv"),
        "renamed": (train / "train.csv", "train/train.csv"),
    }[linked]
    assert made.data.where("train", 0).startswith(f"{file} line ")
    assert made.data.entry("train", 0)["file"] == name


@pytest.mark.parametrize(
    ("task", "rows"),
    [
        ("token-classification", [*TAGGED[:9], {"tokens": [], "ner_tags": []}, *TAGGED[9:]]),
        ("question-answering", QUESTIONS),
        ("reranking", [*RANKED[:30], {**RANKED[3], "negative": "another"}, *RANKED[30:]]),
        ("sentence-embedding", [*RANKED[:9], {**RANKED[0], "query": ""}, *RANKED[9:]]),
        ("multiple-choice", CHOICES),
        ("translation", [*PAIRS[:5], {"source": "", "target": "x"}, *PAIRS[5:]]),
        ("causal-lm", CHATS),
        ("causal-lm", [{"prompt": f"mark{n}.", "completion": "so" * (n % 9 > 0)} for n in range(COUNT)]),
    ],
)  # fmt: skip
def test_each_row_of_a_task_has_its_line(task: str, rows: Rows, tmp_path: Path) -> None:
    write_file(tmp_path / "train" / "t.jsonl", rows)
    made = task_table.load(task)({"train": tmp_path / "train"}, Hyperparameters(task=task, seed=5))
    assert check_rows(made.data) >= COUNT - 7


@pytest.mark.parametrize(
    ("empty", "argv", "proposed"),
    [
        ({3: None, 5: "", 44: " "}, {}, "empty"),
        ({3: None, 9: "n/a"}, {}, "n/a,empty"),
        ({3: None, 9: "n/a"}, {"missing_labels": "n/a"}, "n/a,empty"),
        ({3: ""}, {"missing_labels": "-1", "problem_type": "single_label_classification"}, "-1,empty"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["classes", "fractions", "several files"])
def test_one_line_leaves_out_rows_with_empty_labels(
    kind: str, empty: dict[int, str | None], argv: dict[str, str], proposed: str, tmp_path: Path
) -> None:
    rows = [{**row, "label": empty.get(n, row["label"])} for n, row in enumerate(REVIEWS)]
    if kind == "fractions":
        rows = [{**row, "label": f"{n}.5" if row["label"] in ("a", "b") else row["label"]}
                for n, row in enumerate(rows)]  # fmt: skip
        if len({*empty.values()} - {None, "", " "}) or argv:
            return  # other words than numbers are another error
    write_file(tmp_path / "train" / "t.jsonl", rows[:20] if kind == "several files" else rows)
    if kind == "several files":
        write_file(tmp_path / "train" / "u.jsonl", rows[20:])
    load = task_table.load("text-classification")
    channels = {"train": tmp_path / "train"}
    blank = [n for n, label in empty.items() if not (label or "").strip()]
    with pytest.raises(DataError) as refusal:
        load(channels, Hyperparameters(task="text-classification", **argv))
    assert f"missing_labels={proposed} to leave" in str(refusal.value)
    if "n/a" not in empty.values() or argv:
        assert "rows ha" in str(refusal.value) and "t.jsonl line 7." in str(refusal.value)
    given = Hyperparameters(task="text-classification", **argv | {"missing_labels": proposed})
    made = load(channels, given)
    assert check_rows(made.data) == COUNT - len(empty)
    left_out = [note for note in made.data.notes if "have no label and are not used" in note]
    assert sum(int(note.split(" ")[0]) for note in left_out) == len(empty) >= len(blank)


def test_a_class_called_empty_is_not_left_out_by_the_proposed_line(tmp_path: Path) -> None:
    rows = [
        {**row, "label": [None, "empty", "full"][min(n, 1 + n % 2)]}
        for n, row in enumerate(REVIEWS)
    ]
    write_file(tmp_path / "train" / "t.csv", rows)
    given = Hyperparameters(task="text-classification")
    with pytest.raises(
        DataError, match=r"1 of 57 rows has no label .* line 2\. Label them or remove"
    ):
        task_table.load("text-classification")({"train": tmp_path / "train"}, given)
