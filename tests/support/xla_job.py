"""Trainings on torch-xla's CPU device, in this process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Job:
    """Trainings of one job, in this process: what torch-xla compiled once it does not again."""

    def __init__(self, base: Path, model: Path, data: Path, **hyperparameters: Any) -> None:
        self.base = base
        self.environ = {"SAGEMAKER_BASE_DIR": str(base), "SM_CHANNEL_TRAIN": str(data)}
        values = {"model_id": model, "batch_size": 8, "lr": 5e-3, "logging_steps": 1}
        self.argv = [f"--{key}={value}" for key, value in {**values, **hyperparameters}.items()]

    def run(self) -> int:
        """Train; the number of graphs that were compiled for it."""
        from recipe import arguments, paths
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
        actual: dict[str, float] = json.loads((self.base / "output/data/metrics.json").read_text())
        return actual
