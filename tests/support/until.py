"""Waiting for what comes when it comes: a bound is there to end a test that fails, not to measure."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


def until(condition: Callable[[], Value], seconds: float = 60, what: object = "") -> Value:
    """Ask again and again until the answer is true, and give it back.

    Args:
        condition: What is asked.
        seconds: After so many of them the test fails.
        what: What is waited for; if it can be called, it is for what the failure shows.
    """
    end = time.monotonic() + seconds
    while not (value := condition()):
        shown = what() if callable(what) and time.monotonic() > end else what
        assert time.monotonic() < end, f"not within {seconds} s: {shown}"
        time.sleep(0.02)
    return value
