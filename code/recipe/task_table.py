"""The tasks: a row for each value of the hyperparameter `task`.

A row names the module below `recipe/tasks/` that has all there is of the task, and the
hyperparameters that no other task takes. It imports nothing, so that hyperparameters can be read
without torch. docs/ARCHITECTURE.md says what such a module defines.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """Where a task is, and what belongs to it alone."""

    module: str
    """Below `recipe/tasks/`. It defines `TASK`, a `recipe.tasks.base.Task`."""
    hyperparameters: Sequence[str] = ()


CLASSIFICATION, CAUSAL_LM = "text-classification", "causal-lm"
TASKS: Mapping[str, Row] = {
    CLASSIFICATION: Row(
        "text_classification",
        ("text_pair_column", "label_column", "problem_type", "label_separator", "class_weight",
         "num_labels", "label_smoothing_factor", "do_predict"),
    ),
    CAUSAL_LM: Row(
        "causal_lm",
        ("prompt_column", "completion_column", "messages_column", "sample_by", "long_texts"),
    ),
}  # fmt: skip


def load(name: str) -> Any:
    """The class of a task, to be called with the job's channels and hyperparameters."""
    return importlib.import_module(f"recipe.tasks.{TASKS[name].module}").TASK
