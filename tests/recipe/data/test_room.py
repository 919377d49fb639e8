"""What has no room on the disk, nor in memory, is refused before it is read or made tokens."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from recipe import task_table
from recipe.data.files import room
from recipe.errors import OutputError
from recipe.hyperparameters import Hyperparameters
from recipe.runtime import memory
from recipe.tokenization import store
from recipe.training import preflight

_ROWS = 40_000
_TRAINED = 36_000
"""Of these, where the others are held out."""


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> Any:
    """Sets the bytes that are free on the disk, and in memory."""

    def set_(disk: float, there: float = 0) -> None:
        usage = shutil.disk_usage("/")._replace(free=int(disk))
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
        monkeypatch.setattr(memory, "available", lambda: int(there))

    return set_


def _text(n: int) -> str:
    return f"the film number {n} was seen by many and liked by some of them"


def _csv(folder: Path) -> Path:
    path = folder / "rows.csv"
    path.write_text("text,label\n" + "".join(f"{_text(n)},{n % 2}\n" for n in range(_ROWS)))
    return path


def test_rows_without_room_are_refused_and_what_is_uncertain_is_told(
    tmp_path: Path, free: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _csv(tmp_path)
    size = path.stat().st_size
    notes: list[str] = []
    free(0.1 * size, 0.1 * size)
    with pytest.raises(OutputError) as caught:
        room.check([path], notes)
    said = str(caught.value)
    assert "0.00 GB free" in said and "IterableDataset" in said and "HF_DATASETS_CACHE" in said
    with pytest.raises(OutputError):
        task_table.load("text-classification")(
            {"train": path}, Hyperparameters(task="text-classification")
        )
    assert not notes
    free(0.2 * size, 0.5 * size)
    room.check([path], notes)
    assert len(notes) == 1 and "it may end for want of room" in notes[0]
    free(0.5 * size, 1.5 * size)
    room.check([path], notes)
    assert len(notes) == 1
    # Each of sixteen processes has its own rows.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    with pytest.raises(OutputError, match="once for each of 16 processes"):
        room.check([path], notes)


def test_files_whose_rows_take_less_than_their_bytes_are_not_refused(
    tmp_path: Path, free: Any
) -> None:
    notes: list[str] = []
    sparse = tmp_path / "sparse.jsonl"
    empty = {f"a long name of a column that is seldom there {n}": None for n in range(20)}
    lines = [json.dumps({"text": f"row {n}", "label": n % 2, **empty}) for n in range(5_000)]
    sparse.write_text("\n".join(lines))
    free(0.05 * sparse.stat().st_size, 0.05 * sparse.stat().st_size)
    room.check([sparse], notes)
    assert not notes
    plain = _csv(tmp_path)
    packed = tmp_path / "packed.csv.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    free(packed.stat().st_size, packed.stat().st_size)
    room.check([packed], notes)
    table = pa.table({"text": [_text(n) for n in range(_ROWS)]})
    with pa.ipc.new_file(tmp_path / "rows.arrow", table.schema) as writer:
        writer.write_table(table)
    free(1, 1)
    room.check([tmp_path / "rows.arrow"], notes)  # mapped as it lies
    assert not notes
    # Of texts that are often the same the file is small, and the rows are not.
    pq.write_table(
        pa.table({"text": ["a text of some words " * 20] * 200_000}), tmp_path / "a.parquet"
    )
    free(1e6, 1e6)
    with pytest.raises(OutputError):
        room.check([tmp_path / "a.parquet"], notes)


def _task(path: Path, **more: Any) -> tuple[Any, Hyperparameters]:
    job = Hyperparameters(task="text-classification", **more)
    return task_table.load(job.task)({"train": path}, job), job


def test_tokens_without_room_are_refused_after_the_first(
    tmp_path: Path, tiny_model: Path, free: Any, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, _ = _task(_csv(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    monkeypatch.setattr(store, "_LOOKED_AT", 100_000)
    free(200_000)
    with pytest.raises(OutputError, match=rf"The tokens of {_TRAINED} rows take some"):
        task.samples(tokenizer, 32)
    assert not [path for path in (own_cache / "tokens").iterdir() if path.is_dir()]
    whole = 4 * 15 * _TRAINED
    free(whole // 2)  # of which the rows to come may take less
    assert len(task.samples(tokenizer, 32)["train"]) == _TRAINED
    free(0)
    assert len(task.samples(tokenizer, 32)["train"]) == _TRAINED, "they are kept"


def test_the_doctor_tells(free: Any) -> None:
    free(1e9)
    assert not list(preflight._room(1e8, 10**6))
    (finding,) = preflight._room(2.6e8, 10**6)
    assert finding.level == "warning" and "some 1.05 GB" in finding.detail
    (finding,) = preflight._room(5e8, 10**6)
    assert finding.level == "error" and "1.00 GB are free" in finding.detail


def test_looking_for_room_writes_nothing(tmp_path: Path, free: Any, own_cache: Path) -> None:
    # The doctor may look at read-only inputs on a read-only disk.
    path = _csv(tmp_path)
    room.check([path], [])
    free(1000)
    with pytest.raises(OutputError):
        room.check([path], [])
    assert next(preflight._room(1e6, 9)).what == "disk"
    assert not own_cache.exists()
