"""Detect the task of a job by its hyperparameters, data and model."""

from __future__ import annotations

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
from recipe.models import pretrained
from recipe.task_table import CLASSIFICATION, TASKS
from recipe.tasks import judging

_FILES = 3


def find(hyperparameters: Hyperparameters, channels: Mapping[str, Path]) -> tuple[str, str]:
    """Return the job's task and the reason.

    The hyperparameter task decides; otherwise the only task that takes all hyperparameters, or that
    recognises the data for certain. Text classification reads, or refuses, data that no other task
    recognises.

    Raises:
        HyperparameterError: Several tasks are possible; the message lists them with their reasons.
        DataError: Hyperparameters name columns that do not exist.
    """
    if hyperparameters.task is not None:
        return hyperparameters.task, "as given"
    of_tasks = hyperparameters.of_tasks
    possible = all_tasks_of(of_tasks)
    if len(possible) == 1:
        alone = [name for name, tasks in of_tasks.items() if list(tasks) == possible]
        return possible[0], f"only this task takes {' and '.join(alone or of_tasks)}"
    recognised = _recognised(possible, hyperparameters, channels)
    certain = [task for task, found in recognised.items() if found.certain]
    if len(certain) == 1:
        (task,) = certain
        reason = recognised[task].reason
        others = [f"{name} ({found.reason})" for name, found in recognised.items() if name != task]
        reason += f"; the data may be for {' or '.join(others)}, too" if others else ""
    elif CLASSIFICATION in possible and recognised.keys() <= {CLASSIFICATION}:
        task, reason = CLASSIFICATION, "the default"
    elif recognised:
        candidates = [
            f"\n- {name}: {found.reason}. {found.remedy or f'Give task={name}.'}"
            for name, found in recognised.items()
        ]
        raise HyperparameterError(
            "Hyperparameter task is not given, and the data fits several tasks:"
            + "".join(candidates)
        )
    else:
        raise HyperparameterError(
            "Hyperparameter task is not given, and the data fits none of the tasks that take "
            f"{' and '.join(of_tasks)}.",
            f"Give task={' or task='.join(possible)}.",
        )
    return task, f"{reason}; set task to choose another"


def _recognised(
    possible: Sequence[str], hyperparameters: Hyperparameters, channels: Mapping[str, Path]
) -> dict[str, Recognised]:
    """Return the tasks that recognise the first rows of the training data, with their reasons."""
    evidence = Evidence(
        channels=channels,
        settings=hyperparameters,
        part=_first_rows(hyperparameters, channels),
        config=_configuration(hyperparameters, channels),
    )
    if evidence.part is not None:
        check_named(evidence.part, hyperparameters)
    recognised: dict[str, Recognised] = {}
    for task in possible:
        place = TASKS[task].recognised_by
        found = None if place is None else task_table.resolve(place)(evidence)
        if found is not None:
            recognised[task] = found
    if evidence.part is not None and not any(found.certain for found in recognised.values()):
        check_choices(evidence.part)
    return recognised


def _first_rows(hyperparameters: Hyperparameters, channels: Mapping[str, Path]) -> Part | None:
    try:
        data = judging.channels(channels, hyperparameters.trains)
        places = layout.find(data, hyperparameters.dataset_config_name)
    except DataError:
        return None  # loading the data raises it again
    parts = (head.read(path) for path in places.files["train"][:_FILES])
    return next((part for part in parts if part is not None), None)


def _configuration(
    hyperparameters: Hyperparameters, channels: Mapping[str, Path]
) -> Mapping[str, Any]:
    """Return the model's config.json; empty if it cannot be read, which loading it reports."""
    try:
        source = pretrained.find(hyperparameters.model_name_or_path, channels)
        options = {"token": hyperparameters.hf_token} if hyperparameters.hf_token else {}
        config, _ = PretrainedConfig.get_config_dict(source.name, **options)
    except (RecipeError, OSError, ValueError):
        return {}
    return dict(config)
