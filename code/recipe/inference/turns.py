"""Where predictions let others have their turn.

The server's worker gives `pause` when it starts (`turns_fn` in code/inference.py). Without it, as
in a script, nothing pauses, and each prediction is made in one piece.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Until = Callable[[], bool]
_pause: Callable[[Until | None], None] | None = None


def take(pause: Callable[[Until | None], None]) -> None:
    """From now on predictions take turns by `pause`."""
    global _pause
    _pause = pause


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


def wait(is_done: Until) -> None:
    """Let others have their turns (make tokens, say) until a device has done what it was given.

    Where predictions take no turns it returns at once: who needs the device's answer waits for it
    then.
    """
    while _pause is not None and not is_done():
        _pause(None)


def pause_before_calls(model: torch.nn.Module) -> None:
    """Make each call of a model begin with a pause, where others' code calls it many times."""
    model.register_forward_pre_hook(lambda *_: pause())
