"""What stands for CUDA graphs where there is no CUDA device."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from tests.support.paths import CODE  # noqa: F401


class Rerun:
    """A tape whose replays compute again what was recorded, from and into the same memory.

    As with a graph, what a replay returned is written over by the next one. Unlike one, it also
    reads what is no tensor again: that nothing of that kind changes is for tests on a GPU.
    """

    def __init__(self, free: int = 1 << 30, each_takes: int = 0, seconds: float = 0.0) -> None:
        self.replays: list[int] = []
        """Tokens of the rows that were replayed."""
        self.in_order = True
        self._free, self._each_takes, self._taken, self._seconds = free, each_takes, 0, seconds

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        output = work().clone()
        self._taken += self._each_takes

        def replay() -> Tensor:
            self.replays.append(len(output))
            output.fill_(float("nan"))
            time.sleep(self._seconds)  # in which other threads may write to the same memory
            return output.copy_(work())

        return replay

    def is_in_order(self) -> bool:
        return self.in_order

    def taken(self) -> int:
        return self._taken

    def free(self) -> int:
        return self._free
