"""Which waiting requests go to which worker, and when.

An idle worker takes what waits, up to a batch: while it predicts, the next batch gathers, so that
batches grow with the load and nobody waits without load. A worker whose device computes takes the
next batch meanwhile, if that pays (`amphora.serving.worker.ahead`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from amphora.serving.metrics import Metrics
from amphora.serving.pool.connections import Call, WorkerConnection
from amphora.serving.protocol import batching, framing
from amphora.serving.protocol.media_types import Fault
from amphora.serving.settings import ServerSettings

# Batches' worth of requests that a worker has at once at most, where it takes turns.
_BATCHES_AT_WORK = 4
# How long a worker is at work before it gets requests beside. Batches that take less are better
# waited for: a request each time makes small calls, a third fewer in all.
_LONG_WORK_SECONDS = 0.25
# Of what a batch takes: how long after its begin the next one gathers, where it is sent while the
# device computes. Then half of that time is left to read it and to make its tokens.
_AHEAD_SHARE = 0.5


class Dispatcher:
    """The queue of one model, the workers that serve it, and what each of them is doing."""

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

    @property
    def queues(self) -> list[deque[Call]]:
        """That of all workers, and those of sessions, which wait for one."""
        return [self.queue, *(connection.bound for connection in self.connections.values())]

    def dispatch(self) -> None:
        """Give what waits to idle workers, or set an alarm if it pays to wait for more."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        for connection in self.connections.values():
            is_free = connection.idle or connection.is_open or connection.ahead
            if is_free and connection.bound and (call := _next_waiting(connection.bound)):
                self._send(connection, [call])
        idle = [connection for connection in self.connections.values() if connection.idle]
        if not self.queue:
            return
        if not idle:
            self._give_ahead()
            if self.queue:
                self._give_beside()
            return
        seconds = self._delay.wait(len(self.queue), self.queue[0].arrived, time.monotonic())
        if seconds > 0:
            self._wake(seconds)
            return
        for place, connection in enumerate(idle):
            fair_share = -(-len(self.queue) // (len(idle) - place))
            most = min(self._settings.batch_size, fair_share) if self.merges else 1
            batch: list[Call] = []
            while len(batch) < most and (call := _next_waiting(self.queue)):
                batch.append(call)
                # What has already killed a worker stands first in the queue; it is predicted alone.
                if call.retried:
                    break
            if batch:
                self._send(connection, batch)

    def _wake(self, seconds: float) -> None:
        """Dispatch again then, if not before."""
        loop = asyncio.get_running_loop()
        if self._alarm is not None:
            if self._alarm.when() <= loop.time() + seconds:
                return
            self._alarm.cancel()
        self._alarm = loop.call_later(seconds, self.dispatch)

    def _give_ahead(self) -> None:
        """Give whole batches to workers whose device computes the one that they have, so that they
        read it meanwhile; or set an alarm for when they should have it."""
        most, bound = self._settings.batch_size, 2 * self._settings.max_body
        takers = [
            each
            for each in self.connections.values()
            if each.ahead and each.has_room(_BATCHES_AT_WORK * most, bound)
        ]
        # What has killed a worker before, waits for one that has nothing else.
        if not takers or any(call.retried for call in self.queue):
            return
        takers.sort(key=lambda each: len(each.calls))
        now = time.monotonic()
        for place, connection in enumerate(takers):
            share = min(most, -(-len(self.queue) // (len(takers) - place)))
            if not self.queue or share < connection.ahead:
                continue
            if share < most:
                since = max(self.queue[0].arrived, connection.busy_since)
                seconds = self._delay.wait(len(self.queue), since, now, _AHEAD_SHARE)
                if seconds > 0:
                    self._wake(seconds)
                    continue
            batch: list[Call] = []
            size = sum(len(call.body) for call in connection.calls.values())
            while len(batch) < share and size < bound and (call := _next_waiting(self.queue)):
                batch.append(call)
                size += len(call.body)
            if batch:
                self._send(connection, batch)

    def _give_beside(self) -> None:
        """Give what waits to workers that are at long work and take turns, the least busy first."""
        most = _BATCHES_AT_WORK * self._settings.batch_size
        now = time.monotonic()
        ages = [now - each.busy_since for each in self.connections.values() if each.takes_turns]
        if younger := [age for age in ages if age < _LONG_WORK_SECONDS]:
            pause = _LONG_WORK_SECONDS - max(younger)
            self._wake(pause)
        # As a rule nobody takes any: then the queue, which may be long, is not looked through.
        if not any(
            each.is_open and now - each.busy_since >= _LONG_WORK_SECONDS
            for each in self.connections.values()
        ):
            return
        calls = [call for call in self.queue if not call.retried and not call.reply.done()]
        # What has killed a worker before, goes to one that has nothing else: the least busy is
        # spared, so that there will be one.
        spared = int(any(call.retried for call in self.queue))
        for call in calls:
            connections = sorted(self.connections.values(), key=lambda each: len(each.calls))
            room = [
                each
                for each in connections[spared:]
                if each.is_open
                and now - each.busy_since >= _LONG_WORK_SECONDS
                and each.has_room(most, 2 * self._settings.max_body)
            ]
            if not room:
                return
            self.queue.remove(call)
            self._send(room[0], [call])

    def _send(self, connection: WorkerConnection, batch: list[Call]) -> None:
        for call in batch:
            if call.trace is not None:
                waited = time.monotonic() - call.arrived
                call.headers = call.trace.sent(call.headers, connection.pid, len(batch), waited)
        connection.send(batch)
        connection.expect()
        self._metrics.batch_size.observe(len(batch))
        for call in batch:
            self._metrics.queued_seconds.observe(connection.sent_at - call.arrived)

    def note(self, connection: WorkerConnection, header: framing.Header) -> None:
        """Heed where a worker stands: `idle`, `open` for requests beside those that it has,
        `computes` where all of these are merged, and others had better be, too, or `rests` where it
        waits for clients that read slowly."""
        self._metrics.calls.inc(header["calls"])
        self._metrics.tokens.inc(header["tokens"])
        self._metrics.padding.inc(header["padded"] - header["tokens"])
        self._metrics.slices.inc(header["slices"])
        if connection.batch != header["batch"]:
            # Another batch is on its way.
            connection.watch()
            return
        connection.is_open = header["op"] in ("open", "rests")
        connection.ahead = header.get("ahead", 0)
        if connection.ahead and connection.begun_alone != connection.batch:
            self._learn(*connection.begin_alone())
        if header["op"] == "open":
            # A long request says nothing about how long a batch takes.
            connection.sent_size = connection.size_at_work = 0
        if header["op"] in ("open", "computes"):
            connection.watch()
        else:
            connection.unwatch()
        if header["op"] == "idle":
            for call in connection.calls.values():
                call.fail(Fault(500, "handler_failed", "The worker gave no answer."))
            connection.calls = {}
            connection.idle = True
            if "ahead" in header:
                if connection.begun_alone == connection.batch:
                    seconds = time.monotonic() - connection.busy_since
                    self._learn(connection.size_at_work, seconds)
                connection.size_at_work = 0
            elif connection.sent_size:
                now = time.monotonic()
                self._delay.learn(connection.sent_size, now - connection.sent_at, now)
        self.dispatch()

    def _learn(self, size: int, seconds: float) -> None:
        """A batch of a worker that takes batches ahead is done."""
        if size:
            self._delay.learn(size, seconds, time.monotonic())


def _next_waiting(queue: deque[Call]) -> Call | None:
    """Take the next call whose client still waits: not gone, and not past its deadline."""
    while queue:
        if not (call := queue.popleft()).reply.done():
            return call
    return None
