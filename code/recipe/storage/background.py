"""Work beside training, one piece at a time, whose failure is not passed over."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Runs one piece of work in a thread; the next one waits for it.

    The thread is none that a process leaves behind: a process that ends waits for it, too.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin `work`, after what was begun before.

        Raises:
            Exception: what the work before failed with.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint")
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # told by `check` in the thread that trains
            self._failure = error

    def check(self) -> None:
        """Raises what the work failed with, if it has; waits for nothing."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def wait(self) -> None:
        """Return when the work is done; raises what it failed with."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()
