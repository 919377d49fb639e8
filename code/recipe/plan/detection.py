"""Find the task of a job by its hyperparameters, the columns of its data and its model."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipe import task_table
from recipe.data import columns
from recipe.data.column_settings import ColumnsError, named_settings, remedy
from recipe.data.columns import Selection
from recipe.data.files import head
from recipe.data.files.part import Part
from recipe.data.layout import channels as layout
from recipe.data.reading import check_reviewed
from recipe.errors import DataError, HyperparameterError, RecipeError, listed
from recipe.hyperparameters import Hyperparameters, all_tasks_of
from recipe.models import pretrained
from recipe.spec import Model
from recipe.task_table import TASKS

_FILES = 3
_ENDINGS = {
    Model.DECODER: ("ForCausalLM", "LMHeadModel"),
    Model.MASKED: ("ForMaskedLM", "ForPreTraining"),
    Model.CLASSIFIER: ("ForSequenceClassification",),
    Model.VISION: ("ForImageClassification",),
}
"""How the names of the classes of models end."""


def find(hyperparameters: Hyperparameters, channels: Mapping[str, Path]) -> tuple[str, str]:
    """Return the job's task and the reason.

    The hyperparameter task decides; otherwise the only task that takes all hyperparameters, or
    whose columns the data has, by names. The base model decides between several.

    Raises:
        HyperparameterError: None or several are possible; the message has the line to give.
        DataError: Hyperparameters name columns that do not exist, or the data is an export of
            Prodigy.
    """
    if hyperparameters.task is not None:
        return hyperparameters.task, "as given"
    tasks_by_hyperparameter = hyperparameters.tasks_by_hyperparameter
    possible = all_tasks_of(tasks_by_hyperparameter)
    if len(possible) == 1:
        alone = [name for name, tasks in tasks_by_hyperparameter.items() if list(tasks) == possible]
        return possible[0], f"only this task takes {' and '.join(alone or tasks_by_hyperparameter)}"
    files: list[Path] = []
    with contextlib.suppress(DataError):  # loading the data raises it again
        data = layout.training_channels(channels, hyperparameters.trains)
        files = layout.find(data).files["train"]
    parts = (head.read(path, hyperparameters.names_in_header) for path in files[:_FILES])
    part = next((part for part in parts if part is not None), None)
    if part is None:
        for task in possible:
            recognise = TASKS[task].recognises_files
            if recognise and (reason := task_table.resolve(recognise)(channels)) is not None:
                return task, f"{reason}; set task to choose another"
        # Reading the data says why there are no rows.
        owners = [task for task in possible if TASKS[task].owns_settings]
        return (owners or possible)[0], "the default; set task to choose another"
    check_reviewed(part, hyperparameters)
    configuration: Mapping[str, Any] = {}
    with contextlib.suppress(RecipeError):  # loading the model reports it
        source = pretrained.find(hyperparameters.model_name_or_path, channels)
        configuration = source.with_access(hyperparameters).read_settings()
    model = model_of(configuration)
    selections: dict[str, Selection] = {}
    errors: dict[str, ColumnsError] = {}
    for task in possible:
        try:
            selections[task] = columns.select(part, TASKS[task], hyperparameters, is_detection=True)
        except ColumnsError as error:
            errors[task] = error
    fitting = [task for task in selections if model in TASKS[task].models]
    is_known = bool(configuration.get("architectures"))
    chosen = fitting if len(selections) > 1 or is_known else list(selections)
    others = [task for task, error in errors.items() if error.is_rival and _prefers(model, task)]
    if len(chosen) != 1 or (others and not _prefers(model, chosen[0])):
        raise _undecided(part, hyperparameters, selections, errors, model)
    reason = f"by its columns: {selections[chosen[0]].describe()}"
    if len(selections) > 1:
        others = [task for task in selections if task != chosen[0]]
        reason += f"; the model is {model.value}, else {' or '.join(others)} could be meant"
    return chosen[0], f"{reason}; set task to choose another"


def _prefers(model: Model, task: str) -> bool:
    """Return whether a task is for this kind of model, and not for every one."""
    models = TASKS[task].models
    return model in models and len(models) < len(Model)


def _has_line(error: ColumnsError) -> bool:
    """Return whether an error has a line to give, without a name to fill in."""
    return bool(error.lines) and not error.lines[0].endswith("...")


def model_of(config: Mapping[str, Any]) -> Model:
    """Return what a base model is, by its config.json."""
    if config.get("is_encoder_decoder"):
        return Model.SEQ2SEQ
    if "image_size" in config and "vocab_size" not in config:
        return Model.VISION
    names = config.get("architectures") or ()
    for model, endings in _ENDINGS.items():
        if any(name.endswith(endings) for name in names):
            return model
    return Model.ENCODER


def _undecided(
    part: Part,
    hyperparameters: Hyperparameters,
    selections: Mapping[str, Selection],
    errors: Mapping[str, ColumnsError],
    model: Model,
) -> HyperparameterError:
    """Return the refusal that lists the tasks that may be meant, each with its lines."""
    problems: dict[str, ColumnsError] = {}
    lines: dict[str, str] = {}
    for task in (*selections, *errors):
        if hyperparameters.named_columns and task in errors and not errors[task].is_near:
            continue
        try:
            selection = columns.select(part, TASKS[task], hyperparameters)
            unread = listed([n for n in part.table.column_names if n not in selection.names])
            lines[task] = (
                f"{selection.describe()}{unread and '; not read: '}{unread}. Give task={task}."
            )
        except ColumnsError as error:
            problems[task] = error
    if not lines and not problems:
        return HyperparameterError(
            "No task has data with all the columns that are named: "
            f"{named_settings(hyperparameters)}.",
            "Leave some out; docs/DATA.md lists the columns of each task.",
        )
    complete = [*selections, *(task for task, error in errors.items() if not error.missing)]
    meant = [task for task in complete if model in TASKS[task].models]
    close = [task for task, error in problems.items() if error.is_close and _has_line(error)]
    if model in (Model.DECODER, Model.SEQ2SEQ, Model.VISION):
        made_for = [
            task for task in problems if _has_line(problems[task]) and _prefers(model, task)
        ]
        close += [task for task in made_for if problems[task].is_near] or made_for
    if meant:
        meant += close
    else:
        whole = [task for task, error in problems.items() if not error.missing]
        lacking = {task: error.missing for task, error in problems.items()
                   if error.missing and error.is_near and _has_line(error)}  # fmt: skip
        least = [task for task, missing in lacking.items() if missing == min(lacking.values())]
        owners = [task for task in problems if TASKS[task].owns_settings]
        meant = [*lines, *whole, *(task for task in owners if task in least)]
        if not meant:
            is_other = not any(_prefers(model, task) for task in least)
            meant = [*least, *(task for task in owners if _has_line(problems[task]) and is_other)]
        meant += close
        fitting = [task for task in meant if model in TASKS[task].models or task in selections]
        meant = fitting or meant or owners or list(problems)
    # Of tasks in one folder, which read the same data, keep the one whose own names fit.
    by_folder: dict[str, str] = {}
    for task in (*TASKS, *complete):
        if task in meant:
            by_folder[TASKS[task].folder] = task
    meant = list(by_folder.values())
    for task in meant:
        if task not in lines:
            problem = problems[task]
            given = [f"task={task} {line}" for line in problem.lines if line[:5] != "task="]
            lines[task] = f"{problem.message} {remedy(given, problem.advice)}"
    proposals = "".join(f"\n- {task}: {lines[task]}" for task in TASKS if task in meant)
    return HyperparameterError(
        f"Hyperparameter task is not given, and the columns of {part.path} and the model "
        f"({model.value}) do not decide it:{proposals}"
    )
