"""A training by the recipe in this process, timed, for the benchmarks beside it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "code"))


def cpu_seconds(argv: list[str], folder: Path, **channels: Path) -> float:
    """The CPU-seconds of the training alone, without what comes before and after it.

    Args:
        argv: Hyperparameters.
        folder: Holds `data`, the training channel; `model`, `output` ... are written there.
        channels: Other channels.
    """
    from recipe import arguments
    from recipe.paths import Folders
    from recipe.training import run
    from recipe.training.engine import Engine

    seconds = []
    usual = Engine.run

    def timed(engine: Engine) -> dict[str, float]:
        start = time.process_time()
        metrics = usual(engine)
        seconds.append(time.process_time() - start)
        return metrics

    Engine.run = timed  # type: ignore[method-assign]
    folders = Folders(
        channels={"train": folder / "data", **channels},
        model_dir=folder / "model",
        output_data_dir=folder / "output",
        checkpoints=folder / "checkpoints",
        tensorboard=folder / "tensorboard",
    )
    run.run(arguments.parse(argv, folders), folders, dict(os.environ))
    return seconds[0]
