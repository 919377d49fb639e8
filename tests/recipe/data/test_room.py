"""What has no room on the disk, nor in memory, is refused before it is read or made tokens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import AutoTokenizer

from recipe import task_table
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
    assert finding.level == "warning" and "1.05 GB" in finding.detail
    (finding,) = preflight._room(5e8, 10**6)
    assert finding.level == "error" and "1.00 GB are free" in finding.detail
