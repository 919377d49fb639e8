"""`profile_steps`: what a few steps of the first process spend their time on, by torch.profiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from recipe.console import is_first_process, say
from recipe.errors import HyperparameterError, OutputError
from recipe.runtime import xla
from recipe.storage import atomic

FOLDER = "profile"
_ROWS, _NAME_CHARS = 25, 60
# A step of a large model has some ten thousand events of a few hundred bytes each.
_NEEDED = 50_000_000


class Profile(TrainerCallback):
    """Records steps `first` to `last`, and writes a Chrome trace (gzip) and a table of operations.

    What a resumed job had trained before it is not recorded again: a line says so.

    Args:
        steps: The steps, counted from 1 as in the log.
        output: The folder of the job's output; files go to `profile` in it.
    """

    def __init__(self, steps: range, output: Path) -> None:
        self._steps = steps
        self._output = output / FOLDER
        self._recorded: list[int] = []
        self._profiler: Any = None
        self._step: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """See that the steps are ones of this job.

        Raises:
            HyperparameterError: they are not, or torch.profiler does not see the device.
        """
        first, last = self._steps[0], self._steps[-1]
        if last > state.max_steps:
            raise HyperparameterError(
                f"Hyperparameter profile_steps has value {first}-{last}, but the job has "
                f"{state.max_steps} steps.",
                f"Give steps from 1 to {state.max_steps}, or train longer.",
            )
        if xla.in_use():
            raise HyperparameterError(
                f"Hyperparameter profile_steps has value {first}-{last}, but torch.profiler does "
                "not see what torch-xla computes.",
                "Leave it out, and use Neuron's own profiler (neuron-profile).",
            )
        if state.global_step >= first:
            rest = "" if state.global_step >= last else f"; {state.global_step + 1}-{last} are"
            say(
                f"profile_steps: the job goes on after step {state.global_step}: steps {first}-"
                f"{min(last, state.global_step)} are not recorded again{rest}"
            )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Record the step that begins, if it is one of them."""
        step = state.global_step + 1
        if step not in self._steps or not is_first_process():
            return
        if self._profiler is None:
            self._profiler = torch.profiler.profile()  # of all devices that torch computes on
            self._profiler.start()
        self._step = torch.profiler.record_function(f"step {step}")
        self._step.__enter__()
        self._recorded.append(step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write what was recorded, after the last of the steps."""
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
        if state.global_step == self._steps[-1] or control.should_training_stop:
            self._write()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write what was recorded of a training that ended within the steps."""
        if not self._recorded and state.global_step < self._steps[0]:
            say(f"profile_steps: training ended with step {state.global_step}: nothing is recorded")
        self._write()

    def _write(self) -> None:
        """Write the trace and the table, once. A full disk costs the profile, not the job."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        name = f"steps-{self._recorded[0]}-{self._recorded[-1]}"
        averages = profiler.key_averages()
        on_device = any(event.self_device_time_total for event in averages)
        order = "self_device_time_total" if on_device else "self_cpu_time_total"
        table = averages.table(sort_by=order, row_limit=_ROWS, max_name_column_width=_NAME_CHARS)
        remedy = "The training goes on without it."
        try:
            with atomic.results("The profile", self._output, _NEEDED, remedy) as folder:
                trace = folder / f"{name}.trace.json.gz"
                profiler.export_chrome_trace(str(trace))
                (folder / f"{name}.txt").write_text(f"{table}\n", encoding="utf-8")
                size = trace.stat().st_size / 1e6
        except OutputError as error:
            say(f"warning: {error}")
            return
        operations = [each for each in averages if not each.key.startswith("step ")]
        total = sum(getattr(each, order) for each in operations) or 1
        top = sorted(operations, key=lambda each: -getattr(each, order))[:3]
        shares = ", ".join(f"{each.key} {getattr(each, order) / total:.0%}" for each in top)
        say(
            f"profile of steps {self._recorded[0]}-{self._recorded[-1]} written to "
            f"{self._output} ({size:.1f} MB); most time: {shares}"
        )
