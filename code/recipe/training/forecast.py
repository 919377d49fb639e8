"""Forecast time and price of a training from its first steps, and fit it into a budget of time.

With a budget, the number of steps follows from their speed: the learning rate's schedule is made
for the steps that fit, and its rest is stretched or shortened whenever the speed has changed.
"""

from __future__ import annotations

import bisect
import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    get_scheduler,
)

from recipe.console import say_row
from recipe.errors import HyperparameterError
from recipe.plan.resolution import Plan
from recipe.plan.trainer_arguments import name_of
from recipe.runtime.device import gather_objects
from recipe.runtime.stopwatch import Stopwatch
from recipe.training.preparation import PreparedTraining

_MEASURED, _WARM_UP = 10, 2
"""Steps after which a training is forecast, and those of them that are slower than later ones."""
_EARLY = 0.1
"""Share of the time for training after which the steps are decided, even before the tenth."""
_PARTS = 20
"""The budget is checked again after each of these parts of the steps left, and corrected if it is
wrong by such a part."""
_MUCH = 1.15
"""Factor by which a forecast is wrong if it is logged again."""
_REPORT_SECONDS = 5.0
_BYTES_PER_SECOND = 3e8
"""Speed of writing a checkpoint, before one was measured: an assumption."""


class Forecast(TrainerCallback):
    """Measures steps, evaluations and saves of a training.

    Args:
        started: When the job began, by `clock`.
        steps_of_epoch: Optimizer steps of an epoch.
        evaluation: What an evaluation takes until one was measured, in steps.
        after: Evaluations that follow training, in evaluations of the evaluation data.
        written: Bytes of the last checkpoint and the model, which are written at the end.
        budget: Seconds that the job may take; None for no limit.
        price: Price of all hosts per hour, or 0.
    """

    def __init__(
        self,
        *,
        started: float,
        steps_of_epoch: int,
        evaluation: float,
        after: float,
        written: float,
        budget: float | None = None,
        price: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._started, self._clock, self._watch = started, clock, Stopwatch(clock)
        self._steps_of_epoch, self._evaluation, self._after = steps_of_epoch, evaluation, after
        self._written, self._budget, self._price = written, budget, price
        self._bytes_per_second = _BYTES_PER_SECOND
        self._first_step = self._planned = self._next = 0
        self._has_decided = False
        self._logged: list[float] = []
        # The curve was made for `length` steps. Step `start` is at `position` of it, the last step
        # at its end.
        self._curve: dict[str, float] = {}
        self._used = 0.0

    def state(self) -> bytes:
        """Return what a checkpoint keeps of a budget: the seconds used, and the schedule."""
        return json.dumps({"used": self.elapsed(), **self._curve}).encode()

    def restore(self, content: bytes) -> None:
        """Restore what `state` returned."""
        self._curve = json.loads(content)
        self._used = self._curve.pop("used")

    @property
    def has_budget(self) -> bool:
        """Return whether the job's time is limited."""
        return self._budget is not None

    @property
    def planned(self) -> int:
        """Return the steps of the training without a budget; 0 before it begins."""
        return self._planned

    def note_written(self, size: float, seconds: float) -> None:
        """Note how long writing a checkpoint of `size` bytes took."""
        self._bytes_per_second = size / seconds

    def elapsed(self) -> float:
        """Return the seconds of the job so far; with a budget, those before a resume too."""
        return self._used + self._clock() - self._started

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start measuring; continue the schedule of a checkpoint. Raise HyperparameterError if the
        budget was used up before the first step."""
        self._watch = Stopwatch(self._clock)
        self._first_step, self._planned = state.global_step, state.max_steps
        self._next = state.global_step + 1
        if self._curve:
            state.max_steps = min(self._planned, int(self._curve["end"]))
            self._follow_curve(args, state, kwargs["lr_scheduler"])
        if self._budget is None or state.global_step:
            return
        used = gather_objects(self.elapsed())[0]  # as the first process measures
        if used >= self._budget:
            raise HyperparameterError(
                f"The budget of {format_duration(self._budget)} (max_minutes, max_price) was used "
                f"up before the first step, after {format_duration(used)}.",
                "Give more.",
            )

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Measure an evaluation."""
        self._watch.lap("evaluation")

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        """Measure how long training waited for a checkpoint."""
        self._watch.lap("save")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure a step; correct the budget and the forecast."""
        number = state.global_step - self._first_step
        if number in (_WARM_UP, _MEASURED) and args.device.type == "cuda":
            torch.cuda.synchronize()
        self._watch.lap("step" if number > _WARM_UP else "first steps")
        if self._budget is not None and self._next <= state.global_step < state.max_steps:
            self._fit(args, state, kwargs["lr_scheduler"])
        if number < _MEASURED and not self._has_decided:
            return
        whole = self.elapsed() + self.seconds_left(args, state, state.max_steps)
        change = whole / self._logged[-1] if self._logged else math.inf
        if len(self._logged) >= 2 or 1 / _MUCH < change < _MUCH:
            return
        if self._budget is not None:
            fitting = f"{state.max_steps} of {self._planned} steps fit into "
            say_row(
                "budget", f"{fitting}{format_duration(self._budget)}; the learning rate ends there"
            )
        corrected = "corrected: " if self._logged else ""
        left = format_duration(whole - self.elapsed())
        say_row(
            "estimate",
            f"{corrected}{state.max_steps - state.global_step} steps are left, {left}; "
            f"{self.describe(whole)}",
        )
        self._logged.append(whole)

    def seconds_left(self, args: TrainingArguments, state: TrainerState, total: int) -> float:
        """Return the seconds until the job ends, if it trains `total` steps in all."""
        step = state.global_step
        mean = self._watch.mean
        estimate_step = mean("step", mean("first steps", 0.0))
        of_evaluation = mean("evaluation", self._evaluation * estimate_step)

        def count(strategy: Any, interval: float) -> int:
            """Count evaluations or saves in the steps that are left."""
            if (name := name_of(strategy)) == "no":
                return 0
            every = max(1, int(interval)) if name == "steps" else self._steps_of_epoch
            return math.ceil(total / every) - step // every

        evaluations = count(args.eval_strategy, state.eval_steps)
        saves = count(args.save_strategy, state.save_steps)
        return (
            (total - step) * estimate_step
            + (evaluations + self._after) * of_evaluation
            + max(0, saves - 1) * mean("save", 0.0)
            + self._written / self._bytes_per_second
            + _REPORT_SECONDS
        )

    def describe(self, whole: float) -> str:
        """Describe what a job of `whole` seconds takes."""
        cost = f", {self._price * whole / 3600:.2g} at {self._price:g} an hour" * bool(self._price)
        return f"the whole job takes {format_duration(whole)}{cost}, evaluations and saves included"

    def _fit(self, args: TrainingArguments, state: TrainerState, scheduler: Any) -> None:
        """Choose the number of steps that fit into the budget, for all processes."""
        assert self._budget is not None
        step, room = state.global_step, self._budget - self.elapsed()
        trained = self._clock() - self._watch.started
        is_late = trained > _EARLY * (room + trained)
        totals = range(step + 1, max(step + 1, self._planned) + 1)
        fitting = bisect.bisect_right(
            totals, room, key=lambda total: self.seconds_left(args, state, total)
        )
        total = totals[max(0, fitting - 1)]
        # The first steps may compile for minutes: the others are not as slow.
        least = _WARM_UP + 1 if is_late else _MEASURED
        if step - self._first_step < least and room > 0:
            total = 0
        total = gather_objects(total)[0]  # as the first process measures
        if not total:
            self._next = step + 1
            return
        self._has_decided = True
        self._next = step + max(1, (total - step) // _PARTS)
        if not self._curve:
            self._curve = {"start": step, "position": step, "length": total, "end": total}
            untyped: Any = state
            untyped.compute_steps(args, total)
            state.max_steps = total
            self._follow_curve(args, state, scheduler)
        elif abs(total - state.max_steps) * _PARTS > total - step:
            position = self._position(step)
            self._curve |= {"start": step, "position": position, "end": total}
            state.max_steps = total

    def _position(self, step: int) -> float:
        curve = self._curve
        done = (step - curve["start"]) / max(1, curve["end"] - curve["start"])
        return curve["position"] + done * (curve["length"] - curve["position"])

    def _follow_curve(self, args: TrainingArguments, state: TrainerState, scheduler: Any) -> None:
        if not isinstance(scheduler, LambdaLR):  # ReduceLROnPlateau has no end
            return
        length = int(self._curve["length"])
        kwargs: Any = args.lr_scheduler_kwargs
        made: Any = get_scheduler(
            args.lr_scheduler_type,
            torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0),
            num_warmup_steps=args.get_warmup_steps(length),
            num_training_steps=length,
            scheduler_specific_kwargs=kwargs,
        )
        (factor,) = made.lr_lambdas
        scheduler.lr_lambdas = [lambda step: factor(self._position(step))] * len(
            scheduler.lr_lambdas
        )
        # The scheduler has already set the rate of the next step, by its former curve.
        for group, rate in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, strict=True):
            group["lr"] = rate * factor(self._position(scheduler.last_epoch))


def forecast_job(
    plan: Plan,
    prepared: PreparedTraining,
    started: float,
    rows: Mapping[str, int] | None = None,
    steps_of_epoch: int | None = None,
) -> Forecast:
    """Return the forecast of a job.

    Args:
        started: When the job began, by time.monotonic.
        rows: Samples of train, evaluation and maybe test, if those prepared are a part of them.
        steps_of_epoch: Optimizer steps of an epoch of these.
    """
    given, args = plan.hyperparameters, plan.arguments
    rows = rows or {name: len(split) for name, split in prepared.samples.items()}
    steps_of_epoch = steps_of_epoch or prepared.batches.training.steps()
    test_share = rows.get("test", 0) / max(1, rows["evaluation"])
    after = 0.0
    if given.evaluates or given.predicts:
        is_again = args.load_best_model_at_end or name_of(args.eval_strategy) == "no"
        after = (is_again or (given.predicts and not test_share)) + test_share
    after += 2 * bool(given.quantize)  # in floats and in int8
    weights = list(prepared.loaded.model.parameters())
    # A checkpoint also has two moments of each trained weight.
    checkpoint_bytes = 3 * sum(weight.nbytes for weight in weights if weight.requires_grad)
    written = sum(weight.nbytes for weight in weights)
    written += checkpoint_bytes * (name_of(args.save_strategy) != "no")
    return Forecast(
        started=started,
        steps_of_epoch=steps_of_epoch,
        # A forward pass is a third of a step.
        evaluation=rows["evaluation"] * steps_of_epoch / max(1, rows["train"]) / 3,
        after=after,
        written=written,
        budget=given.budget_seconds(plan.host_count),
        price=(given.price_per_hour or 0) * plan.host_count,
    )


def format_duration(seconds: float) -> str:
    """Return a duration in hours and minutes, or minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
