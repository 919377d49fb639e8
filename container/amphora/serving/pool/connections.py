"""The front process's state of one request, and of one living worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from dataclasses import dataclass, field

from amphora.serving.protocol import messages
from amphora.serving.protocol.media_types import Fault
from amphora.serving.protocol.messages import Adapted, Answer, Batch, Cancel, Credit

LOG = logging.getLogger("amphora.pool")
_SENT = ("id", "content_type", "accept", "headers", "path")
"""What a worker gets of a call, apart from its body."""


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
    """The route of the request, which tells handlers which API it uses."""
    reply: asyncio.Future[Answer]
    """The answer without its body."""
    answer_body: bytes = b""
    """Empty of a stream."""
    chunks: asyncio.Queue[bytes | Exception | None] = field(
        # With room for the end, or for an error.
        default_factory=lambda: asyncio.Queue(messages.CHUNKS_AHEAD + 1)
    )
    """Those of a stream, and None at its end."""
    arrived: float = field(default_factory=time.monotonic)
    retried: bool = False
    batch: int = 0
    """The number of the batch in which it was sent to its worker."""
    taken: int = 0
    """Chunks that its client has read and that have not been reported to its worker."""

    def answer(self, answer: Answer, body: bytes = b"") -> None:
        """Answer, or begin to stream, unless that has been done or nobody waits for it."""
        if not self.reply.done():
            self.answer_body = body
            self.reply.set_result(answer)

    @property
    def is_streaming(self) -> bool:
        """Return whether a stream has begun, for which a client waits."""
        if not self.reply.done() or self.reply.cancelled() or self.reply.exception() is not None:
            return False
        return self.reply.result().more

    def fail(self, fault: Fault) -> None:
        """Answer with an error, unless it is answered; a stream that has begun breaks off."""
        if not self.reply.done():
            self.reply.set_exception(fault)
        elif self.is_streaming:
            if self.chunks.full():
                self.chunks.get_nowait()
            self.chunks.put_nowait(fault)


@dataclass(kw_only=True, eq=False)
class WorkerConnection:
    """One living worker, as the front process sees it."""

    index: int
    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    takes_turns: bool
    timeout: float
    calls: dict[str, Call] = field(default_factory=dict)
    idle: bool = True
    is_open: bool = False
    """Whether it takes more requests while others are at work."""
    busy_since: float = 0.0
    """When it was last idle."""
    sent_at: float = 0.0
    sent_size: int = 0
    """Requests of the last batch, if it was sent to an idle worker; else 0."""
    batch: int = 0
    """The number of the last batch that was sent."""
    begun: int = 0
    """The number of the last batch that the worker has started on; nothing was done yet for those
    after it."""
    watchdog: asyncio.TimerHandle | None = None
    adapted: asyncio.Future[Adapted] | None = None
    """Waits for the outcome of an order to load or unload an adapter."""

    def send(self, batch: list[Call]) -> None:
        self.sent_size = len(batch) if self.idle else 0
        self.sent_at = time.monotonic()
        if self.idle:
            self.busy_since = self.sent_at
        self.idle = False
        self.batch += 1
        items = []
        for call in batch:
            call.batch = self.batch
            self.calls[call.id] = call
            entry = {name: getattr(call, name) for name in _SENT}
            items.append({**entry, "size": len(call.body)})
        message = Batch(batch=self.batch, items=items)
        self.writer.write(messages.pack(message, b"".join(call.body for call in batch)))

    def notify(self, notice: Cancel | Credit) -> None:
        self.writer.write(messages.pack(notice))

    def has_room(self, requests: int, size: int) -> bool:
        """Return whether it holds fewer requests and body bytes than that, and no retried one."""
        held = sum(len(call.body) for call in self.calls.values())
        has_suspect = any(call.retried for call in self.calls.values())
        return len(self.calls) < requests and held < size and not has_suspect

    def watch(self) -> None:
        """Kill the worker unless a frame arrives within the time-out; call it for each frame."""

        def end_hanging() -> None:
            text = "Model worker %d has not answered for %g s; it is replaced."
            LOG.error(text, self.pid, self.timeout)
            self.kill()

        self.unwatch()
        self.watchdog = asyncio.get_running_loop().call_later(self.timeout, end_hanging)

    def expect(self) -> None:
        """Start to watch it, unless it is watched already."""
        if self.watchdog is None:
            self.watch()

    def unwatch(self) -> None:
        """Stop watching: the worker is idle, or waits for a slow client."""
        if self.watchdog is not None:
            self.watchdog.cancel()
            self.watchdog = None

    def kill(self) -> None:
        """Kill the worker; the end of its socket triggers its replacement."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self.unwatch()
        if self.adapted is not None and not self.adapted.done():
            self.adapted.set_exception(EOFError())
        self.writer.close()
