"""Which task a job is for, where nobody says it: told by its hyperparameters, data and model."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from recipe import task_table
from recipe.data.columns import check_choices, check_named
from recipe.data.evidence import Evidence, Recognised
from recipe.data.files import head
from recipe.data.files.part import Part
from recipe.data.layout import channels as layout
from recipe.errors import DataError, HyperparameterError, RecipeError
from recipe.hyperparameters import Hyperparameters, all_tasks_of
from recipe.models import loading
from recipe.task_table import CLASSIFICATION, TASKS
from recipe.tasks import judging

_FILES = 3


def find(
    hyperparameters: Hyperparameters, channels: Mapping[str, Path]
) -> tuple[Hyperparameters, str]:
    """The hyperparameters with a task and a learning rate, and in a line which they are and why.

    The learning rate is the task's own where none is given.

    Raises:
        HyperparameterError: several tasks can be meant; it lists them with their reasons.
    """
    hyperparameters, why = _with_task(hyperparameters, channels)
    if hyperparameters.learning_rate is not None or not hyperparameters.trains:
        return hyperparameters, why
    adapts = hyperparameters.lora_r is not None
    rate = task_table.learning_rate(hyperparameters.task, adapts)
    of_what = "with LoRA" if adapts else "for all weights"
    why += f"; learning_rate {rate:g}, its default {of_what}"
    return dataclasses.replace(hyperparameters, learning_rate=rate), why


def _with_task(
    hyperparameters: Hyperparameters, channels: Mapping[str, Path]
) -> tuple[Hyperparameters, str]:
    """The hyperparameters with a task, and which it is and why.

    A task that is named is taken. Else the only one that takes all that is given, or whose data
    this certainly is. Data that no other task reads is text classification's to read or to refuse.
    """
    if hyperparameters.task is not None:
        return hyperparameters, f"{hyperparameters.task} (as given)"
    asked_by = hyperparameters.of_tasks
    possible = all_tasks_of(asked_by)
    if len(possible) == 1:
        (task,) = possible
        own = [name for name, tasks in asked_by.items() if list(tasks) == [task]]
        reason = f"only this task takes {' and '.join(own or asked_by)}"
        return dataclasses.replace(hyperparameters, task=task), f"{task} ({reason})"
    recognised = _recognised(possible, hyperparameters, channels)
    certain = [task for task, each in recognised.items() if each.certain]
    if len(certain) == 1:
        (task,) = certain
        others = [f"{name} ({each.reason})" for name, each in recognised.items() if name != task]
        reason = recognised[task].reason
        reason += f"; the data may be for {' or '.join(others)}, too" if others else ""
    elif CLASSIFICATION in possible and recognised.keys() <= {CLASSIFICATION}:
        task, reason = CLASSIFICATION, "the default"
    elif recognised:
        candidates = [
            f"\n- {name}: {each.reason}. {each.remedy or f'Give task={name}.'}"
            for name, each in recognised.items()
        ]
        raise HyperparameterError(
            "Hyperparameter task is not given, and the data does not say which it is for:"
            + "".join(candidates)
        )
    else:
        raise HyperparameterError(
            "Hyperparameter task is not given, and the data is of none of those that take "
            f"{' and '.join(asked_by)}.",
            f"Give task={' or task='.join(possible)}.",
        )
    return dataclasses.replace(
        hyperparameters, task=task
    ), f"{task} ({reason}; set task to choose another)"


def _recognised(
    possible: Sequence[str], hyperparameters: Hyperparameters, channels: Mapping[str, Path]
) -> dict[str, Recognised]:
    evidence = Evidence(
        channels=channels,
        hyperparameters=hyperparameters,
        part=_first_rows(hyperparameters, channels),
        read_model=functools.partial(_configuration, hyperparameters, channels),
    )
    if evidence.part is not None:
        check_named(evidence.part, hyperparameters)
    recognised: dict[str, Recognised] = {}
    for task in possible:
        if (named := TASKS[task].recognised_by) is not None:
            module, _, function = named.partition(":")
            recognise = getattr(
                importlib.import_module(f"recipe.{module}"), function or "recognise"
            )
            if (each := recognise(evidence)) is not None:
                recognised[task] = each
    if evidence.part is not None and not any(each.certain for each in recognised.values()):
        check_choices(evidence.part)
    return recognised


def _first_rows(hyperparameters: Hyperparameters, channels: Mapping[str, Path]) -> Part | None:
    try:
        places = layout.find(
            judging.channels(channels, hyperparameters), hyperparameters.dataset_config_name
        )
    except DataError:
        return None  # what reads all of it says what is wrong
    parts = (head.read(path) for path in places.files["train"][:_FILES])
    return next((part for part in parts if part is not None), None)


def _configuration(
    hyperparameters: Hyperparameters, channels: Mapping[str, Path]
) -> Mapping[str, Any]:
    """The model's config.json; empty where it cannot be read, as what loads the model says why."""
    try:
        source = loading.find(hyperparameters.model_name_or_path, channels)
        options = {"token": hyperparameters.hf_token} if hyperparameters.hf_token else {}
        config, _ = PretrainedConfig.get_config_dict(source.name, **options)
    except (RecipeError, OSError, ValueError):
        return {}
    return dict(config)
