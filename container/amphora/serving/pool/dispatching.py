"""Sends waiting requests to workers.

An idle worker takes the waiting requests, up to one batch. While it predicts, the next batch
collects, so that batches grow with the load and a single request never waits.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque

from amphora.common.devices import CUDA
from amphora.serving.pool.connections import Call, WorkerConnection
from amphora.serving.protocol import batching
from amphora.serving.protocol.media_types import Fault
from amphora.serving.protocol.messages import State
from amphora.serving.settings import ServerSettings
from amphora.serving.telemetry import Metrics

# The most requests that a worker with turns has at once, in batches.
_BATCHES_AT_WORK = 4
# How long a worker is busy before it gets more requests. Requests that were sent at once made small
# calls of the model, and a third fewer answers in all.
_LONG_WORK_SECONDS = 0.25


class Dispatcher:
    """The queue of one model, its workers, and the state of each."""

    def __init__(self, settings: ServerSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self.queue: deque[Call] = deque()
        self.connections: dict[int, WorkerConnection] = {}
        """The living workers, by their index."""
        self.merges = False
        """Whether the loaded handlers let requests be predicted together."""
        self._delay = batching.BatchDelay(settings.max_delay)
        self._alarm: asyncio.TimerHandle | None = None

    def dispatch(self) -> None:
        """Send waiting requests to workers, or set an alarm if it pays to wait for more."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if not self.queue:
            return
        idle = [connection for connection in self.connections.values() if connection.idle]
        if idle:
            seconds = self._delay.wait(len(self.queue), self.queue[0].arrived, time.monotonic())
            if seconds > 0:
                self._wake(seconds)
                return
            for index, connection in enumerate(idle):
                fair_share = -(-len(self.queue) // (len(idle) - index))
                most = min(self._settings.batch_size, fair_share) if self.merges else 1
                batch: list[Call] = []
                while self.queue and len(batch) < most:
                    if (call := self.queue.popleft()).reply.done():
                        continue  # Its client has left, or its deadline is past.
                    batch.append(call)
                    # A request whose worker died comes first in the queue, and is predicted alone.
                    if call.retried:
                        break
                if batch:
                    self._send(connection, batch)
            return
        takers = [worker for worker in self.connections.values() if worker.takes_turns]
        if self._settings.device_kind == CUDA and self.merges:
            self._send_ahead(takers)
        # Workers that take turns and have been busy for long get more.
        now = time.monotonic()
        ages = {worker.index: now - worker.busy_since for worker in takers}
        if younger := [age for age in ages.values() if age < _LONG_WORK_SECONDS]:
            self._wake(_LONG_WORK_SECONDS - max(younger))
        room = [w for w in takers if w.is_open and ages[w.index] >= _LONG_WORK_SECONDS]
        # Usually no worker has room; the queue may be long.
        if not room:
            return
        # A request whose worker died waits for an idle worker: the least busy one gets no others.
        if any(call.retried for call in self.queue):
            room = [worker for worker in room if worker is not min(takers, key=_load)]
        most = _BATCHES_AT_WORK * self._settings.batch_size
        for call in [call for call in self.queue if not call.retried and not call.reply.done()]:
            room = [w for w in room if w.has_room(most, 2 * self._settings.max_body)]
            if not room:
                return
            self.queue.remove(call)
            self._send(min(room, key=_load), [call])

    def _send_ahead(self, takers: list[WorkerConnection]) -> None:
        """Send full batches, which a worker reads while its device computes the one before."""
        size = self._settings.batch_size
        for worker in sorted(takers, key=_load):
            some = list(itertools.islice(self.queue, size))
            is_begun = worker.begun == worker.batch
            if len(some) < size or any(call.retried or call.reply.done() for call in some):
                return
            if is_begun and worker.has_room(2 * size, 2 * self._settings.max_body):
                for _ in some:
                    self.queue.popleft()
                self._send(worker, some)

    def _wake(self, seconds: float) -> None:
        """Dispatch again after this time, if nothing else does before."""
        self._alarm = asyncio.get_running_loop().call_later(seconds, self.dispatch)

    def _send(self, connection: WorkerConnection, batch: list[Call]) -> None:
        connection.send(batch)
        connection.expect()
        self._metrics.batch_size.observe(len(batch))
        for call in batch:
            self._metrics.queued_seconds.observe(connection.sent_at - call.arrived)

    def requeue(self, connection: WorkerConnection) -> None:
        """Queue the calls of a worker that has ended again, or fail them."""
        begun = [call for call in connection.calls.values() if 0 < call.batch <= connection.begun]
        # A request that was at work alone is taken for the cause of the worker's death.
        may_repeat = self.merges and len(begun) > 1
        for call in reversed(connection.calls.values()):
            if call not in begun or (may_repeat and not call.retried and not call.reply.done()):
                call.retried = call.retried or call in begun
                self.queue.appendleft(call)
            else:
                fault = Fault(500, "worker_died", "The model's process died during this request.")
                call.fail(fault)
        self.dispatch()

    def note(self, connection: WorkerConnection, report: State) -> None:
        """Apply a worker's report of its state."""
        self._metrics.calls.inc(report.calls)
        self._metrics.tokens.inc(report.tokens)
        self._metrics.padding.inc(report.padded - report.tokens)
        self._metrics.slices.inc(report.slices)
        if report.state == "begun":
            connection.begun = report.batch
            if self._settings.device_kind == CUDA:
                self.dispatch()
            return
        if connection.batch != report.batch:
            # The report is older than the last batch.
            connection.watch()
            return
        connection.is_open = report.state != "idle"
        if report.state == "open":
            # With long requests at work, its time does not tell how long a batch takes.
            connection.sent_size = 0
            connection.watch()
        else:
            connection.unwatch()
        if report.state == "idle":
            for call in connection.calls.values():
                call.fail(Fault(500, "handler_failed", "The worker gave no answer."))
            connection.calls = {}
            connection.idle = True
            if connection.sent_size:
                now = time.monotonic()
                self._delay.learn(connection.sent_size, now - connection.sent_at, now)
        self.dispatch()


def _load(connection: WorkerConnection) -> int:
    return len(connection.calls)
