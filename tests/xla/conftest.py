"""Trainings on torch-xla's CPU device. `make test-xla` runs them, with PJRT_DEVICE=CPU."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.recipe.conftest import CODE, reviews

__all__ = ["CODE", "reviews"]
Reviews = Callable[[int], list[tuple[str, str]]]


@pytest.fixture(scope="session")
def still_model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The tiny model without dropout."""
    folder = tmp_path_factory.mktemp("still") / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def write_data(tmp_path_factory: pytest.TempPathFactory, reviews: Reviews) -> Callable[..., Path]:
    """A function of a number of rows, and how long they are, to a channel's folder."""

    def write(count: int, times: int = 1) -> Path:
        folder = tmp_path_factory.mktemp("data")
        rows = [
            {"text": " ".join([text] * times), "label": label} for text, label in reviews(count)
        ]
        (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return folder

    return write


class Job:
    """Trainings of one job, in this process: what torch-xla compiled once it does not again."""

    def __init__(self, base: Path, model: Path, data: Path, **hyperparameters: Any) -> None:
        self.base = base
        self.environ = {"SAGEMAKER_BASE_DIR": str(base), "SM_CHANNEL_TRAIN": str(data)}
        values = {"model_id": model, "batch_size": 8, "lr": 5e-3, "logging_steps": 1}
        self.argv = [f"--{key}={value}" for key, value in {**values, **hyperparameters}.items()]

    def run(self) -> int:
        """Train; the number of graphs that were compiled for it."""
        from recipe import hyperparameters as arguments
        from recipe import paths
        from recipe.runtime import xla
        from recipe.training import run

        before, _ = xla.compiled()
        where = paths.from_environment({**os.environ, **self.environ})
        run.run(arguments.parse(self.argv), where, {**os.environ, **self.environ})
        return xla.compiled()[0] - before

    @property
    def weights(self) -> dict[str, Any]:
        from safetensors.torch import load_file

        return load_file(self.base / "model" / "model.safetensors")

    @property
    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = json.loads((self.base / "output/data/metrics.json").read_text())
        return found
