"""When a training saves and when it stops, decided by all of its processes together.

SIGTERM (a spot interruption, a stopped job) lets the running step end; then the state is saved and
the process leaves with `EXIT_CODE`. Started again, the job goes on from there.
"""

from __future__ import annotations

import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

EXIT_CODE = 75
"""Of a training that was stopped and can be resumed: EX_TEMPFAIL of sysexits.h."""


_BETWEEN = 0.5
"""Seconds between two questions whether to stop, at most; of the 120 s that a stop has."""
_MOST_BETWEEN = 16
"""Steps between them, at most: one may come that is much slower than those before."""


class Interrupted(Exception):
    """A stop was asked for in the middle of an evaluation."""


class Interruptions(TrainerCallback):
    """Saves every so many minutes; saves and ends training after SIGTERM.

    Args:
        minutes: Between two checkpoints at most; None for no limit.
    """

    def __init__(self, minutes: float | None) -> None:
        self._seconds = None if minutes is None else minutes * 60
        self._asked = self._deferred = False
        self._saved = time.monotonic()
        self._group: Any = None
        self._where, self._calls, self._until = "", 0, 1
        self._agreed_at = time.monotonic()
        self.cut_short = False
        """Whether training was ended by a stop before its last step."""

    def listen(self) -> None:
        """Take SIGTERM as a request to stop from here on. Every process must call it."""
        if dist.is_available() and dist.is_initialized():
            # On the CPU, so that asking does not wait for an accelerator. Before any process takes
            # the signal so: one that did would wait here for those that it has ended.
            self._group = dist.new_group(backend="gloo")
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, number: int, frame: object) -> None:
        self._asked = True

    def _agreed(self, where: str) -> tuple[bool, bool]:
        """Whether any process was asked to stop, and whether the time to save has come.

        Several processes ask each other once in `_BETWEEN` seconds, after the same steps and
        batches: how many lie between is agreed on each time, by the slowest process.

        Args:
            where: What the calls are counted of; where another kind begins they ask at once, since
                it may be slower.
        """
        due = self._seconds is not None and time.monotonic() - self._saved >= self._seconds
        if self._group is None:
            return self._asked, due
        if where != self._where:
            self._where, self._until = where, 1
        self._calls += 1
        if self._calls < self._until:
            return False, False
        now = time.monotonic()
        microseconds = round((now - self._agreed_at) * 1e6) // self._calls
        # The minutes are those of the first process.
        own = [self._asked, due and dist.get_rank() == 0, microseconds]
        flags = torch.tensor(own, dtype=torch.int64)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        stop, save, slowest = flags.tolist()
        # Never many more than before: the first calls may be fast, and what follows slow.
        most = min(_MOST_BETWEEN, 2 * self._until)
        self._until = max(1, min(most, round(_BETWEEN * 1e6) // max(1, slowest)))
        self._calls, self._agreed_at = 0, time.monotonic()
        return bool(stop), bool(save)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Decide after each optimizer step."""
        stop, due = self._agreed("step")
        control.should_save |= due
        if stop and not control.should_training_stop:
            self.cut_short = True
            control.should_save, control.should_training_stop = True, True
            control.should_evaluate = False
        elif control.should_save and evaluates_at_epoch_end(args, state):
            # Saved after the evaluation that follows, whose result belongs to the state.
            control.should_save, self._deferred = False, True

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """What was put off is done, and nothing after a stop."""
        if self.cut_short:
            control.should_evaluate = control.should_save = False
        control.should_save |= self._deferred
        self._deferred = False

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End an evaluation that a stop was asked for in.

        Raises:
            Interrupted: in all processes.
        """
        if self._agreed("evaluation")[0]:
            raise Interrupted

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the minutes anew."""
        self._saved = time.monotonic()


def evaluates_at_epoch_end(args: TrainingArguments, state: TrainerState) -> bool:
    """Whether this step is the last one of an epoch, and an evaluation follows."""
    ends = state.epoch is not None and state.epoch == int(state.epoch)
    return ends and args.eval_strategy == IntervalStrategy.EPOCH


def evaluation_is_due(args: TrainingArguments, state: TrainerState) -> bool:
    """Whether the state was saved before an evaluation that its step should have had."""
    if state.global_step == 0:
        return False
    by_steps = args.eval_strategy == IntervalStrategy.STEPS and state.eval_steps > 0
    due = evaluates_at_epoch_end(args, state) or (
        by_steps and state.global_step % state.eval_steps == 0
    )
    evaluated = {entry["step"] for entry in state.log_history if "eval_loss" in entry}
    return due and state.global_step not in evaluated
