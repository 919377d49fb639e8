"""Decide, with all processes of a training, when it saves and when it stops.

On SIGTERM (spot interruption, stopped job) or SIGINT (Ctrl-C) the current step ends, the state is
saved and the process exits with `EXIT_CODE`. The next start of the job resumes there.
"""

from __future__ import annotations

import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback
from transformers.trainer_utils import IntervalStrategy

EXIT_CODE = 75
"""Exit code of a stopped training that can resume: EX_TEMPFAIL of sysexits.h."""


_BETWEEN = 0.5
"""Most seconds between two exchanges about a stop, of the 120 s that SageMaker allows."""
_MOST_BETWEEN = 16
"""Most steps between two exchanges: later steps may be much slower than earlier ones."""


class EvaluationInterrupted(Exception):
    """Raised if a stop is requested during an evaluation."""


class Interruptions(TrainerCallback):
    """Saves at intervals of minutes; saves and ends training after SIGTERM.

    Args:
        minutes: Most minutes between two checkpoints; None for no limit.
    """

    def __init__(self, minutes: float | None) -> None:
        self._seconds = None if minutes is None else minutes * 60
        self._is_requested = self._deferred = False
        self._saved = time.monotonic()
        self._group: Any = None
        self._where, self._calls, self._until = "", 0, 1
        self._agreed_at = time.monotonic()
        self.cut_short = False
        """Whether a stop ended training before its last step."""

    def listen(self) -> None:
        """Install the handler of SIGTERM and SIGINT. Every process must call it."""
        if dist.is_initialized():
            # On the CPU, so that exchanges do not wait for an accelerator. Create the group before
            # installing the handler: a process that survived SIGTERM would wait for ended ones.
            self._group = dist.new_group(backend="gloo")

        def request_stop(number: int, frame: object) -> None:
            self._is_requested = True

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, request_stop)

    def _agreed(self, where: str) -> tuple[bool, bool]:
        """Return whether any process received a stop, and whether to save now.

        Processes exchange this about every `_BETWEEN` seconds, after the same number of calls. Each
        exchange agrees on the number of calls until the next one, from the slowest process. When
        `where` changes from steps to evaluation batches or back, they exchange at once, since the
        new kind may be slower.
        """
        due = self._seconds is not None and time.monotonic() - self._saved >= self._seconds
        if self._group is None:
            return self._is_requested, due
        if where != self._where:
            self._where, self._until = where, 1
        self._calls += 1
        if self._calls < self._until:
            return False, False
        now = time.monotonic()
        microseconds = round((now - self._agreed_at) * 1e6) // self._calls
        # The first process measures the minutes for all.
        local = [self._is_requested, due and dist.get_rank() == 0, microseconds]
        flags = torch.tensor(local, dtype=torch.int64)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        stop, save, slowest = flags.tolist()
        # At most double the number: the first calls may be faster than later ones.
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
        elif control.should_save and args.eval_strategy == IntervalStrategy.EPOCH:
            # Save after the evaluation at the epoch's end, whose result belongs to the state.
            self._deferred = state.epoch is not None and state.epoch == int(state.epoch)
            control.should_save = not self._deferred

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save if that was deferred; after a stop, neither save nor evaluate."""
        if self.cut_short:
            control.should_evaluate = control.should_save = False
        control.should_save |= self._deferred
        self._deferred = False

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        """End the evaluation if a stop was requested, by EvaluationInterrupted in all processes."""
        if self._agreed("evaluation")[0]:
            raise EvaluationInterrupted

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        """Restart the interval."""
        self._saved = time.monotonic()


def evaluation_is_due(args: TrainingArguments, state: TrainerState) -> bool:
    """Return whether the state was saved before an evaluation that was due at its step."""
    if state.global_step == 0:
        return False
    flow, control = DefaultFlowCallback(), TrainerControl()
    flow.on_step_end(args, state, control)
    # The last step ends an epoch, too, which may be incomplete.
    if control.should_training_stop or state.epoch == int(state.epoch or 0):
        flow.on_epoch_end(args, state, control)
    evaluated = {entry["step"] for entry in state.log_history if "eval_loss" in entry}
    return control.should_evaluate and state.global_step not in evaluated
