"""Nothing that is unpickled runs: weights come from safetensors, or by weights_only."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from ordeal.common import ROOT, failure, tiny_model
from tests.support.jobs import Job
from tests.support.servers import RECIPE, Running
from tests.support.words import write_reviews

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
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


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


def test_a_served_model(tmp_path: Path, poisoned: Path, preloaded: Mapping[str, str]) -> None:
    poisoned.rename(tmp_path / "model")
    with Running(tmp_path, {**preloaded, **RECIPE}) as server:
        assert server.process.wait(240) == 2
        assert "cannot be served" in server.log.splitlines()[-1]
    assert not (tmp_path / "mark").exists()


def job(base: Path, model: Path, preloaded: Mapping[str, str]) -> Job:
    channels = {"train": write_reviews(base / "train.csv", 20)}
    argv = ("--model_name_or_path", str(model), "--batch_size", "8", "--save_steps", "1")
    return Job(base, channels, argv, preloaded)


def test_a_model_to_start_from(
    tmp_path: Path, poisoned: Path, preloaded: Mapping[str, str]
) -> None:
    done = job(tmp_path, poisoned, preloaded).run()
    assert done.codes == {1}
    assert "ModelError" in done.errors.strip().splitlines()[-1], done.errors[-2000:]
    assert not (tmp_path / "mark").exists()


@pytest.mark.long
def test_the_states_in_a_checkpoint(
    tmp_path: Path, model: Path, preloaded: Mapping[str, str]
) -> None:
    """The manifest is made to agree, as somebody who can write the checkpoint can do."""
    from recipe.storage import checkpoints

    training = job(tmp_path, model, preloaded).finish("--max_steps", "1")
    folder = tmp_path / "checkpoints" / "checkpoint-1"
    loaded = checkpoints.read(folder)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        aside = checkpoints.aside(tmp_path / "checkpoints", 1)
        shutil.copytree(folder, aside, ignore=shutil.ignore_patterns(checkpoints.MANIFEST))
        torch.save({"state": Payload(tmp_path / "mark")}, aside / name)
        checkpoints.publish(tmp_path / "checkpoints", 1, loaded.job, False)
        assert 0 not in training.run("--max_steps", "1").codes, name
        assert not (tmp_path / "mark").exists(), name
    assert failure(tmp_path) == ""
