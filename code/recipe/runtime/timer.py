"""Measure the duration of a job's phases."""

from __future__ import annotations

import time
from collections.abc import Callable


class Stopwatch:
    """Measures from its creation; `lap` assigns the time since the last lap to a phase."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self.started = self._last = clock()

    def lap(self, name: str) -> None:
        """Add the time since the last lap to the phase `name`."""
        now = self._clock()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now
