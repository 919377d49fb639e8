"""Jobs of one worker that take turns: each has a thread, and one thread runs at a time.

Between its model calls a long prediction calls `pause()`, where its thread blocks until its next
turn if other work waits. So handlers need no locks, and a short request waits for one model call.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

# A job that runs alone gives the turn back this often, so that the front hears from the worker.
_SIGN_SECONDS = 0.2
# A job is short until it has used this much time and, since one turn may take longer, this many
# turns. Short jobs may delay the job that has waited longest by as much.
_SHORT_SECONDS = 0.1
_SHORT_TURNS = 5
# Idle threads that are kept for later jobs, since a new thread gets a new OpenMP pool.
_SPARE_THREADS = 8


class ClientLeft(BaseException):
    """Raised in `pause` when the client has gone; handlers that catch `Exception` let it pass."""


class TakesLong(BaseException):
    """Raised in `pause` when work outside of a job has used up its time."""


@dataclass(eq=False)
class TurnJob:
    """Work that takes turns with other work."""

    work: Callable[[], None]
    until: Callable[[], bool] | None = None
    """What it waits for; None means only its turn."""
    polls: bool = False
    """Whether that becomes true without a frame from the front."""
    is_whole: bool = False
    """Whether it pauses only while it waits for something."""
    turns: int = 0
    seconds: float = 0.0
    """The time that its turns have taken."""
    is_left: bool = False
    is_done: bool = False
    error: BaseException | None = None
    thread: _Thread | None = None

    @property
    def is_ready(self) -> bool:
        """Return whether it could make progress in a turn."""
        if self.until is None or self.is_left:
            return True
        try:
            return self.until()
        except Exception:
            # The job evaluates the condition again in its turn, and gets the error there.
            return True

    @property
    def is_short(self) -> bool:
        return self.seconds < _SHORT_SECONDS or self.turns < _SHORT_TURNS


class _Thread(threading.Thread):
    """Runs jobs, one after the other, whenever it has the turn."""

    def __init__(self, turns: Turns) -> None:
        super().__init__(name="turns", daemon=True)
        self.turn = threading.Semaphore(0)
        self.job: TurnJob | None = None
        self._turns = turns

    def run(self) -> None:
        while True:
            self.turn.acquire()
            if (job := self.job) is None:
                return
            try:
                job.work()
            except ClientLeft:
                pass
            except BaseException as error:
                job.error = error
            job.is_done, self.job, job.thread = True, None, None
            self._turns.give_back()


class Turns:
    """The jobs of a worker. Only `pause` and `give_back` are called by other threads than the
    main one."""

    def __init__(self, is_wanted: Callable[[], bool]) -> None:
        self.slices = 0
        """Turns that were given."""
        self.outside_until: float | None = None
        """CPU time of the main thread after which work outside of jobs ends at its next pause."""
        self._is_wanted = is_wanted
        """Returns whether the main thread has something to do before the next turn."""
        self._jobs: deque[TurnJob] = deque()
        """The job whose last turn (or arrival) is longest ago comes first."""
        self._oldest_ran = 0.0
        """When the job that had waited longest last had a turn."""
        self._passed = 0
        """Turns that other jobs have had since then."""
        self._spare: list[_Thread] = []
        self._back = threading.Semaphore(0)
        self._running: TurnJob | None = None
        self._since = 0.0

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def is_outside(self) -> bool:
        """Return whether no job runs, so that the current work is done in one piece."""
        return self._running is None

    @property
    def is_runnable(self) -> bool:
        """Return whether a job could make progress."""
        return any(job.is_ready for job in self._jobs)

    @property
    def polls(self) -> bool:
        """Return whether a job may become ready without a frame from the front."""
        return any(job.polls for job in self._jobs)

    @property
    def are_whole(self) -> bool:
        """Return whether no job pauses between two pieces of work."""
        return all(job.is_whole for job in self._jobs)

    def add(self, works: list[Callable[[], None]], *, whole: bool = False) -> list[TurnJob]:
        """Add a job for each work. `whole` ones pause only while they wait for something."""
        jobs = [TurnJob(work, is_whole=whole) for work in works]
        self._jobs.extend(jobs)
        return jobs

    def leave(self, job: TurnJob) -> None:
        """End a job at its next pause: nobody waits for it any more."""
        job.is_left = True
        if job.turns == 0 and job in self._jobs:
            self._jobs.remove(job)
            job.is_done = True

    def give(self) -> None:
        """Give the next job its turn. Raises its error, if it ends with one.

        Jobs whose condition has become true come first, since they only deliver. Then come new
        jobs, short ones and long ones; but now and then the job that has waited longest has a turn,
        however many short jobs arrive.
        """
        if not (ready := [job for job in self._jobs if job.is_ready]):
            return
        oldest = ready[0]
        job = min(ready, key=lambda job: (job.until is None, not job.is_short, job.turns > 0))
        is_late = time.monotonic() - self._oldest_ran > _SHORT_SECONDS
        if job.until is None and is_late and self._passed >= _SHORT_TURNS:
            job = oldest
        self._jobs.remove(job)
        if job.thread is None:
            job.thread = self._spare.pop() if self._spare else _Thread(self)
            job.thread.job = job
            if not job.thread.is_alive():
                job.thread.start()
        thread = job.thread
        self.slices += 1
        self._running, self._since = job, time.monotonic()
        thread.turn.release()
        self._back.acquire()
        self._running = None
        now = time.monotonic()
        job.turns += 1
        job.seconds += now - self._since
        self._passed += 1
        if job is oldest or not self._jobs:
            self._oldest_ran, self._passed = now, 0
        if not job.is_done:
            self._jobs.append(job)
            return
        if len(self._spare) < _SPARE_THREADS:
            self._spare.append(thread)
        else:
            thread.turn.release()
        if job.error is not None:
            raise job.error

    def give_back(self) -> None:
        """Return the turn to the main thread: the running job pauses, or has ended."""
        self._back.release()

    def pause(self, until: Callable[[], bool] | None = None, polls: bool = False) -> None:
        """Let other jobs run, and wait for the next turn.

        Returns at once outside of a job, and if no other work waits, whatever `until` says.

        Args:
            until: What the job waits for, evaluated between other jobs' turns; None: only its turn.
            polls: Whether it becomes true while nothing runs, as when a device ends its work.

        Raises ClientLeft if the client has gone, TakesLong if `outside_until` has passed.
        """
        job = self._running
        if job is None and self.outside_until is not None:
            if time.thread_time() > self.outside_until:
                raise TakesLong
            return
        if job is None or job.thread is None or threading.current_thread() is not job.thread:
            return
        if until is None or until():
            if job.is_whole:
                return
            is_alone = not self.is_runnable and not self._is_wanted()
            if is_alone and time.monotonic() - self._since < _SIGN_SECONDS:
                return
        job.until, job.polls = until, polls
        turn = job.thread.turn
        self.give_back()
        turn.acquire()
        job.until, job.polls = None, False
        if job.is_left:
            raise ClientLeft
