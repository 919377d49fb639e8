"""Nothing that is unpickled runs: weights come from safetensors, or by weights_only."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ordeal.common import ROOT, clean_environ, failure, make_model, start, write_reviews

pytestmark = pytest.mark.heavy
sys.path.insert(0, str(ROOT / "code"))


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def poisoned(tmp_path: Path, model: Path) -> Path:
    """The model, its weights a pickle in place of safetensors."""
    folder = tmp_path / "poisoned"
    shutil.copytree(model, folder)
    (folder / "model.safetensors").unlink()
    torch.save({"weights": Payload(tmp_path / "mark")}, folder / "pytorch_model.bin")
    return folder


def test_the_payload_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "mark")))
    assert (tmp_path / "mark").exists()


def test_a_served_model(tmp_path: Path, poisoned: Path) -> None:
    poisoned.rename(tmp_path / "model")
    log = tmp_path / "log"
    assert start(tmp_path, "serve", log).wait(240) == 2
    assert "cannot be served" in log.read_text().splitlines()[-1]
    assert not (tmp_path / "mark").exists()


def train(base: Path, data: Path, model: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "code" / "train.py"), "--model_name_or_path", str(model)]
    command += ["--batch_size", "8", "--save_steps", "1", *more]
    environ = {"SAGEMAKER_BASE_DIR": str(base), "SM_CHANNEL_TRAIN": str(data)}
    environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, env=clean_environ(**environ), capture_output=True, text=True, timeout=120
    )


def test_a_model_to_start_from(tmp_path: Path, poisoned: Path) -> None:
    done = train(tmp_path, write_reviews(tmp_path / "train.csv", 20), poisoned)
    assert done.returncode == 1
    assert "ModelError" in done.stderr.strip().splitlines()[-1], done.stderr[-2000:]
    assert not (tmp_path / "mark").exists()


@pytest.mark.long
def test_the_states_in_a_checkpoint(tmp_path: Path, model: Path) -> None:
    """The manifest is made to agree, as somebody who can write the checkpoint can do."""
    from recipe.storage import checkpoints

    data = write_reviews(tmp_path / "train.csv", 20)
    assert train(tmp_path, data, model, "--max_steps", "1").returncode == 0
    folder = tmp_path / "checkpoints" / "checkpoint-1"
    loaded = checkpoints.read(folder)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        aside = checkpoints.aside(tmp_path / "checkpoints", 1)
        shutil.copytree(folder, aside, ignore=shutil.ignore_patterns(checkpoints.MANIFEST))
        torch.save({"state": Payload(tmp_path / "mark")}, aside / name)
        checkpoints.publish(tmp_path / "checkpoints", 1, loaded.job, False)
        done = train(tmp_path, data, model, "--max_steps", "1")
        assert done.returncode != 0, name
        assert not (tmp_path / "mark").exists(), name
    assert failure(tmp_path) == ""
