"""Data read some rows at a time gives what all rows read at once give, errors too."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe.data import classification
from recipe.data.files import formats, part, spool
from recipe.errors import DataError
from recipe.hyperparameters import Hyperparameters


def _columns(draw: random.Random) -> dict[str, Any]:
    """Texts beside labels of one of many kinds, some of them wrong."""
    rows = draw.randint(3, 40)
    values = draw.choice([
        ["a", "b", "c"], [0, 1, 2], [0.0, 1.0, 2.0], ["1", "1.0", "0"], ["0", "1", "-"],
        [-1, 0, 1, 2], [0.25, 1.5, 3.0, 4.0, -2.0], ["0.25", "1.5", "3", "7", "9"],
        [[0], [1, 2], []], [["x"], ["x", "y"], ["z"]], ['["x"]', '["x", "y"]', '["z"]'],
        ["O", "B-X", "I-X"], ["a;b", "b", "a"], [1.5, 2.5, float("nan"), 3.25, 8.5],
        [0.5, 1.5, float("inf"), 2.5], ["0.5", "1.5", "much", "2.5", "3.5"], [True, False],
    ])  # fmt: skip
    cells = [draw.choice(values) for _ in range(rows)]
    if draw.random() < 0.2:
        cells[draw.randrange(rows)] = None
    texts: list[Any] = [f"text {draw.randrange(1000)} of {n}" for n in range(rows)]
    if draw.random() < 0.2:
        texts = [text.split() for text in texts]
    table = {"text": texts, draw.choice(["label", "labels"]): cells}
    if draw.random() < 0.2:
        table["split"] = [draw.choice(["train", "train", "test"]) for _ in range(rows)]
    if draw.random() < 0.1:
        del table[next(name for name in table if "label" in name)]
        table |= {name: [draw.choice([0, 1]) for _ in range(rows)] for name in ("red", "blue", "x")}
    return table


def _outcome(folder: Path, more: dict[str, Any]) -> Any:
    try:
        splits = classification.load({"train": folder}, Hyperparameters(**more))
    except DataError as error:
        return str(error)
    rows = [
        [(row.get("text"), np.asarray(row["label"]).tolist()) for row in split]
        for split in (splits.train, splits.evaluation)
    ]
    return splits.labels, rows, splits.notes


def test_batches_come_with_the_numbers_of_their_first_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "_ROWS_AT_ONCE", 2)
    read = part.Part(path=Path("a"), format="parquet", table=pa.table({"a": range(5)}))
    assert [(first, rows.num_rows) for first, rows in read.batches(["a"])] == [
        (0, 2),
        (2, 2),
        (4, 1),
    ]


def test_labels_read_in_pieces_are_those_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    differing = 0
    for seed in range(60):
        draw = random.Random(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        columns = _columns(draw)
        for index in range(draw.choice([1, 1, 2])):
            table = pa.table(columns)
            pq.write_table(
                table, folder / f"{index}.parquet", row_group_size=draw.choice([2, 7, 100])
            )
        more = draw.choice([{}, {}, {"problem_type": "multi_label_classification"},
                            {"label_separator": ";"}])  # fmt: skip
        at_once = _outcome(folder, more)
        with monkeypatch.context() as patch:
            patch.setattr(part, "_ROWS_AT_ONCE", draw.choice([1, 2, 3, 5]))
            patch.setattr(classification, "_FEW_NUMBERS", 2)
            patch.setattr(formats, "_ROWS_AT_ONCE", 4)
            in_pieces = _outcome(folder, more)
        assert in_pieces == at_once, (seed, columns, more)
        differing += not isinstance(at_once, str)
    assert differing > 10


def test_rows_of_many_small_files_do_not_all_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = pa.total_allocated_bytes()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(spool, "_MANY", before + 2_000_000)
    monkeypatch.setattr(spool, "_FEWER", 200_000)
    (tmp_path / "data").mkdir()
    for index in range(12):
        texts = [f"a text number {n} of file {index} {'and more ' * 80}" for n in range(1_000)]
        table = pa.table({"text": texts, "label": [n % 2 for n in range(1_000)]})
        pq.write_table(table, tmp_path / "data" / f"{index}.parquet")
    del texts, table
    splits = classification.load({"train": tmp_path / "data"}, Hyperparameters())
    assert pa.total_allocated_bytes() - before < 6e6 < splits.train.data.nbytes
    assert len(set(splits.train["text"])) == len(splits.train) == 10_800


def test_a_row_that_is_wrong_is_named_by_its_number_in_the_file(tmp_path: Path) -> None:
    labels = ["a"] * 6 + ["b", None, "b", "a"]
    table = pa.table({"text": [f"text {n}" for n in range(10)], "label": labels})
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet row 7 has no label"):
        classification.load({"train": tmp_path}, Hyperparameters())
    split = pa.array(["test", "train"] * 5)
    pq.write_table(table.append_column("split", split), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet row 7 has no label"):
        classification.load({"train": tmp_path}, Hyperparameters())


def test_numbers_of_which_few_are_told_are_refused_where_one_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classification, "_FEW_NUMBERS", 5)
    numbers = [f"{n}.5" for n in range(50)]
    table = pa.table({"text": [f"text {n}" for n in range(50)], "label": numbers})
    pq.write_table(table, tmp_path / "rows.parquet")
    read = formats.read(tmp_path / "rows.parquet")
    assert classification.distinct_labels(read, "label").table.num_rows == 5
    splits = classification.load({"train": tmp_path}, Hyperparameters())
    assert splits.labels.problem == "regression"
    assert sorted([*splits.train["label"], *splits.evaluation["label"]]) == [
        n + 0.5 for n in range(50)
    ]
    numbers[40] = "many"
    pq.write_table(table.set_column(1, "label", pa.array(numbers)), tmp_path / "rows.parquet")
    with pytest.raises(
        DataError, match=r"row 0 has '0\.5' in column 'label', which is not a class"
    ):
        classification.load({"train": tmp_path}, Hyperparameters())
