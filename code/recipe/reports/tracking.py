"""Configure trackers: TensorBoard, MLflow, Weights & Biases and others of HF Trainer."""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.integrations import integration_utils
from transformers.trainer_utils import SaveStrategy

from recipe.console import is_first_process, say
from recipe.errors import HyperparameterError
from recipe.paths import Folders
from recipe.storage import checkpoints

MLFLOW, WANDB = "mlflow", "wandb"
_IDS = "tracking.json"
"""The file of the checkpoints folder with the ids of the job's runs, by tracker."""


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


def job_name() -> str | None:
    """Return the name of the training job, by which its runs are named unless run_name is given."""
    return os.environ.get("TRAINING_JOB_NAME") or None


def set_default_folders(folders: Folders) -> None:
    """Set default folders of TensorBoard, MLflow and wandb, unless the environment sets them."""
    # TensorBoard names a run by its folder.
    tensorboard = folders.tensorboard / (job_name() or "")
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(tensorboard))
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
def run(arguments: TrainingArguments, parameters: Mapping[str, str]) -> Iterator[None]:
    """Open the runs of MLflow and wandb, or continue those of the job that training resumes.

    MLflow's is open from before training to after the last evaluation: the Trainer's own run ends
    with training, and each later evaluation starts another one. It has the parameters; its status
    is FINISHED, FAILED, or KILLED after a stop.

    Raises:
        HyperparameterError: MLflow's store cannot be used.
    """
    trackers = set(arguments.report_to or ()) & {MLFLOW, WANDB}
    if not trackers or not is_first_process():
        yield
        return
    file, ids = Path(str(arguments.output_dir)) / _IDS, {}
    if arguments.do_train and checkpoints.requested(arguments.resume_from_checkpoint):
        with contextlib.suppress(OSError, ValueError, TypeError):
            ids = dict(json.loads(file.read_text()))
    if WANDB in trackers:
        ids[WANDB] = os.environ.setdefault("WANDB_RUN_ID", ids.get(WANDB) or uuid.uuid4().hex)
        os.environ.setdefault("WANDB_RESUME", "allow")
    if MLFLOW in trackers:
        ids[MLFLOW] = _start_mlflow(ids.get(MLFLOW), arguments.run_name, parameters)
    if arguments.do_train and arguments.save_strategy != SaveStrategy.NO:
        file.write_text(json.dumps(ids))
    status = "FAILED"
    try:
        yield
        status = "FINISHED"
    except SystemExit:
        status = "KILLED"
        raise
    finally:
        if MLFLOW in trackers:
            _end_mlflow(status)


def _start_mlflow(known: str | None, name: str | None, parameters: Mapping[str, str]) -> str:
    """Continue the run with a known id, or start one; return its id."""
    import mlflow  # takes seconds
    from mlflow.exceptions import MlflowException

    # The Trainer would start a second run for the variable.
    known = os.environ.pop("MLFLOW_RUN_ID", None) or known
    try:
        try:
            active = mlflow.start_run(run_id=known, run_name=name)
        except MlflowException:
            if known is None:
                raise
            # A store in output/data is left behind on the former instance.
            say(f"MLflow's store has no run {known}: this job's second part is a new run")
            active, known = mlflow.start_run(run_name=name), None
        # MLflow refuses other values of a parameter, and then loses the metrics sent with them.
        logged = active.data.params
        new = {f"recipe.{key}": value for key, value in parameters.items()}
        mlflow.log_params({key: value for key, value in new.items() if key not in logged})
        if logged:
            os.environ["MLFLOW_MAX_LOG_PARAMS"] = "0"
    except Exception as error:
        raise HyperparameterError(
            f"Hyperparameter report_to names mlflow, whose store cannot be used: {error}",
            "Set MLFLOW_TRACKING_URI to a server (https://...), the ARN of SageMaker's, or a folder"
            " (file:///...); databases need the whole mlflow package. Or leave mlflow out.",
        ) from error
    run_id: str = active.info.run_id
    return run_id


def _end_mlflow(status: str) -> None:
    import mlflow

    try:
        mlflow.flush_async_logging()
        mlflow.end_run(status)
    except Exception as error:  # the trained model matters more than the tracker
        say(f"warning: the MLflow run could not be ended: {error}")
