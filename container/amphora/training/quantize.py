"""Implements `amphora quantize`: adds int8 to a finished model by the recipe's quantize=int8."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from amphora.common.errors import ConfigError
from amphora.training import entry_point


def quantize(model: Path, data: Path, settings: Sequence[str], environ: Mapping[str, str]) -> int:
    """Evaluate a model in float and in int8, and write its folder `int8` if that is good enough.

    Args:
        data: A file or folder of the rows that both are evaluated on.
        settings: More hyperparameters, as NAME=VALUE.

    Returns the recipe's exit code. Raises AmphoraError if an argument is invalid.
    """
    if wrong := [setting for setting in settings if "=" not in setting]:
        raise ConfigError(f"{wrong[0]!r} is not NAME=VALUE.", "Write for example max_flips=0.02.")
    for name, path in (("model", model), ("data", data)):
        if not path.exists():
            raise ConfigError(f"--{name} is {str(path)!r}, which does not exist.", "Give a path.")
    arguments = [
        f"--model_name_or_path={model.resolve()}", "--do_train=False", "--do_eval=True",
        "--quantize=int8", *(f"--{setting}" for setting in settings),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="amphora-") as scratch:
        folder = data.resolve()
        if folder.is_file():
            folder = Path(scratch) / "data"
            folder.mkdir()
            (folder / data.name).symlink_to(data.resolve())
        return subprocess.run(
            [sys.executable, str(entry_point.recipe_dir(environ) / "train.py"), *arguments],
            env={
                **environ, "SM_CHANNEL_VALIDATION": str(folder), "SM_CHANNEL_TRAIN": str(folder),
                "SAGEMAKER_BASE_DIR": scratch, "SM_MODEL_DIR": str(model.resolve()),
                "SM_OUTPUT_DATA_DIR": f"{scratch}/output",
            },
            check=False,
        ).returncode  # fmt: skip
