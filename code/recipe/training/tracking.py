"""Where a run's metrics go beside its log: TensorBoard, MLflow, Weights & Biases, or what else the
Trainer knows."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from transformers.integrations import integration_utils

from recipe.console import is_first_process, say
from recipe.errors import HyperparameterError
from recipe.hyperparameters import Hyperparameters
from recipe.paths import Places
from recipe.reports.model_card import shown

MLFLOW = "mlflow"


def names(requested: str | None) -> list[str]:
    """The names in the hyperparameter report_to: one, several between commas, or a JSON list.

    Raises:
        HyperparameterError: the Trainer knows no such integration, or wandb has no key.
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


def set_places(places: Places) -> None:
    """Where TensorBoard, MLflow and wandb write where nothing else is set; what is set stays."""
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(places.tensorboard))
    os.environ.setdefault("WANDB_DIR", str(places.output_data_dir))
    # It would send the command line, in which a token may stand.
    os.environ.setdefault("WANDB_X_DISABLE_META", "true")
    os.environ.setdefault(
        "MLFLOW_TRACKING_URI", (places.output_data_dir / MLFLOW).absolute().as_uri()
    )
    # MLflow 3 wants to be asked for a folder, its only store that needs no other package.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")


@contextlib.contextmanager
def run(trackers: Sequence[str], hyperparameters: Hyperparameters) -> Iterator[None]:
    """An MLflow run, if asked for, from before training to after the last evaluation.

    The Trainer's own would end with training, and another begin with each evaluation after it.
    It has the hyperparameters without secrets, and ends as FINISHED, FAILED, or KILLED by a stop.
    """
    if MLFLOW not in trackers or not is_first_process():
        yield
        return
    import mlflow  # takes seconds

    mlflow.start_run()
    mlflow.log_params({f"recipe.{name}": value for name, value in shown(hyperparameters).items()})
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
        except Exception as error:  # the model is trained, whatever becomes of the server
            say(f"warning: MLflow's run has no end: {error}")
