"""Waiting for a condition. The time limit ends a test that fails; it measures nothing."""

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


def wait_until(condition: Callable[[], Value], seconds: float, pause: float = 0.02) -> Value:
    """Call `condition` until its value is true or the time is over; return its last value."""
    end = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(pause)
    return value


def until(condition: Callable[[], Value], seconds: float = 240, what: object = "") -> Value:
    """Call `condition` until its value is true, and return that value.

    Args:
        condition: Returns a false value while the test has to wait.
        seconds: The time limit, after which the test fails.
        what: What the failure shows; if it can be called, its return value.
    """
    value = wait_until(condition, seconds)
    assert value, f"not within {seconds} s: {what() if callable(what) else what}"
    return value
