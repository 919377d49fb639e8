"""Print the recipe's log lines on stdout, from the first process only."""

from __future__ import annotations

import logging
import os
import threading
import time
from types import TracebackType
from typing import ClassVar

_LOG_SECONDS = 10.0


def is_first_process() -> bool:
    """Return whether this is rank 0 of the job, or its only process."""
    return os.environ.get("RANK", "0") == "0"


def log(line: str) -> None:
    """Log a line of serving: as the server logs, if it runs this code, else on stdout."""
    logger = logging.getLogger("recipe")
    if logger.handlers:
        logger.info("%s", line)
    else:
        print(line, flush=True)


class Progress:
    """Logs how far a long phase is, from the first process: a line after ten seconds without one,
    or on a terminal often enough for the bar that `amphora train` draws of these lines.

    As a context it begins and ends with the phase. Setting `done` is cheap.
    """

    said_at: ClassVar[float] = time.monotonic()
    """When `say` printed the last line."""

    def __init__(self, what: str, total: int = 0, unit: str = "rows") -> None:
        self.done, self._what, self._total, self._unit = 0, what, total, unit
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._log, daemon=True)

    def __enter__(self) -> Progress:
        if is_first_process():
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _log(self) -> None:
        is_bar = self._total and os.environ.get("AMPHORA_TERMINAL")
        started = time.monotonic()
        # A phase that ends within a second needs no line, however old the last one is.
        while not self._ended.wait(0.5 if is_bar else max(1.0, self._next_line())):
            if not is_bar and self._next_line() > 0:
                continue  # another line was printed
            if self._total:
                share = f"{self._unit} ({100 * self.done / self._total:.0f} %)"
                say(f"{self._what}: {self.done} of {self._total} {share}")
            else:
                say(f"{self._what}: {time.monotonic() - started:.0f} s so far")

    @classmethod
    def _next_line(cls) -> float:
        """Return the seconds until the last line is ten seconds old."""
        return cls.said_at + _LOG_SECONDS - time.monotonic()


def say_row(what: str, detail: object) -> None:
    """Print a line of the plan: the subject in a column, then the decision."""
    say(f"{what:15} {detail}")


def say(line: str) -> None:
    """Print one line and flush it, on rank 0 only, so that a job's log has each line once."""
    Progress.said_at = time.monotonic()
    if is_first_process():
        print(line, flush=True)
