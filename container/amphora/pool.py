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
import os
import signal
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from amphora import batching, frames
from amphora.codecs import Fault
from amphora.hosting import Hosting
from amphora.nursery import Loaded, ModelError, Nursery

LOG = logging.getLogger("amphora.pool")
# Deaths in a row, no worker living, after which the container gives up instead of storming on.
_GIVE_UP_AFTER = 5
_STEADY_SECONDS = 5.0
_CHUNKS_AHEAD = 64


@dataclass(kw_only=True)
class Reply:
    """A worker's answer. With `chunks`, `body` is empty and the answer is a stream."""

    status: int
    content_type: str
    headers: dict[str, str]
    body: bytes
    closed_session: bool = False
    chunks: asyncio.Queue[bytes | Exception | None] | None = None


@dataclass(kw_only=True, eq=False)
class Call:
    """One request on its way through the queue and a worker."""

    id: str
    body: bytes
    content_type: str
    accept: str
    headers: dict[str, str]
    deadline: float
    """On the event loop's clock."""
    reply: asyncio.Future[Reply]
    session: str = ""
    arrived: float = field(default_factory=time.monotonic)
    retried: bool = False

    def fail(self, fault: Fault) -> None:
        """Answer with an error, unless it is answered already; a begun stream breaks off."""
        if not self.reply.done():
            self.reply.set_exception(fault)
        elif not self.reply.cancelled() and self.reply.exception() is None:
            chunks = self.reply.result().chunks
            if chunks is not None:
                with contextlib.suppress(asyncio.QueueFull):
                    chunks.put_nowait(fault)


