"""What the front process knows of one request on its way, and of one living worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections import deque
from dataclasses import dataclass, field

from amphora.serving.pool.sessions import Session
from amphora.serving.protocol import framing
from amphora.serving.protocol.media_types import Fault
from amphora.serving.tracing import RequestTrace

LOG = logging.getLogger("amphora.pool")
# Taken chunks that are told to a worker together.
_CREDIT = framing.CHUNKS_AHEAD // 4


@dataclass(kw_only=True)
class Reply:
    """A worker's answer. With `chunks`, `body` is empty and the answer is a stream."""

    status: int
    content_type: str
    headers: dict[str, str]
    body: bytes
    closes_session: bool = False
    chunks: asyncio.Queue[bytes | Exception | None] | None = None

    @classmethod
    def of(cls, header: framing.Header, body: bytes) -> Reply:
        """From a worker's frame."""
        return cls(
            status=header["status"],
            content_type=header["type"],
            headers=header["headers"],
            body=body,
            closes_session=header.get("closed", False),
            # With room for the end, or what has broken it.
            chunks=asyncio.Queue(framing.CHUNKS_AHEAD + 1) if header.get("more") else None,
        )


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
    path: str = "/invocations"
    """The route that it came by, by which handlers tell several APIs apart."""
    reply: asyncio.Future[Reply]
    session: Session | None = None
    arrived: float = field(default_factory=time.monotonic)
    retried: bool = False
    batch: int = 0
    """The number of the batch in which its worker got it."""
    trace: RequestTrace | None = None
    """Its spans, where traces are wanted."""
    taken: int = 0
    """Chunks of its stream that its client has taken, and its worker does not know of."""

    def fail(self, fault: Fault) -> None:
        """Answer with an error, unless it is answered already; a begun stream breaks off."""
        if not self.reply.done():
            self.reply.set_exception(fault)
        elif not self.reply.cancelled() and self.reply.exception() is None:
            chunks = self.reply.result().chunks
            if chunks is not None:
                if chunks.full():
                    chunks.get_nowait()
                chunks.put_nowait(fault)

    @property
    def entry(self) -> framing.Header:
        """What is sent to a worker about it."""
        return {
            "id": self.id,
            "size": len(self.body),
            "content_type": self.content_type,
            "accept": self.accept,
            "headers": self.headers,
            "path": self.path,
            "session": self.session.id if self.session else "",
        }


class WorkerConnection:
    """One living worker, as the front process sees it."""

    def __init__(
        self,
        index: int,
        pid: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        takes_turns: bool,
        timeout: float,
    ) -> None:
        self.index = index
        self.pid = pid
        self.reader = reader
        self.takes_turns = takes_turns
        self.calls: dict[str, Call] = {}
        self.bound: deque[Call] = deque()
        """Requests of sessions that live in this worker."""
        self.idle = True
        self.is_open = False
        """Whether it takes requests beside those that it has."""
        self.ahead = 0
        """The fewest requests of a batch that it takes while it is at work on the last one; 0: it
        takes none."""
        self.begun_alone = 0
        """The number of the last batch that was at work without an earlier one, where it takes
        batches ahead."""
        self.size_at_work = 0
        """Requests of that batch; 0: none, or it says nothing about how long a batch takes."""
        self.born = time.monotonic()
        self.busy_since = 0.0
        """When it was last idle, or what it had before its last batch was done."""
        self.sent_at = 0.0
        self.sent_size = 0
        self.batch = 0
        """The number of the last batch that was sent."""
        self.begun = 0
        """The number of the last batch that the worker has started on; nothing was done yet for
        those after it."""
        self._writer = writer
        self._timeout = timeout
        self._watchdog: asyncio.TimerHandle | None = None

    def send(self, batch: list[Call]) -> None:
        """Send it a batch to answer."""
        # What comes beside other work says nothing about how long a batch takes.
        self.sent_size = len(batch) if self.idle or self.ahead else 0
        self.ahead = 0
        self.sent_at = time.monotonic()
        if self.idle:
            self.busy_since = self.sent_at
        self.idle = False
        self.batch += 1
        for call in batch:
            call.batch = self.batch
            self.calls[call.id] = call
        header = {
            "op": "batch", "batch": self.batch, "items": [call.entry for call in batch],
        }  # fmt: skip
        self._writer.write(framing.pack(header, b"".join(call.body for call in batch)))

    def tell(self, header: framing.Header) -> None:
        """Send a notice: a cancellation, or a session to forget."""
        self._writer.write(framing.pack(header))

    def begin_alone(self) -> tuple[int, float]:
        """What the worker had before its last batch is done: that batch is at work now.

        Returns:
            How many requests the batch before it held, and the seconds that it took; 0 requests if
            that says nothing about batches.
        """
        now, before = time.monotonic(), self.size_at_work
        seconds, self.busy_since = now - self.busy_since, now
        self.begun_alone, self.size_at_work = self.batch, self.sent_size
        return before, seconds

    def has_room(self, requests: int, size: int) -> bool:
        """Whether it may take more beside what it has: it keeps all of that in its memory.

        Args:
            requests: The most that it should have.
            size: The most bytes of their bodies.
        """
        held = sum(len(call.body) for call in self.calls.values())
        is_alone = any(call.retried for call in self.calls.values())
        return len(self.calls) < requests and held < size and not is_alone

    def note_taken(self, call: Call) -> None:
        """A chunk of a call's stream was taken: now and then the worker learns of it."""
        call.taken += 1
        if self.takes_turns and call.taken >= _CREDIT:
            self.tell({"op": "credit", "id": call.id, "count": call.taken})
            call.taken = 0

    def watch(self) -> None:
        """End it if nothing comes within the time-out; to be called again at each sign of life."""
        self.unwatch()
        self._watchdog = asyncio.get_running_loop().call_later(self._timeout, self.end_hanging)

    def expect(self) -> None:
        """`watch`, if it is not watched: what it is told is no sign of its life."""
        if self._watchdog is None:
            self.watch()

    def end_hanging(self) -> None:
        """It hangs: end it, so that it is replaced."""
        LOG.error(
            "Model worker %d has not answered for %g s; it is replaced.", self.pid, self._timeout
        )
        self.kill()

    def unwatch(self) -> None:
        """Stop watching: the worker is idle, or waits for a slow client."""
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None

    def kill(self) -> None:
        """End the worker at once; the end of its socket starts the rest."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Forget the connection."""
        self.unwatch()
        self._writer.close()
