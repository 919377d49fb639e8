"""Where predictions let others have their turn.

The server's worker gives `pause` when it starts (`turns_fn` in code/inference.py). Without it, as
in a script, nothing pauses, and each prediction is made in one piece.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import torch

from recipe.runtime import memory

Until = Callable[[], bool]
_pause: Callable[..., None] | None = None


def take(pause: Callable[..., None]) -> None:
    """Make predictions take turns from now on, by `pause(until)`."""
    global _pause
    _pause = pause
    # Each prediction has a thread of its own, but only one runs at a time.
    memory.share_freed()


def are_taken() -> bool:
    """Whether predictions of several requests may be at work at once."""
    return _pause is not None


def pause(until: Until | None = None) -> None:
    """Let others have their turn, if any wait; to be said between two calls of a model.

    Args:
        until: What must be so before this prediction can go on. It may still not be so afterwards.
    """
    if _pause is not None:
        _pause(until)


Result = TypeVar("Result")


class Shared(Generic[Result]):
    """Work that several predictions wait for: one of them does it, with pauses."""

    def __init__(self, work: Callable[[Callable[[], None]], Result]) -> None:
        """
        Args:
            work: It is given what it pauses by. It may be begun again, if what does it is ended at
                a pause.
        """
        self._work = work
        self._is_at_work = False
        self._waiting = 0
        self._results: list[Result] = []
        self._error: Exception | None = None

    def result(self) -> Result:
        """What the work returns, or raises."""
        while not self._is_over():
            if self._is_at_work:
                self._waiting += 1
                try:
                    pause(lambda: self._is_over() or not self._is_at_work)
                finally:
                    self._waiting -= 1
                if self._is_at_work and not self._is_over():
                    # Who takes no turns cannot wait for another's.
                    return self._work(pause)
                continue
            self._is_at_work = True
            ended: list[BaseException] = []
            try:
                self._results.append(self._work(partial(self._pause, ended)))
            except Exception as error:
                # Its frames hold what the work had in memory, and others wait to do theirs.
                traceback.clear_frames(error.__traceback__)
                self._error = error
            finally:
                self._is_at_work = False
            if ended:
                raise ended[0]
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _pause(self, ended: list[BaseException]) -> None:
        """Pause. If that ends the prediction that does the work, it ends after it, as long as
        others wait: they would have to begin again.

        Args:
            ended: What has ended it is put there.
        """
        try:
            pause()
        except BaseException as error:
            if isinstance(error, Exception) or not self._waiting:
                raise
            ended[:] = [error]

    def _is_over(self) -> bool:
        return bool(self._results) or self._error is not None


def pause_before_calls(model: torch.nn.Module) -> None:
    """Make each call of a model begin with a pause, where others' code calls it many times."""
    model.register_forward_pre_hook(lambda *_: pause())
