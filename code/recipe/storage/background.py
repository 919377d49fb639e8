"""Work beside training, one piece at a time, whose failure is not passed over."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")


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


def available_memory() -> int | None:
    """Bytes that this host can still give, with its file cache; None where nothing says it."""
    if not _MEMINFO.is_file():
        return None
    lines = _MEMINFO.read_text().splitlines()
    kilobytes = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    host = None if kilobytes is None else int(kilobytes) * 1024
    limits = [host, _left_of_the_container()]
    known = [limit for limit in limits if limit is not None]
    return min(known, default=None)


def _left_of_the_container(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a container may still take: its limit without what it uses, its file cache apart."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return None if limit == "max" else int(limit) - used + int(stat["inactive_file"])
    except (OSError, ValueError, KeyError):
        return None
