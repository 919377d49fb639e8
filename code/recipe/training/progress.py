"""Log a training run: metric lines and progress lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from recipe.console import say
from recipe.metrics import metric_line
from recipe.training.forecast import Forecast, format_duration

_NOT_METRICS = ("total_flos", "epoch")


class MetricLines(TrainerCallback):
    """Prints each log entry of the Trainer as a metric line."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Print a log entry."""
        values = {key: value for key, value in (logs or {}).items() if key not in _NOT_METRICS}
        say(metric_line(state.global_step, state.epoch, values))


class ProgressLines(TrainerCallback):
    """Prints the step, the speed and the time left, at most every `every` seconds."""

    def __init__(
        self, forecast: Forecast, every: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._forecast = forecast
        self._every = every
        self._clock = clock
        self._started = self._printed = 0.0
        self._first_step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock."""
        self._started = self._printed = self._clock()
        self._first_step = state.global_step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Print a line, at intervals."""
        now = self._clock()
        if now - self._printed < self._every or state.global_step >= state.max_steps:
            return
        self._printed = now
        per_second = (state.global_step - self._first_step) / (now - self._started)
        texts = per_second * args.train_batch_size * args.gradient_accumulation_steps
        left = format_duration(self._forecast.seconds_left(args, state, state.max_steps))
        say(
            f"step {state.global_step} of {state.max_steps} "
            f"({100 * state.global_step / state.max_steps:.0f} %), "
            f"{texts * args.world_size:.1f} texts/s, about {left} left"
        )
