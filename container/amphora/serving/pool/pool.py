"""The front's side of the model workers: one bounded queue, and the workers that serve it.

An idle worker takes what waits, up to a batch: while it predicts, the next batch gathers, so that
batches grow with the load and nobody waits without load. A worker whose device computes takes the
next batch meanwhile, if that pays (`amphora.serving.worker.ahead`). A worker that dies is replaced;
what it was answering is tried once more, each request alone, if the handlers declare their
predictions pure (`predict_batch_fn`), and is answered 500 otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from amphora.serving.metrics import Metrics
from amphora.serving.pool.connections import Call, Reply, WorkerConnection
from amphora.serving.pool.sessions import HEADER, SessionGone, Sessions
from amphora.serving.pool.spawner import Loaded, ModelError, Spawner
from amphora.serving.protocol import batching, framing
from amphora.serving.protocol.media_types import Fault
from amphora.serving.settings import ServerSettings

LOG = logging.getLogger("amphora.pool")
# Failed starts in a row for each worker, none living, after which the container gives up.
_GIVE_UP_AFTER = 5
_LONGEST_PAUSE = 10.0
# Between the death of a worker that had just started and its replacement.
_RESTART_PAUSE = 0.1
_JUST_STARTED_SECONDS = 5.0
# Batches' worth of requests that a worker has at once at most, where it takes turns.
_BATCHES_AT_WORK = 4
# How long a worker is at work before it gets requests beside. Batches that take less are better
# waited for: a request each time makes small calls, a third fewer in all.
_LONG_WORK_SECONDS = 0.25
# Of what a batch takes: how long after its begin the next one gathers, where it is sent while the
# device computes. Then half of that time is left to read it and to make its tokens.
_AHEAD_SHARE = 0.5


class Pool:
    """The workers of one model, and the requests that wait for them."""

    def __init__(
        self, settings: ServerSettings, environ: Mapping[str, str], metrics: Metrics
    ) -> None:
        self.settings = settings
        self.sessions = Sessions(settings.session_lifetime)
        self._metrics = metrics
        self._spawner = Spawner(settings, environ)
        self._queue: deque[Call] = deque()
        self._connections: dict[int, WorkerConnection] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._failures = 0
        self._closing = False
        self._loaded: Loaded | None = None
        self._delay = batching.BatchDelay(settings.max_delay)
        self._alarm: asyncio.TimerHandle | None = None
        self.failed: asyncio.Future[ModelError] = asyncio.get_running_loop().create_future()
        """Done when the pool has given up; the reason is its result."""
        self.loaded = asyncio.Event()
        """Set when the first worker is ready."""

    @property
    def is_ready(self) -> bool:
        """Whether a worker lives that has loaded the model and has warmed up."""
        return bool(self._connections)

    @property
    def merges(self) -> bool:
        """Whether the loaded handlers let requests be predicted together."""
        return self._loaded is not None and self._loaded.batches

    @property
    def living(self) -> int:
        """Workers that can take requests."""
        return len(self._connections)

    @property
    def description(self) -> Mapping[str, Any]:
        """What the handlers say of the model; empty before it is loaded."""
        return self._loaded.description if self._loaded is not None else {}

    @property
    def oldest(self) -> float:
        """Seconds that the oldest request in the queue has waited; 0 if there is none."""
        queues = (self._queue, *(connection.bound for connection in self._connections.values()))
        arrived = [call.arrived for queue in queues for call in queue if not call.reply.done()]
        return time.monotonic() - min(arrived) if arrived else 0.0

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        bound = sum(len(connection.bound) for connection in self._connections.values())
        return len(self._queue) + bound

    def start(self) -> None:
        """Begin to load the model; `loaded` and `failed` tell the outcome.

        The first worker goes ahead, so that a model that cannot be loaded is reported once.
        """
        self._keepers = [asyncio.create_task(self._keep(0))]

    async def close(self) -> None:
        """End all workers; what they have not answered is lost, so drain first."""
        self._closing = True
        for keeper in self._keepers:
            keeper.cancel()
        for connection in self._connections.values():
            connection.kill()
        self._spawner.close()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    def submit(self, call: Call) -> None:
        """Queue a request. Raises Fault at once: not ready, too many wait, or no such session."""
        if self._loaded is None:
            raise Fault(503, "not_ready", "The model is not loaded yet.")
        if (waiting := self.waiting) >= self.settings.queue_limit:
            raise Fault(503, "overloaded", f"{waiting} requests wait already.")
        if not (header := call.headers.get(HEADER)):
            self._queue.append(call)
        else:
            # A session's request goes to the worker that keeps the session.
            workers = {connection.pid: connection for connection in self._connections.values()}
            if not workers:
                raise Fault(503, "not_ready", "The model is being restarted.")
            for session in self.sessions.expired():
                if session.worker in workers:
                    workers[session.worker].tell({"op": "forget", "session": session.id})
            call.session = self.sessions.find(header, list(workers))
            assert call.session is not None
            workers[call.session.worker].bound.append(call)
        self._dispatch()

    def cancel(self, call: Call) -> None:
        """The client is gone: drop the call from its queue, or tell the worker that answers it."""
        connections = self._connections.values()
        for queue in (self._queue, *(connection.bound for connection in connections)):
            with contextlib.suppress(ValueError):
                queue.remove(call)
        for connection in connections:
            if connection.calls.pop(call.id, None) is not None:
                connection.tell({"op": "cancel", "id": call.id})
                if connection.takes_turns:
                    # A job that stood still, since its client was slow, ends now: that is work.
                    connection.expect(self.settings.timeout, self._hangs)

    def took(self, call: Call) -> None:
        """The client has taken a chunk of a stream."""
        for connection in self._connections.values():
            if connection.calls.get(call.id) is call:
                connection.note_taken(call)

    def _dispatch(self) -> None:
        """Give what waits to idle workers, or set an alarm if it pays to wait for more."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        for connection in self._connections.values():
            is_free = connection.idle or connection.is_open or connection.ahead
            if is_free and connection.bound and (call := _next_waiting(connection.bound)):
                self._send(connection, [call])
        idle = [connection for connection in self._connections.values() if connection.idle]
        if not self._queue:
            return
        if not idle:
            self._give_ahead()
            if self._queue:
                self._give_beside()
            return
        seconds = self._delay.wait(len(self._queue), self._queue[0].arrived, time.monotonic())
        if seconds > 0:
            self._wake(seconds)
            return
        for place, connection in enumerate(idle):
            fair_share = -(-len(self._queue) // (len(idle) - place))
            most = min(self.settings.batch_size, fair_share) if self.merges else 1
            batch: list[Call] = []
            while len(batch) < most and (call := _next_waiting(self._queue)):
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
        self._alarm = loop.call_later(seconds, self._dispatch)

    def _give_ahead(self) -> None:
        """Give whole batches to workers whose device computes the one that they have, so that they
        read it meanwhile; or set an alarm for when they should have it."""
        most, bound = self.settings.batch_size, 2 * self.settings.max_body
        takers = [
            each
            for each in self._connections.values()
            if each.ahead and each.has_room(_BATCHES_AT_WORK * most, bound)
        ]
        # What has killed a worker before, waits for one that has nothing else.
        if not takers or any(call.retried for call in self._queue):
            return
        takers.sort(key=lambda each: len(each.calls))
        now = time.monotonic()
        for place, connection in enumerate(takers):
            share = min(most, -(-len(self._queue) // (len(takers) - place)))
            if not self._queue or share < connection.ahead:
                continue
            if share < most:
                since = max(self._queue[0].arrived, connection.busy_since)
                seconds = self._delay.wait(len(self._queue), since, now, _AHEAD_SHARE)
                if seconds > 0:
                    self._wake(seconds)
                    continue
            batch: list[Call] = []
            size = sum(len(call.body) for call in connection.calls.values())
            while len(batch) < share and size < bound and (call := _next_waiting(self._queue)):
                batch.append(call)
                size += len(call.body)
            if batch:
                self._send(connection, batch)

    def _give_beside(self) -> None:
        """Give what waits to workers that are at long work and take turns, the least busy first."""
        most = _BATCHES_AT_WORK * self.settings.batch_size
        now = time.monotonic()
        ages = [now - each.busy_since for each in self._connections.values() if each.takes_turns]
        if younger := [age for age in ages if age < _LONG_WORK_SECONDS]:
            pause = _LONG_WORK_SECONDS - max(younger)
            self._wake(pause)
        calls = [call for call in self._queue if not call.retried and not call.reply.done()]
        # What has killed a worker before, goes to one that has nothing else: the least busy is
        # spared, so that there will be one.
        spared = int(any(call.retried for call in self._queue))
        for call in calls:
            connections = sorted(self._connections.values(), key=lambda each: len(each.calls))
            room = [
                each
                for each in connections[spared:]
                if each.is_open
                and now - each.busy_since >= _LONG_WORK_SECONDS
                and each.has_room(most, 2 * self.settings.max_body)
            ]
            if not room:
                return
            self._queue.remove(call)
            self._send(room[0], [call])

    def _send(self, connection: WorkerConnection, batch: list[Call]) -> None:
        for call in batch:
            if call.trace is not None:
                waited = time.monotonic() - call.arrived
                call.headers = call.trace.sent(call.headers, connection.pid, len(batch), waited)
        connection.send(batch)
        connection.expect(self.settings.timeout, self._hangs)
        self._metrics.batch_size.observe(len(batch))
        for call in batch:
            self._metrics.queued_seconds.observe(connection.sent_at - call.arrived)

    def _hangs(self, connection: WorkerConnection) -> None:
        LOG.error(
            "Model worker %d has not answered for %g s; it is replaced.",
            connection.pid, self.settings.timeout,
        )  # fmt: skip
        connection.kill()

    async def _keep(self, index: int) -> None:
        """Keep one worker alive, for as long as the pool is open."""
        while not self._closing:
            try:
                sock, pid, loaded = await self._spawner.worker(index)
                reader, writer = await asyncio.open_connection(sock=sock)
            except (ModelError, EOFError, OSError) as error:
                if self._gives_up(error):
                    return
                await asyncio.sleep(min(_LONGEST_PAUSE, _RESTART_PAUSE * 2**self._failures))
                continue
            if self._loaded is None:
                LOG.info("The model is loaded (%.1f s).", loaded.seconds)
            self._loaded = loaded
            self._failures = 0
            connection = WorkerConnection(index, pid, reader, writer, loaded.turns)
            self._connections[index] = connection
            self.loaded.set()
            for other in range(len(self._keepers), self.settings.workers):
                self._keepers.append(asyncio.create_task(self._keep(other)))
            try:
                self._dispatch()
                await self._listen(connection)
            finally:
                self._lose(connection)
            self._metrics.restarts.inc()
            if time.monotonic() - connection.born < _JUST_STARTED_SECONDS:
                await asyncio.sleep(_RESTART_PAUSE)

    def _gives_up(self, error: Exception) -> bool:
        """Whether to stop trying: at once before the first success, else after several failures."""
        self._failures += 1
        never_loaded = self._loaded is None and isinstance(error, ModelError)
        most_failures = _GIVE_UP_AFTER * self.settings.workers
        is_hopeless = self._failures >= most_failures and not self._connections
        if not never_loaded and not is_hopeless:
            LOG.error("A model worker could not be started: %s", error)
            return False
        if not self.failed.done():
            self.failed.set_result(
                error if isinstance(error, ModelError) else ModelError(f"No worker starts: {error}")
            )
        return True

    async def _listen(self, connection: WorkerConnection) -> None:
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                header, body = await framing.read(connection.reader)
                if header.get("op") == "begun":
                    connection.begun = header["batch"]
                elif header.get("op") == "hangs":
                    self._hangs(connection)
                elif header.get("op") in ("idle", "open", "computes", "rests"):
                    self._note(connection, header)
                else:
                    connection.watch(self.settings.timeout, self._hangs)
                    await self._deliver(connection, header, body)

    def _note(self, connection: WorkerConnection, header: framing.Header) -> None:
        """Heed where a worker stands: `idle`, `open` for requests beside those that it has,
        `computes` where all of these are merged, and others had better be, too, or `rests` where it
        waits for clients that read slowly."""
        self._metrics.calls.inc(header["calls"])
        self._metrics.tokens.inc(header["tokens"])
        self._metrics.padding.inc(header["padded"] - header["tokens"])
        self._metrics.slices.inc(header["slices"])
        if connection.batch != header["batch"]:
            # Another batch is on its way.
            connection.watch(self.settings.timeout, self._hangs)
            return
        connection.is_open = header["op"] in ("open", "rests")
        connection.ahead = header.get("ahead", 0)
        if connection.ahead and connection.begun_alone != connection.batch:
            self._learn(*connection.begin_alone())
        if header["op"] == "open":
            # A long request says nothing about how long a batch takes.
            connection.sent_size = connection.size_at_work = 0
        if header["op"] in ("open", "computes"):
            connection.watch(self.settings.timeout, self._hangs)
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
        self._dispatch()

    def _learn(self, size: int, seconds: float) -> None:
        """A batch of a worker that takes batches ahead is done."""
        if size:
            self._delay.learn(size, seconds, time.monotonic())

    async def _deliver(
        self, connection: WorkerConnection, header: framing.Header, body: bytes
    ) -> None:
        """Pass an answer, an error or a chunk on to the call that waits for it."""
        call = connection.calls.get(header["id"])
        if call is None:
            return
        if call.session and header.get("closed"):
            self.sessions.end(call.session.id)
        if not header.get("more"):
            del connection.calls[call.id]
        if call.trace is not None:
            if not header.get("more"):
                call.trace.answered(header.get("error", {}).get("code", ""))
            elif "status" in header:
                call.trace.streams()
        if "error" in header:
            call.fail(Fault(header["status"], header["error"]["code"], header["error"]["message"]))
        elif "status" in header:
            if not call.reply.done():
                call.reply.set_result(Reply.of(header, body))
        elif not call.reply.cancelled() and call.reply.exception() is None:
            chunks = call.reply.result().chunks
            assert chunks is not None
            if connection.takes_turns:
                # It sends no more than there is room for.
                chunks.put_nowait(body if header["more"] else None)
                return
            connection.unwatch()
            try:
                # A full queue stops the reading here, so that the worker waits for a slow client.
                chunk = body if header["more"] else None
                await asyncio.wait_for(chunks.put(chunk), self.settings.timeout)
            except asyncio.TimeoutError:
                self.cancel(call)
            connection.watch(self.settings.timeout, self._hangs)

    def _lose(self, connection: WorkerConnection) -> None:
        """A worker is gone: its calls are tried once more, or failed."""
        connection.close()
        self._connections.pop(connection.index, None)
        if self._closing:
            return
        LOG.warning(
            "Model worker %d is gone, with %d requests.", connection.pid, len(connection.calls)
        )
        for call in (*reversed(connection.calls.values()), *connection.bound):
            # A repetition does no harm if nothing was done yet, or once if predictions are pure.
            is_begun = 0 < call.batch <= connection.begun
            may_repeat = not is_begun or (
                self.merges and not call.retried and not call.reply.done()
            )
            if call.session is not None:
                call.fail(SessionGone(call.session.id))
                continue
            call.retried = call.retried or is_begun
            if may_repeat:
                self._queue.appendleft(call)
            else:
                call.fail(
                    Fault(500, "worker_died", "The model's process died during this request.")
                )
        self._dispatch()


def _next_waiting(queue: deque[Call]) -> Call | None:
    """Take the next call whose client still waits: not gone, and not past its deadline."""
    while queue:
        if not (call := queue.popleft()).reply.done():
            return call
    return None


def too_late(timeout: float) -> Fault:
    """The answer to a request whose deadline has passed."""
    return Fault(504, "deadline_exceeded", f"No answer within {timeout:g} s.")
