"""A disk without room for rows or tokens, really mounted: an error says so, and nothing half is
left."""

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from recipe.data.files import spool
from recipe.errors import OutputError
from recipe.tokenization import store
from tests.support.mounts import Mount


def two_of_each(batch: Any, rows: range) -> dict[str, store.Column]:
    return {"ids": np.ones(2 * len(rows), np.int32), store.LENGTHS: np.full(len(rows), 2)}


@pytest.fixture
def small_disk(tmpfs: Mount) -> Path:
    """A folder with room for 200 kB."""
    return tmpfs("small", 200)


def test_a_store_without_room_is_an_error_and_nothing_of_it_stays(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", small_disk)
    split = datasets.Dataset.from_dict({"text": ["word"] * 20_000})

    with pytest.raises(OutputError, match=r"tokens of 20000 rows .* HF_DATASETS_CACHE"):
        store.tokens_of(split, "abc", two_of_each)
    assert list((small_disk / "tokens").iterdir()) == []
    few = store.tokens_of(split.select(range(100)), "abc", two_of_each)
    assert len(few["ids"]) == 200 and few[store.STARTS].tolist() == list(range(0, 201, 2))


@pytest.mark.parametrize("rows", [1_000, 11_000, 60_000])
def test_rows_without_room_are_an_error_and_leave_no_file(
    rows: int, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full at once, at the file's end, or with the next rows."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", small_disk)
    monkeypatch.setattr(spool, "_IN_MEMORY", 1)
    monkeypatch.setattr(spool, "_SPARE", -(1 << 40))
    if rows == 1_000:
        (small_disk / "other").write_bytes(bytes(190_000))

    table = pa.table({"text": ["x" * 10] * rows})
    with pytest.raises(OutputError, match=r"rows of the data .* HF_DATASETS_CACHE"):
        spool.spooled(table.schema, [table, table])
    assert list(small_disk.glob("*.rows")) == []
