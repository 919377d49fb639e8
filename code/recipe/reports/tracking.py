"""Configure trackers: TensorBoard, MLflow, Weights & Biases and others of HF Trainer."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers.integrations import integration_utils

from recipe.console import is_first_process, say
from recipe.errors import HyperparameterError
from recipe.paths import Folders

MLFLOW = "mlflow"


def names(requested: str | None) -> list[str]:
    """Return the names in report_to: one, several with commas, or a JSON list.

    Raises:
        HyperparameterError: The Trainer has no such integration, or wandb has no key.
    """
    listed = [name for name in re.findall(r"[\w-]+", requested or "none") if name != "none"]
    try:
        known: Any = integration_utils.get_reporting_integration_callbacks
        known([name for name in listed if name != "all"])
    except ValueError as error:
        raise HyperparameterError(
            f"Hyperparameter report_to has value {requested!r}: {error}"
        ) from error
    mode = os.environ.get("WANDB_MODE", "online")
    if "wandb" in listed and mode == "online" and not os.environ.get("WANDB_API_KEY"):
        raise HyperparameterError(
            "Hyperparameter report_to has value 'wandb', and WANDB_API_KEY is not set. Set it in "
            "the job's environment, or WANDB_MODE=offline to keep the run in output/data/wandb."
        )
    return listed


def set_default_folders(folders: Folders) -> None:
    """Set default folders of TensorBoard, MLflow and wandb, unless the environment sets them."""
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(folders.tensorboard))
    os.environ.setdefault("WANDB_DIR", str(folders.output_data_dir))
    # Otherwise wandb uploads the command line, which may contain a token.
    os.environ.setdefault("WANDB_X_DISABLE_META", "true")
    os.environ.setdefault(
        "MLFLOW_TRACKING_URI", (folders.output_data_dir / MLFLOW).absolute().as_uri()
    )
    # MLflow 3 refuses a folder without it; other stores need further packages.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")


@contextlib.contextmanager
def run(trackers: Sequence[str], parameters: Mapping[str, str]) -> Iterator[None]:
    """Open an MLflow run, if requested, from before training to after the last evaluation.

    The Trainer's own run ends with training, and each later evaluation starts another one.
    The run has the parameters; its status is FINISHED, FAILED, or KILLED after a stop.
    """
    if MLFLOW not in trackers or not is_first_process():
        yield
        return
    import mlflow  # takes seconds

    mlflow.start_run()
    mlflow.log_params({f"recipe.{name}": value for name, value in parameters.items()})
    status = "FAILED"
    try:
        yield
        status = "FINISHED"
    except SystemExit:
        status = "KILLED"
        raise
    finally:
        try:
            mlflow.flush_async_logging()
            mlflow.end_run(status)
        except Exception as error:  # the trained model matters more than the tracker
            say(f"warning: the MLflow run could not be ended: {error}")
