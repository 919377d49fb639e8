"""Waiting for a condition. The time limit ends a test that fails; it measures nothing."""

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


def until(condition: Callable[[], Value], seconds: float = 240, what: object = "") -> Value:
    """Call `condition` until its value is true, and return that value.

    Args:
        condition: Returns a false value while the test has to wait.
        seconds: The time limit, after which the test fails.
        what: What the failure shows; if it can be called, its return value.
    """
    end = time.monotonic() + seconds
    while not (value := condition()):
        shown = what() if callable(what) and time.monotonic() > end else what
        assert time.monotonic() < end, f"not within {seconds} s: {shown}"
        time.sleep(0.02)
    return value
