"""Predictions of several requests take turns.

The server's worker provides `pause` when it starts (`turns_fn` in code/inference.py). Without it,
for example in a script, each prediction runs to its end.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from recipe.runtime import memory

Until = Callable[[], bool]
_pause: Callable[..., None] | None = None


def take(pause: Callable[..., None]) -> None:
    """Let predictions take turns from now on, by `pause(until, polls)`."""
    global _pause
    _pause = pause
    # Each prediction has a thread of its own, but only one runs at a time.
    memory.share_freed()


def are_taken() -> bool:
    """Return whether predictions of several requests may run at once."""
    return _pause is not None


def pause(until: Until | None = None, *, polls: bool = False) -> None:
    """Let waiting predictions take their turn. Call it between two calls of a model.

    Args:
        until: A condition for this prediction to continue; it may still be false on return.
        polls: Whether it becomes true while nothing runs, as when a device ends its work.
    """
    if _pause is not None:
        _pause(until, polls)


def pause_before_calls(model: torch.nn.Module) -> None:
    """Pause before each call of a model that other libraries call many times."""
    model.register_forward_pre_hook(lambda *_: pause())
