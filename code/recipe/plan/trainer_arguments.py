"""The arguments of transformers.Trainer that follow from hyperparameters and device."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import TrainingArguments, get_scheduler

from recipe.errors import HyperparameterError
from recipe.hyperparameters import Hyperparameters
from recipe.metrics import LOWER_IS_BETTER
from recipe.paths import Folders
from recipe.plan.table import Table
from recipe.reports import tracking
from recipe.runtime import device
from recipe.runtime.device import Device
from recipe.runtime.distribution import Distribution
from recipe.tasks.base import WARNING, Finding

_WITHOUT_WARMUP = ("constant", "reduce_lr_on_plateau", "greedy")
"""Schedules for which transformers ignores warmup_steps."""
_LOGGING_STEPS = 0.05


def make(
    hyperparameters: Hyperparameters, folders: Folders, chosen: Device, shared: Distribution
) -> TrainingArguments:
    """Return the Trainer's arguments: the recipe's defaults, overridden by the user's values.

    The learning rate is set later, since its default depends on the task.

    Raises:
        HyperparameterError: The Trainer refuses a value or a combination of values.
    """
    on_cpu = chosen.kind == "cpu"
    # The Trainer creates its folder even if it saves nothing.
    unused = tempfile.gettempdir() if hyperparameters.passed.get("save_strategy") == "no" else None
    kind = device.kind_of(chosen.kind)
    steps = hyperparameters.warmup_steps
    is_share = steps < 1 and steps != 0
    # transformers 4 has another argument for a share of all steps.
    is_older = transformers.__version__.startswith("4.")
    warmup = "warmup_ratio" if is_share and is_older else "warmup_steps"
    # The Trainer recognises only losses as lower-is-better; None leaves it the decision.
    metric = str(hyperparameters.passed.get("metric_for_best_model"))
    is_greater_better = False if metric.endswith(LOWER_IS_BETTER[1:]) else None
    stops_early = hyperparameters.early_stopping_patience is not None
    values: dict[str, Any] = {
        "output_dir": hyperparameters.output_dir or unused or str(folders.checkpoints),
        "num_train_epochs": hyperparameters.num_train_epochs,
        "max_steps": hyperparameters.max_train_steps or -1,
        "per_device_train_batch_size": hyperparameters.per_device_train_batch_size,
        "per_device_eval_batch_size": hyperparameters.per_device_eval_batch_size,
        warmup: steps if is_share else int(steps),
        "weight_decay": hyperparameters.weight_decay,
        "seed": hyperparameters.seed,
        "save_total_limit": hyperparameters.save_total_limit,
        "bf16": chosen.bf16,
        "use_cpu": on_cpu,
        # Without use_cpu and the backend, processes on a CPU silently train separate models.
        "ddp_backend": "gloo" if on_cpu and chosen.processes > 1 else None,
        "optim": "adamw_torch_fused" if kind.has_fused_optimizer else "adamw_torch",
        "dataloader_pin_memory": kind.pins_memory,
        # Every parameter gets a gradient in every step.
        "ddp_find_unused_parameters": False,
        # The filter synchronizes with the device in each step, to replace NaN losses.
        "logging_nan_inf_filter": False,
        "do_train": hyperparameters.trains,
        "do_eval": hyperparameters.evaluates,
        **_intervals(hyperparameters),
        # Early stopping counts evaluations.
        "restore_callback_states_from_checkpoint": True,
        "logging_steps": _LOGGING_STEPS,
        "load_best_model_at_end": stops_early,
        "metric_for_best_model": "loss" if stops_early else None,
        "greater_is_better": is_greater_better,
        "disable_tqdm": True,
        "run_name": tracking.job_name(),
        **hyperparameters.passed,
        **shared.arguments,
        "report_to": tracking.names(hyperparameters.passed.get("report_to")),
    }
    _check_best(values, stops_early)
    try:
        arguments = TrainingArguments(**values)
    except ValueError as error:
        raise HyperparameterError(f"The hyperparameters do not fit together: {error}") from error
    _check_schedule(arguments)
    return arguments


def _intervals(hyperparameters: Hyperparameters) -> dict[str, Any]:
    """Return when to evaluate and save by default: after each epoch, or by the steps that are
    given. Weights of which the best are kept are saved when they are evaluated."""
    passed = hyperparameters.passed
    usual = "steps" if "eval_steps" in passed else "epoch"
    evaluations = passed.get("eval_strategy", usual if hyperparameters.evaluates else "no")
    evaluations = name_of(evaluations)
    keeps_best = passed.get(
        "load_best_model_at_end", hyperparameters.early_stopping_patience is not None
    )
    is_by_steps = "save_steps" in passed or (keeps_best and evaluations == "steps")
    saves = name_of(passed.get("save_strategy", "steps" if is_by_steps else "epoch"))
    values: dict[str, Any] = {"eval_strategy": evaluations, "save_strategy": saves}
    if keeps_best and evaluations == saves == "steps":
        # The Trainer's default of eval_steps is logging_steps.
        by_logs = passed.get("logging_steps", _LOGGING_STEPS)
        values["save_steps"] = passed.get("eval_steps", by_logs)
    return values


def _check_best(values: Mapping[str, Any], stops_early: bool) -> None:
    """Raise HyperparameterError if the best weights cannot be determined or kept."""
    evaluations, saves = name_of(values["eval_strategy"]), name_of(values["save_strategy"])
    keeps_best = values["load_best_model_at_end"]
    name = "early_stopping_patience" if stops_early else "load_best_model_at_end"
    if evaluations == "no" and (stops_early or keeps_best):
        raise HyperparameterError(
            f"Hyperparameter {name} needs evaluations during training, and there are none.",
            f"Give eval_strategy=epoch, or leave {name} out.",
        )
    if keeps_best and saves not in (evaluations, "best"):
        raise HyperparameterError(
            f"Hyperparameter {name} keeps the checkpoint of the best evaluation, but eval_strategy "
            f"is {evaluations} and save_strategy is {saves}.",
            "Give both the same value; with steps, save_steps a multiple of eval_steps.",
        )


def _check_schedule(arguments: TrainingArguments) -> None:
    """Raise HyperparameterError if the learning rate's schedule lacks a value or does not know
    one."""
    given: Any = arguments.lr_scheduler_kwargs or {}
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    kind: Any = arguments.lr_scheduler_type
    try:
        get_scheduler(kind, optimizer, 1, 1_000_000, scheduler_specific_kwargs=dict(given))
    except (TypeError, ValueError) as error:
        raise HyperparameterError(
            f"Hyperparameter lr_scheduler_kwargs has value {given}, but lr_scheduler_type is "
            f"{name_of(kind)}: {error}.",
            "Give the values that this schedule takes.",
        ) from error


def changed(arguments: TrainingArguments, **values: Any) -> TrainingArguments:
    """Return a copy with other values: a job makes arguments once, with its process group."""
    copied = copy.copy(arguments)
    for name, value in values.items():
        setattr(copied, name, value)
    return copied


def count_steps(arguments: TrainingArguments, steps: int) -> int:
    """Return the optimizer steps of a training whose epochs have `steps` of them."""
    most = arguments.max_steps
    return most if most > 0 else math.ceil(steps * arguments.num_train_epochs)


def describe_steps(arguments: TrainingArguments, steps: int, samples: int) -> str:
    """Describe the steps of an epoch and of the training, of so many samples each."""
    whole = count_steps(arguments, steps)
    return f"{steps} an epoch, {whole} in all, {samples} samples a step"


def fitted_warmup(arguments: TrainingArguments, steps: int, table: Table) -> dict[str, Any]:
    """Return the arguments that turn off the warm-up of a training of one step, whose learning rate
    would be 0. A warm-up that takes all steps is reported.

    Args:
        steps: Optimizer steps of an epoch.
    """
    whole = count_steps(arguments, steps)
    warmup = arguments.get_warmup_steps(whole)
    is_used = arguments.do_train and name_of(arguments.lr_scheduler_type) not in _WITHOUT_WARMUP
    if not is_used or warmup < whole:
        return {}
    if whole == 1:
        table.add("steps", "no warm-up: the learning rate of the only step would be 0")
        return {"warmup_steps": 0, "warmup_ratio": 0.0}
    share = (whole - 1) / warmup
    detail = f"the learning rate reaches {share:.2g} of its peak: warm-up takes {warmup} steps"
    table.append(Finding(level=WARNING, what="steps", detail=detail))
    return {}


def schedule(arguments: TrainingArguments) -> str:
    """Describe optimizer, schedule and warm-up."""
    optimizer, kind = name_of(arguments.optim), name_of(arguments.lr_scheduler_type)
    steps = arguments.warmup_steps or getattr(arguments, "warmup_ratio", None) or 0
    if not steps or kind in _WITHOUT_WARMUP:
        return f"{optimizer}, {kind}, no warm-up"
    return f"{optimizer}, {kind}, warm-up for {_steps(steps)}"


def checkpoint_policy(arguments: TrainingArguments, given: Hyperparameters) -> str:
    """Describe when checkpoints are saved, where, and how many are kept."""
    strategy = name_of(arguments.save_strategy)
    if strategy == "no":
        return "none"
    when = "after an evaluation that is the best so far"
    if strategy in ("steps", "epoch"):
        interval = _steps(arguments.save_steps)
        when = f"every {interval}" if strategy == "steps" else "every epoch"
    age = given.save_minutes
    aged = f", and if the last one is {age:g} minutes old" if age is not None else ""
    limit = arguments.save_total_limit
    kept = f"the newest {limit} are kept" if limit else "all are kept"
    return f"{when}{aged}, in {arguments.output_dir}; {kept}"


def _steps(count: float) -> str:
    return f"{100 * count:g}% of all steps" if count < 1 else f"{count:g} steps"


def name_of(choice: Any) -> str:
    """Return the value of one of transformers' enumerations, which may already be a string."""
    return str(getattr(choice, "value", choice))
