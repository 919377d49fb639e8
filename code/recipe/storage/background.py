"""Run one function at a time in a thread, and report its failure."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """Runs one function in a thread; the next one, and the end of the process, wait for it."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._work: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Start `work` after the previous work has ended.

        Raises:
            Exception: The error of the previous work.
        """
        self.wait()
        self._work = self._pool.submit(work)

    def check(self) -> None:
        """Raise the error of the work, if it has failed, without waiting."""
        if self._work is not None and self._work.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the work has ended, and raise its error if it failed."""
        work, self._work = self._work, None
        if work is not None:
            work.result()
