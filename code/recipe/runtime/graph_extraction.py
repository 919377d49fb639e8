"""A trial run by neuron_parallel_compile, which wants graphs and not a model.

The tool runs the training in a mode in which graphs are written down and nothing is computed, then
compiles them side by side. What such a run reads from the device is invalid, so it is looked at by
nobody and written nowhere; and since each step makes the same graphs, a few are enough.

Source: the neuron_parallel_compile guide of the AWS Neuron documentation, and the variable that the
tool sets, as Neuron's own training scripts and optimum-neuron read it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from recipe.hyperparameters import Hyperparameters

STEPS = 10


def is_on(environ: Mapping[str, str]) -> bool:
    """Whether this run is one."""
    return environ.get("NEURON_EXTRACT_GRAPHS_ONLY") == "1"


def without_saving(hyperparameters: Hyperparameters) -> Hyperparameters:
    """The hyperparameters of a run that makes the same graphs and saves nothing."""
    off = {"save_strategy": "no", "load_best_model_at_end": False, "report_to": "none"}
    passed = {**hyperparameters.passed, **off}
    return dataclasses.replace(
        hyperparameters,
        passed=passed,
        output_dir=None,
        save_minutes=None,
        early_stopping_patience=None,
        profile_steps=None,
        push_to_hub=False,
    )


class FewSteps(TrainerCallback):
    """Ends training after `STEPS`; the evaluation that follows an epoch still does."""

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Decide after each optimizer step."""
        control.should_training_stop |= state.global_step >= STEPS