class Link:
    """One living worker, as the front sees it."""

    def __init__(
        self, index: int, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.index = index
        self.pid = pid
        self.reader = reader
        self.writer = writer
        self.calls: dict[str, Call] = {}
        self.idle = True
        self.born = time.monotonic()
        self.sent = (0, 0.0)
        self.watchdog: asyncio.TimerHandle | None = None

    def kill(self) -> None:
        """End the worker at once; its socket's end tells the rest."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Pool:
    """The workers of one model, and the requests that wait for them."""

    def __init__(self, hosting: Hosting, environ: Mapping[str, str]) -> None:
        self.hosting = hosting
        self._nursery = Nursery(hosting, environ)
        self._queue: deque[Call] = deque()
        self._links: dict[int, Link] = {}
        self._slots: list[asyncio.Task[None]] = []
        self._failures = 0
        self._closing = False
        self._loaded: Loaded | None = None
        self._patience = batching.Patience(hosting.max_delay)
        self._alarm: asyncio.TimerHandle | None = None
        self.failed: asyncio.Future[ModelError] = asyncio.get_running_loop().create_future()
        """Done when the pool has given up; the reason is its result."""

    @property
    def is_ready(self) -> bool:
        """Whether a worker lives that has loaded the model and has warmed up."""
        return bool(self._links)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    def start(self) -> None:
        """Begin to load the model; `is_ready` and `failed` tell how it goes.

        The first worker goes ahead, so that a model that cannot be loaded is said once.
        """
        self._slots = [asyncio.create_task(self._keep(0))]

    def _start_the_others(self) -> None:
        others = range(len(self._slots), self.hosting.workers)
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
        """Queue a request, or raise Fault (503) at once: not ready, or too many wait already."""
        if self._loaded is None:
            raise Fault(503, "not_ready", "The model is not loaded yet.")
        if len(self._queue) >= self.hosting.queue_limit:
            raise Fault(503, "overloaded", f"{len(self._queue)} requests wait already.")
        self._queue.append(call)
        self._dispatch()

    def cancel(self, call: Call) -> None:
        """The client is gone: drop the call where it waits, or tell the worker that answers it."""
        with contextlib.suppress(ValueError):
            self._queue.remove(call)
        for link in self._links.values():
            if link.calls.pop(call.id, None) is not None:
                link.writer.write(frames.pack({"op": "cancel", "id": call.id}))

    def _dispatch(self) -> None:
        idle = [link for link in self._links.values() if link.idle]
        if not idle or not self._queue:
            return
        now = time.monotonic()
        if delay := self._patience.wait(len(self._queue), self._queue[0].arrived, now):
            if self._alarm is None:
                self._alarm = asyncio.get_running_loop().call_later(delay, self._wake)
            return
        for place, link in enumerate(idle):
            if batch := self._take(len(idle) - place):
                self._send(link, batch)

    def _wake(self) -> None:
        self._alarm = None
        self._dispatch()

    def _take(self, sharers: int) -> list[Call]:
        """The next batch: a fair share of what waits, for that many idle workers."""
        merge = self._loaded is not None and self._loaded.batches
        most = min(self.hosting.batch_size, -(-len(self._queue) // sharers)) if merge else 1
        batch: list[Call] = []
        now = asyncio.get_running_loop().time()
        while self._queue and len(batch) < most:
            # What has already killed a worker once is predicted alone.
            if batch and self._queue[0].retried:
                break
            call = self._queue.popleft()
            if call.reply.done():
                continue
            if call.deadline <= now:
                call.fail(_too_late(self.hosting.timeout))
                continue
            batch.append(call)
            if call.retried:
                break
        return batch

    def _send(self, link: Link, batch: list[Call]) -> None:
        link.idle = False
        link.sent = (len(batch), time.monotonic())
        link.calls = {call.id: call for call in batch}
        items = [
            {
                "id": call.id,
                "size": len(call.body),
                "content_type": call.content_type,
                "accept": call.accept,
                "headers": call.headers,
                "session": call.session,
            }
            for call in batch
        ]
        bodies = b"".join(call.body for call in batch)
        link.writer.write(frames.pack({"op": "batch", "items": items}, bodies))
        self._watch(link)

    def _watch(self, link: Link) -> None:
        """A worker that says nothing for a whole time-out hangs: it is replaced."""
        if link.watchdog is not None:
            link.watchdog.cancel()
        loop = asyncio.get_running_loop()
        link.watchdog = loop.call_later(self.hosting.timeout, self._hangs, link)

    def _hangs(self, link: Link) -> None:
        LOG.error(
            "Model worker %d has not answered for %g s; it is replaced.",
            link.pid,
            self.hosting.timeout,
        )
        link.kill()

    async def _keep(self, index: int) -> None:
        """Keep one worker alive, for as long as the pool is open."""
        while not self._closing:
            try:
                link = await self._open(index)
            except (ModelError, EOFError, OSError) as error:
                if await self._is_hopeless(error):
                    return
                continue
            self._links[index] = link
            self._dispatch()
            try:
                await self._listen(link)
            finally:
                self._lose(link)
            if time.monotonic() - link.born > _STEADY_SECONDS:
                self._failures = 0
            else:
                await self._is_hopeless(ModelError(f"Model worker {link.pid} died."))

    async def _open(self, index: int) -> Link:
        sock, pid, loaded = await self._nursery.worker(index)
        if self._loaded is None:
            LOG.info("The model is loaded (%.1f s).", loaded.seconds)
        self._loaded = loaded
        reader, writer = await asyncio.open_connection(sock=sock)
        self._start_the_others()
        return Link(index, pid, reader, writer)

    async def _is_hopeless(self, error: Exception) -> bool:
        """Count a failure; wait, longer each time, or give up, at once before the first success."""
        self._failures += 1
        never_loaded = self._loaded is None and isinstance(error, ModelError)
        if never_loaded or (
            self._failures >= _GIVE_UP_AFTER * self.hosting.workers and not self._links
        ):
            if not self.failed.done():
                reason = (
                    error
                    if isinstance(error, ModelError)
                    else ModelError(
                        f"The model's workers died {self._failures} times in a row.",
                        "The log above has each one's reason.",
                    )
                )
                self.failed.set_result(reason)
            return True
        await asyncio.sleep(min(10.0, 0.05 * 2 ** (self._failures // self.hosting.workers)))
        return False

    async def _listen(self, link: Link) -> None:
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                header, body = await frames.read(link.reader)
                if header.get("op") == "idle":
                    self._rest(link)
                else:
                    self._watch(link)
                    await self._deliver(link, header, body)

    def _rest(self, link: Link) -> None:
        if link.watchdog is not None:
            link.watchdog.cancel()
        for call in link.calls.values():
            call.fail(Fault(500, "handler_failed", "The worker gave no answer."))
        link.calls = {}
        link.idle = True
        size, began = link.sent
        now = time.monotonic()
        self._patience.learn(size, now - began, now)
        self._dispatch()

    async def _deliver(self, link: Link, header: frames.Header, body: bytes) -> None:
        call = link.calls.get(header["id"])
        if call is None:
            return
        if "error" in header:
            del link.calls[call.id]
            call.fail(Fault(header["status"], header["error"]["code"], header["error"]["message"]))
        elif "status" in header:
            if not header.get("more"):
                del link.calls[call.id]
            if not call.reply.done():
                call.reply.set_result(_reply(header, body))
        else:
            await self._deliver_chunk(link, call, body if header["more"] else None)

    async def _deliver_chunk(self, link: Link, call: Call, chunk: bytes | None) -> None:
        if chunk is None:
            del link.calls[call.id]
        if call.reply.cancelled() or call.reply.exception() is not None:
            return
        chunks = call.reply.result().chunks
        assert chunks is not None
        try:
            # A full queue stops the reading here, so that the worker waits for a slow client.
            await asyncio.wait_for(chunks.put(chunk), self.hosting.timeout)
        except asyncio.TimeoutError:
            self.cancel(call)

    def _lose(self, link: Link) -> None:
        """A worker is gone: its calls are tried once more, or failed."""
        if link.watchdog is not None:
            link.watchdog.cancel()
        link.writer.close()
        self._links.pop(link.index, None)
        if self._closing:
            return
        LOG.warning("Model worker %d is gone, with %d requests.", link.pid, len(link.calls))
        pure = self._loaded is not None and self._loaded.batches
        for call in reversed(link.calls.values()):
            if pure and not call.retried and not call.reply.done():
                call.retried = True
                self._queue.appendleft(call)
            else:
                call.fail(Fault(500, "worker_died", "The model's process died over this request."))
        self._dispatch()


def _reply(header: frames.Header, body: bytes) -> Reply:
    return Reply(
        status=header["status"],
        content_type=header["type"],
        headers=header["headers"],
        body=body,
        closed_session=header.get("closed", False),
        chunks=asyncio.Queue(_CHUNKS_AHEAD) if header.get("more") else None,
    )


def _too_late(timeout: float) -> Fault:
    return Fault(504, "deadline_exceeded", f"No answer within {timeout:g} s.")
