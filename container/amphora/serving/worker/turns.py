"""Jobs of one worker that take turns: each has a thread, and one thread runs at a time.

A prediction of many calls of the model says `pause()` between them. Where another job waits, or
something has come from the front, its thread stands still there until it is its turn again. So
handlers that pause need no locks, and a short request waits for one call instead of for thousands.
Where a job waits for a device it says so (`pause(is_done, computes=True)`): the next batch becomes
tokens meanwhile, and is given to the device before the answers of the present one are written.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

# A sign of life goes to the front at least so often while one job runs alone.
_SIGN_SECONDS = 0.2
# What a job may have before it is no longer a short one: so many seconds, or else turns, one of
# which may take longer. As much may pass those at work by, where short ones keep coming.
_WORK_SECONDS = 0.1
_WORK_TURNS = 5
# Threads that are kept for the jobs that come next.
_SPARE_THREADS = 8


class Left(BaseException):
    """Raised where a job pauses whose client has gone; no handler of `Exception` holds it up."""


class TakesLong(BaseException):
    """Raised where work outside of a job pauses that has taken more than its time."""


class Job:
    """Work that takes turns with others."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.until: Callable[[], bool] | None = None
        """What it waits for; None: only for its turn."""
        self.turns = 0
        self.seconds = 0.0
        """What its turns have taken."""
        self.computes = False
        """Whether that is a device, which nobody has to tell to go on."""
        self.since = 0.0
        """When it began to wait for that."""
        self.is_left = False
        self.is_done = False
        self.error: BaseException | None = None
        self.thread: _Thread | None = None

    @property
    def is_ready(self) -> bool:
        """Whether a turn would bring it further."""
        if self.until is None or self.is_left:
            return True
        try:
            return self.until()
        except Exception:
            # It asks again itself when it has its turn: the error is its own.
            return True

    @property
    def is_short(self) -> bool:
        """Whether it has worked little."""
        return self.seconds < _WORK_SECONDS or self.turns < _WORK_TURNS


class _Thread(threading.Thread):
    """Runs jobs, one after the other, whenever it holds the turn."""

    def __init__(self, turns: Turns) -> None:
        super().__init__(name="turns", daemon=True)
        self.turn = threading.Semaphore(0)
        self.job: Job | None = None
        self._turns = turns

    def run(self) -> None:
        while True:
            self.turn.acquire()
            if (job := self.job) is None:
                return
            try:
                job.work()
            except Left:
                pass
            except BaseException as error:
                job.error = error
            job.is_done, self.job, job.thread = True, None, None
            self._turns.give_back()


class Turns:
    """The jobs of a worker. All but `pause` and `give_back` is called by its main thread."""

    def __init__(self, is_wanted: Callable[[], bool]) -> None:
        """
        Args:
            is_wanted: Whether the main thread has something to do before the next turn.
        """
        self.slices = 0
        """Turns that were given."""
        self.has_device = False
        """Whether a job has ever waited for a device."""
        self.computed = 0.0
        """Seconds that a device took, as far as was seen: never more than passed."""
        self._computed_at = 0.0
        """When it was last seen that a device had done what a job had given it."""
        self._is_wanted = is_wanted
        self._new: deque[Job] = deque()
        self._jobs: deque[Job] = deque()
        """Those that have had a turn."""
        self._worked = 0.0
        """When the one that had waited longest had its last."""
        self._passed = 0
        """Turns of others since then."""
        self._spare: list[_Thread] = []
        self.outside_until: float | None = None
        """CPU time of the main thread after which work outside of jobs ends at its next pause."""
        self._back = threading.Semaphore(0)
        self._running: Job | None = None
        self._since = 0.0

    def __len__(self) -> int:
        return len(self._new) + len(self._jobs)

    @property
    def is_outside(self) -> bool:
        """Whether no job runs: what is done now is done in one piece."""
        return self._running is None

    @property
    def is_runnable(self) -> bool:
        """Whether a job could go on."""
        return bool(self._new) or any(job.is_ready for job in self._jobs)

    @property
    def jobs(self) -> list[Job]:
        """All that are not done."""
        return [*self._new, *self._jobs]

    @property
    def computing(self) -> float | None:
        """Seconds since a device has last done something for a job, while one waits for it; None if
        none does."""
        waiting = [job.since for job in self._jobs if job.computes]
        return time.monotonic() - max(self._computed_at, min(waiting)) if waiting else None

    def add(self, works: list[Callable[[], None]]) -> list[Job]:
        """New jobs, which as a rule have their first turns before those that are at work."""
        jobs = [Job(work) for work in works]
        self._new.extend(jobs)
        return jobs

    def leave(self, job: Job) -> None:
        """Nobody waits for the job any longer: it ends where it stands."""
        job.is_left = True
        if job in self._new:
            self._new.remove(job)
            job.is_done = True

    def give(self) -> None:
        """Give the next job its turn. Raises what ended it, if that was not its client's leaving.

        First come jobs that have waited for something that is there now: they only deliver. Then
        new ones, and those that have worked little, so that short work is soon over. But who has
        waited longest has a turn now and then however much of that comes. If a device has
        done all that it was given, new ones come first: it computes while the others deliver.
        """
        ready = [job for job in self._jobs if job.is_ready]
        if not ready and not self._new:
            return
        oldest = ready[0] if ready else None
        is_late = time.monotonic() - self._worked > _WORK_SECONDS and self._passed >= _WORK_TURNS
        is_due = oldest is not None and is_late
        is_busy = any(job.computes and job not in ready for job in self._jobs)
        job = next(
            (
                job
                for job in ready
                if job.until is not None and (is_busy or not job.computes or not self._new)
            ),
            None,
        )
        if job is None and self._new and not is_due:
            job = self._new.popleft()
        else:
            if job is None and not is_due:
                job = next((job for job in ready if job.is_short), None)
            job = job or ready[0]
            self._jobs.remove(job)
        if job.computes:
            now = time.monotonic()
            self.computed += now - max(job.since, self._computed_at)
            self._computed_at = now
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
            self._worked, self._passed = now, 0
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
        """The running job stands still, or has ended."""
        self._back.release()

    def pause(self, until: Callable[[], bool] | None = None, *, computes: bool = False) -> None:
        """Let others have their turn, and wait for the next one of the job that runs.

        Outside of a job, and where nobody else waits, it returns at once, whatever `until` says.

        Args:
            until: What the job waits for, asked between other jobs' turns; None: only its turn.
            computes: Whether that is a device, which comes to its end without being told to. It is
                asked again and again then, and must be cheap to ask.

        Raises:
            Left: The client has gone.
            TakesLong: There is no job, and `outside_until` has passed.
        """
        self.has_device |= computes
        job = self._running
        if job is None and self.outside_until is not None:
            if time.thread_time() > self.outside_until:
                raise TakesLong
            return
        if job is None or job.thread is None or threading.current_thread() is not job.thread:
            return
        if until is None or until():
            is_alone = not self.is_runnable and not self._is_wanted()
            if is_alone and time.monotonic() - self._since < _SIGN_SECONDS:
                return
        job.until, job.computes, job.since = until, computes, time.monotonic()
        turn = job.thread.turn
        self.give_back()
        turn.acquire()
        job.until, job.computes = None, False
        if job.is_left:
            raise Left
