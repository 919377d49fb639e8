"""Measure the phases of a job."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable


class Stopwatch:
    """Measures from its creation; `lap` assigns the time since the last lap to a phase."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds: dict[str, float] = {}
        self._counts: Counter[str] = Counter()
        self._clock = clock
        self.started = self._last = clock()

    def lap(self, name: str) -> None:
        """Add the time since the last lap to the phase `name`."""
        now = self._clock()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._counts[name] += 1
        self._last = now

    def mean(self, name: str, default: float) -> float:
        """Return the seconds of a lap of the phase `name`; `default` if there was none."""
        return self.seconds[name] / self._counts[name] if name in self.seconds else default
