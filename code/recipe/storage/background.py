"""Run one function at a time in a thread, and report its failure."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Runs one function in a thread; the next one waits for it.

    The thread is not a daemon: the process waits for it before it exits.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Start `work` after the previous work has ended.

        Raises:
            Exception: The error of the previous work.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint")
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # raised by `check` in the main thread
            self._failure = error

    def check(self) -> None:
        """Raise the error of the work, if it has failed, without waiting."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def wait(self) -> None:
        """Wait until the work has ended, and raise its error if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()
