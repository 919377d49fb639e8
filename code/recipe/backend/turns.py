"""Predictions of several requests take turns.

The server's worker provides `pause` when it starts (`turns_fn` in code/inference.py). Without it,
for example in a script, each prediction runs to its end.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import Generic, TypeVar

import torch

from recipe.runtime import memory

Until = Callable[[], bool]
_pause: Callable[..., None] | None = None


def take(pause: Callable[..., None]) -> None:
    """Let predictions take turns from now on, by `pause(until)`."""
    global _pause
    _pause = pause
    # Each prediction has a thread of its own, but only one runs at a time.
    memory.share_freed()


def are_taken() -> bool:
    """Return whether predictions of several requests may run at once."""
    return _pause is not None


def pause(until: Until | None = None) -> None:
    """Let waiting predictions take their turn. Call it between two calls of a model. `until` is a
    condition for this prediction to continue; it may still be false on return."""
    if _pause is not None:
        _pause(until)


Result = TypeVar("Result")


class Shared(Generic[Result]):
    """Work that several predictions share: one of them does it, with pauses."""

    def __init__(self, work: Callable[[Callable[[], None]], Result]) -> None:
        """Take work that receives a function that pauses. Another prediction starts it again if
        the one that runs it ends at a pause."""
        self._work = work
        self._is_at_work = False
        self._waiting = 0
        self._outcome: Future[Result] = Future()

    def result(self) -> Result:
        """Return what the work returns, or raise what it raises."""
        while not self._outcome.done():
            if self._is_at_work:
                self._waiting += 1
                try:
                    pause(lambda: self._outcome.done() or not self._is_at_work)
                finally:
                    self._waiting -= 1
                if self._is_at_work and not self._outcome.done():
                    # A caller outside the turns cannot wait for another prediction.
                    return self._work(pause)
                continue
            self._is_at_work = True
            ended: list[BaseException] = []
            try:
                result = self._work(partial(self._pause, ended))
                # Callers outside the turns may do the work at the same time.
                with contextlib.suppress(InvalidStateError):
                    self._outcome.set_result(result)
            except Exception as error:
                # Free the tensors in the frames, since other predictions need the memory.
                traceback.clear_frames(error.__traceback__)
                with contextlib.suppress(InvalidStateError):
                    self._outcome.set_exception(error)
            finally:
                self._is_at_work = False
            if ended:
                raise ended[0]
        return self._outcome.result()

    def _pause(self, ended: list[BaseException]) -> None:
        """Pause. A prediction that ends here first finishes the work if others wait for it, since
        they would have to start it again; `ended` receives the exception that ends it."""
        try:
            pause()
        except BaseException as error:
            if isinstance(error, Exception) or not self._waiting:
                raise
            ended[:] = [error]


def pause_before_calls(model: torch.nn.Module) -> None:
    """Pause before each call of a model that other libraries call many times."""
    model.register_forward_pre_hook(lambda *_: pause())
