"""The front's side of the model workers: one bounded queue, and the workers that it is served by.

An idle worker takes what waits, up to a batch: while it predicts, the next batch gathers, so that
batches grow with the load and nobody waits when there is none. A worker that dies is replaced; what
it was answering is tried once more, each request alone, where the handlers declare their
predictions pure (`predict_batch_fn`), and is answered 500 elsewhere.
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
from amphora.serving.pool.connections import Call, Link, Reply
from amphora.serving.pool.sessions import HEADER, SessionGone, Sessions
from amphora.serving.pool.spawner import Loaded, ModelError, Nursery
from amphora.serving.protocol import batching, framing
from amphora.serving.protocol.media_types import Fault
from amphora.serving.settings import ServerSettings

LOG = logging.getLogger("amphora.pool")
# Failed loads in a row, no worker living, after which the container gives up.
_GIVE_UP_AFTER = 5
_LONGEST_PAUSE = 10.0
# Between the death of a worker that has just begun and its replacement.
_BREATH = 0.1
_YOUNG = 5.0


class Pool:
    """The workers of one model, and the requests that wait for them."""

    def __init__(
        self, settings: ServerSettings, environ: Mapping[str, str], metrics: Metrics
    ) -> None:
        self.settings = settings
        self.sessions = Sessions(settings.session_lifetime)
        self._metrics = metrics
        self._nursery = Nursery(settings, environ)
        self._queue: deque[Call] = deque()
        self._links: dict[int, Link] = {}
        self._slots: list[asyncio.Task[None]] = []
        self._failures = 0
        self._closing = False
        self._loaded: Loaded | None = None
        self._patience = batching.Patience(settings.max_delay)
        self._alarm: asyncio.TimerHandle | None = None
        self.failed: asyncio.Future[ModelError] = asyncio.get_running_loop().create_future()
        """Done when the pool has given up; the reason is its result."""
        self.loaded = asyncio.Event()
        """Set when the first worker is ready."""

    @property
    def is_ready(self) -> bool:
        """Whether a worker lives that has loaded the model and has warmed up."""
        return bool(self._links)

    @property
    def merges(self) -> bool:
        """Whether the loaded handlers let requests be predicted together."""
        return self._loaded is not None and self._loaded.batches

    @property
    def living(self) -> int:
        """Workers that can take requests."""
        return len(self._links)

    @property
    def description(self) -> Mapping[str, Any]:
        """What the handlers say of the model; empty before it is loaded."""
        return self._loaded.description if self._loaded is not None else {}

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue) + sum(len(link.bound) for link in self._links.values())

    def start(self) -> None:
        """Begin to load the model; `loaded` and `failed` tell how it goes.

        The first worker goes ahead, so that a model that cannot be loaded is said once.
        """
        self._slots = [asyncio.create_task(self._begin())]

    async def _begin(self) -> None:
        try:
            await self._nursery.prepare()
        except ModelError as error:
            self._gives_up(error)
        else:
            await self._keep(0)

    def _start_the_others(self) -> None:
        others = range(len(self._slots), self.settings.workers)
        self._slots += [asyncio.create_task(self._keep(index)) for index in others]

    async def close(self) -> None:
        """End all workers; what they have not answered is lost, so drain first."""
        self._closing = True
        for slot in self._slots:
            slot.cancel()
        for link in self._links.values():
            link.kill()
        self._nursery.close()
        await asyncio.gather(*self._slots, return_exceptions=True)

    def submit(self, call: Call) -> None:
        """Queue a request. Raises Fault at once: not ready, too many wait, or no such session."""
        if self._loaded is None:
            raise Fault(503, "not_ready", "The model is not loaded yet.")
        if (waiting := self.waiting) >= self.settings.queue_limit:
            raise Fault(503, "overloaded", f"{waiting} requests wait already.")
        if header := call.headers.get(HEADER):
            self._bind(call, header)
        else:
            self._queue.append(call)
        self._dispatch()

    def _bind(self, call: Call, header: str) -> None:
        """Give a session's request to the worker that keeps the session."""
        workers = {link.pid: link for link in self._links.values()}
        if not workers:
            raise Fault(503, "not_ready", "The model is being restarted.")
        for over in self.sessions.expired():
            if over.worker in workers:
                workers[over.worker].tell({"op": "forget", "session": over.id})
        call.session = self.sessions.find(header, list(workers))
        assert call.session is not None
        workers[call.session.worker].bound.append(call)

    def cancel(self, call: Call) -> None:
        """The client is gone: drop the call where it waits, or tell the worker that answers it."""
        for queue in (self._queue, *(link.bound for link in self._links.values())):
            with contextlib.suppress(ValueError):
                queue.remove(call)
        for link in self._links.values():
            if link.calls.pop(call.id, None) is not None:
                link.tell({"op": "cancel", "id": call.id})

    def _dispatch(self) -> None:
        idle = [link for link in self._links.values() if link.idle]
        for link in idle:
            if link.bound and (call := self._next(link.bound)):
                self._send(link, [call])
        idle = [link for link in idle if link.idle]
        if not idle or not self._queue or self._is_patient():
            return
        for place, link in enumerate(idle):
            if batch := self._take(len(idle) - place):
                self._send(link, batch)

    def _is_patient(self) -> bool:
        """Whether to wait for more to merge; then an alarm dispatches again."""
        oldest = self._queue[0].arrived
        delay = self._patience.wait(len(self._queue), oldest, time.monotonic())
        if delay and self._alarm is None:
            self._alarm = asyncio.get_running_loop().call_later(delay, self._wake)
        return delay > 0

    def _wake(self) -> None:
        self._alarm = None
        self._dispatch()

    def _take(self, sharers: int) -> list[Call]:
        """The next batch: a fair share of what waits, for that many idle workers."""
        most = min(self.settings.batch_size, -(-len(self._queue) // sharers)) if self.merges else 1
        batch: list[Call] = []
        while len(batch) < most and (call := self._next(self._queue)):
            batch.append(call)
            # What has already killed a worker, and stands first in the queue, is predicted alone.
            if call.retried:
                break
        return batch

    def _next(self, queue: deque[Call]) -> Call | None:
        """Take the next call whose client still waits: not gone, and not past its deadline."""
        while queue:
            if not (call := queue.popleft()).reply.done():
                return call
        return None

    def _send(self, link: Link, batch: list[Call]) -> None:
        link.send(batch)
        link.watch(self.settings.timeout, self._hangs)
        self._metrics.batch_size.observe(len(batch))
        for call in batch:
            self._metrics.queued_seconds.observe(link.sent_at - call.arrived)

    def _hangs(self, link: Link) -> None:
        seconds = self.settings.timeout
        LOG.error("Model worker %d has not answered for %g s; it is replaced.", link.pid, seconds)
        link.kill()

    async def _keep(self, index: int) -> None:
        """Keep one worker alive, for as long as the pool is open."""
        while not self._closing:
            try:
                link = await self._open(index)
            except (ModelError, EOFError, OSError) as error:
                if self._gives_up(error):
                    return
                await asyncio.sleep(min(_LONGEST_PAUSE, _BREATH * 2**self._failures))
                continue
            try:
                await self._listen(link)
            finally:
                self._lose(link)
            self._metrics.restarts.inc()
            if time.monotonic() - link.born < _YOUNG:
                await asyncio.sleep(_BREATH)

    async def _open(self, index: int) -> Link:
        sock, pid, loaded = await self._nursery.worker(index)
        if self._loaded is None:
            LOG.info("The model is loaded (%.1f s).", loaded.seconds)
        self._loaded = loaded
        self._failures = 0
        reader, writer = await asyncio.open_connection(sock=sock)
        link = self._links[index] = Link(index, pid, reader, writer)
        self.loaded.set()
        self._start_the_others()
        self._dispatch()
        return link

    def _gives_up(self, error: Exception) -> bool:
        """Whether to stop trying: at once before the first success, else after several failures."""
        self._failures += 1
        never_loaded = self._loaded is None and isinstance(error, ModelError)
        hopeless = self._failures >= _GIVE_UP_AFTER * self.settings.workers and not self._links
        if not never_loaded and not hopeless:
            LOG.error("A model worker could not be started: %s", error)
            return False
        if not self.failed.done():
            self.failed.set_result(
                error if isinstance(error, ModelError) else ModelError(f"No worker starts: {error}")
            )
        return True

    async def _listen(self, link: Link) -> None:
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                header, body = await framing.read(link.reader)
                if header.get("op") == "idle":
                    self._rest(link, header)
                elif header.get("op") == "begun":
                    link.begun = True
                else:
                    link.watch(self.settings.timeout, self._hangs)
                    await self._deliver(link, header, body)

    def _rest(self, link: Link, header: framing.Header) -> None:
        link.unwatch()
        for call in link.calls.values():
            call.fail(Fault(500, "handler_failed", "The worker gave no answer."))
        link.calls = {}
        link.idle = True
        now = time.monotonic()
        self._patience.learn(link.sent_size, now - link.sent_at, now)
        self._metrics.calls.inc(header["calls"])
        self._metrics.tokens.inc(header["tokens"])
        self._metrics.padding.inc(header["padded"] - header["tokens"])
        self._dispatch()

    async def _deliver(self, link: Link, header: framing.Header, body: bytes) -> None:
        call = link.calls.get(header["id"])
        if call is None:
            return
        if call.session and header.get("closed"):
            self.sessions.end(call.session.id)
        if "error" in header:
            del link.calls[call.id]
            call.fail(Fault(header["status"], header["error"]["code"], header["error"]["message"]))
        elif "status" in header:
            if not header.get("more"):
                del link.calls[call.id]
            if not call.reply.done():
                call.reply.set_result(Reply.of(header, body))
        else:
            await self._deliver_chunk(link, call, body if header["more"] else None)

    async def _deliver_chunk(self, link: Link, call: Call, chunk: bytes | None) -> None:
        if chunk is None:
            del link.calls[call.id]
        if call.reply.cancelled() or call.reply.exception() is not None:
            return
        chunks = call.reply.result().chunks
        assert chunks is not None
        link.unwatch()
        try:
            # A full queue stops the reading here, so that the worker waits for a slow client.
            await asyncio.wait_for(chunks.put(chunk), self.settings.timeout)
        except asyncio.TimeoutError:
            self.cancel(call)
        link.watch(self.settings.timeout, self._hangs)

    def _lose(self, link: Link) -> None:
        """A worker is gone: its calls are tried once more, or failed."""
        link.close()
        self._links.pop(link.index, None)
        if self._closing:
            return
        LOG.warning("Model worker %d is gone, with %d requests.", link.pid, len(link.calls))
        for call in (*reversed(link.calls.values()), *link.bound):
            if call.session is not None:
                call.fail(SessionGone(call.session.id))
            elif self._may_repeat(link, call):
                self._queue.appendleft(call)
            else:
                call.fail(Fault(500, "worker_died", "The model's process died over this request."))
        self._dispatch()

    def _may_repeat(self, link: Link, call: Call) -> bool:
        """Whether a dead worker's call can be tried again: nothing was done, or it does no harm."""
        if not link.begun:
            return True
        pure = self._loaded is not None and self._loaded.batches
        again = pure and not call.retried and not call.reply.done()
        call.retried = True
        return again


def too_late(timeout: float) -> Fault:
    """The answer to a request whose deadline has passed."""
    return Fault(504, "deadline_exceeded", f"No answer within {timeout:g} s.")
