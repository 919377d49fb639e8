"""Extends uvicorn's HTTP protocol by bounds on headers, time and connections.

Uvicorn has no settings for these: it keeps headers of any size, waits forever for the rest of a
request and for clients that do not read, and answers /ping with 503 beyond its own bound for
connections. Its other parser, h11, has a bound for headers, and costs three times the CPU time
(docs/LAB.md). What is overridden here is private to uvicorn, whose version the locks pin.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import logging
import resource
import socket
import struct
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from amphora.serving.http.invocations import GONE, error_body
from amphora.serving.settings import ClientLimits

LOG = logging.getLogger("amphora.server")
_BACKLOG = 2048
# Descriptors that stay free for files, workers and models.
_RESERVE = 64
# Beyond the bound for connections, only these routes are answered, and headers have less time.
_ALWAYS_ANSWERED = (b"/ping", b"/health", b"/metrics")
_CROWDED_SECONDS = 2.0
# A new connection is not closed for others until its request has had this time to arrive.
_NEW_SECONDS = 0.1
# One connection of so many is closed at a time, since the search for idle ones takes time.
_SHARE = 16
_CHECK_SECONDS = 0.25
_QUIET_SECONDS = 10.0

_HANDSHAKE_SECONDS = 0.05
_SO_ATTACH_FILTER = 26
# Classic BPF: load the flags of TCP's header; SYN without ACK: keep 0 bytes of it, else all.
_DROP_SYN = b"".join(
    struct.pack("HBBI", *instruction)
    for instruction in (
        (0x30, 0, 0, 13), (0x54, 0, 0, 0x12), (0x15, 0, 1, 0x02), (0x06, 0, 0, 0),
        (0x06, 0, 0, 0xFFFFFFFF),
    )
)  # fmt: skip

RefusalLog = Callable[[int, str], None]
"""Called with status and id for each request that is refused before it has a route."""


def raise_limit() -> int:
    """Let this process open as many files as it may. Returns the soft limit that it had."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft


def affordable(connections: int, workers: int) -> tuple[int, int]:
    """Return how many connections, and how many accepted at once, the limit of open files allows.

    asyncio accepts a whole batch before the first of its connections can be closed, and a second
    one before those are; two more are the crowd that `HttpProtocol` keeps for /ping. So half of the
    free descriptors are for connections, and an eighth for each of these four batches.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return connections, _BACKLOG
    open_files = len(list(Path("/proc/self/fd").glob("*")))
    free = max(16, limit - open_files - _RESERVE - 2 * workers)
    if free // 2 < connections:
        LOG.warning(
            "At most %d connections are kept open, not %d: the limit of open files is %d.",
            free // 2, connections, limit,
        )  # fmt: skip
    return min(connections, free // 2), min(_BACKLOG, free // 8)


class _Refused(Exception):
    """Ends parsing: the answer is an error."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class HttpProtocol(HttpToolsProtocol):
    """One connection, within the bounds of `limits`; `crowd` more may be open, mostly for /ping."""

    def __init__(self, limits: ClientLimits, crowd: int, note: RefusalLog, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._limits = limits
        self._crowd = crowd
        self._note = note
        self._gone: asyncio.Future[None] = self.loop.create_future()
        self._is_crowded = self._is_refused = self._was_used = False
        self._in_head = self._in_body = False
        self._head_bytes = self._body_bytes = 0
        self._stray_bytes = 0
        """Received since the head or the body last grew: a header that never ends, or a trailer."""
        self._idle_since = self.loop.time()
        self._since: float | None = self._idle_since
        """When the wait for the rest of a head, or of a body, began."""
        self._checked_bytes, self._moved_at = 0, 0.0
        """Of the body, at the last check; when it last grew."""
        self._unread, self._read_at = 0, 0.0
        """Bytes of answers that were not sent at the last check; when they last became fewer."""

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def is_idle(self) -> bool:
        """Return whether closing the connection loses neither an answer nor a request."""
        return (
            not self._is_answering
            and self.loop.time() - self._idle_since > _NEW_SECONDS
            and not self.transport.get_write_buffer_size()
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection; beyond the bound, close idle ones for it, or else this one."""
        super().connection_made(cast(asyncio.Transport, transport))
        if len(self.connections) > self._limits.connections:
            self._is_crowded = not _make_room(self.connections)
            if len(self.connections) > self._limits.connections + self._crowd:
                self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the wait for an answer that nobody will read."""
        if not self._gone.done():
            self._gone.set_result(None)
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        """Note that the client reads."""
        self._read_at = self.loop.time()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived."""
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        headers, head_bytes, body_bytes = self.headers, self._head_bytes, self._body_bytes
        try:
            self.parser.feed_data(data)
            is_same = self.headers is headers and body_bytes == self._body_bytes
            if is_same and head_bytes == self._head_bytes and (self._in_head or self._in_body):
                self._stray_bytes += len(data)
                if self._stray_bytes > self._limits.header_bytes:
                    raise self._too_large()
            else:
                self._stray_bytes = 0
        except httptools.HttpParserUpgrade as upgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
                return
            # Another upgrade, such as h2c, is ignored: the request is answered as HTTP/1.1.
            self.parser = httptools.HttpRequestParser(self)
            if rest := data[upgrade.args[0] :]:
                self.data_received(rest)
        except httptools.HttpParserError as error:
            cause = error.__context__
            not_http = _Refused(400, "bad_request", "This is not an HTTP request.")
            self._refuse(cause if isinstance(cause, _Refused) else not_http)
        except _Refused as refused:
            self._refuse(refused)
        if self._since is None and not self._is_answering:
            # A line break between two requests does not keep the connection open.
            self._since = self.loop.time()

    def on_message_begin(self) -> None:
        """Start to count with the first byte of a request."""
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0
        if self._since is None:
            self._since = self.loop.time()

    def on_url(self, url: bytes) -> None:
        """Take a part of the path, within the bound for headers."""
        super().on_url(url)
        if len(self.url) > self._limits.header_bytes:
            raise self._too_large()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, within bounds; drop one behind a body (a trailer)."""
        if not self._in_head:
            return
        self._head_bytes += len(name) + len(value) + 4
        headers, limits = self.headers, self._limits
        if self._head_bytes > limits.header_bytes or len(headers) >= limits.header_count:
            raise self._too_large()
        name = name.lower()
        if name == b"expect":
            self.expect_100_continue = value.strip().lower() == b"100-continue"
            if not self.expect_100_continue:
                raise _Refused(417, "expectation_failed", "The only Expect is 100-continue.")
        elif name == b"transfer-encoding" and value.strip().lower() != b"chunked":
            raise _Refused(501, "not_implemented", "The only Transfer-Encoding is chunked.")
        headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Start to answer, unless the request could be read differently by another server."""
        self._in_head = False
        names = [name for name, _ in self.headers]
        hosts = names.count(b"host")
        if hosts > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            raise _Refused(400, "bad_request", f"The request has {hosts} Host headers, and not 1.")
        if self.parser.should_upgrade() and {b"content-length", b"transfer-encoding"} & {*names}:
            # The parser would take its body for another request.
            raise _Refused(400, "bad_request", "Send a body without the header Upgrade.")
        if self._is_crowded and self.url.partition(b"?")[0].rstrip(b"/") not in _ALWAYS_ANSWERED:
            raise _Refused(503, "overloaded", "Too many connections are open.")
        cast(dict[str, Any], self.scope)[GONE] = self._gone
        super().on_headers_complete()
        if self._is_crowded and self.cycle is not None:
            self.cycle.keep_alive = False
        self._in_body = True
        self._since = self._moved_at = self.loop.time()
        self._body_bytes = self._checked_bytes = 0

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note the end of a request."""
        self._in_body = False
        self._since = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Note the end of an answer."""
        self._idle_since = self.loop.time()
        self._was_used = True
        if self.expect_100_continue and self._in_body and not self._body_bytes:
            # The client was not asked for its body: what it sends next is another request.
            self.transport.close()
        super().on_response_complete()

    def _should_upgrade(self) -> bool:
        """Return whether a GET without a body opens a WebSocket, after all other answers."""
        return (
            super()._should_upgrade() and self.scope["method"] == "GET" and not self._is_answering
        )

    def check(self, now: float) -> None:
        """Close the connection if its client is too slow."""
        limits = self._limits
        unread = self.transport.get_write_buffer_size()
        if not unread or unread < self._unread:
            self._read_at = now
        elif now - self._read_at > limits.body_seconds:
            self.transport.abort()
        self._unread = unread
        if self._since is None or self._is_refused:
            return
        if self._in_body:
            if self.flow.read_paused:
                self._since = now
            if self.flow.read_paused or self._body_bytes != self._checked_bytes:
                self._checked_bytes, self._moved_at = self._body_bytes, now
            due = min(self._moved_at, self._since + self._body_bytes / limits.body_rate)
            is_late = now > due + limits.body_seconds
        else:
            seconds = limits.header_seconds
            seconds = min(seconds, _CROWDED_SECONDS) if self._is_crowded else seconds
            is_late = not self._is_answering and now > self._since + seconds
        if is_late and (self._in_head or self._in_body):
            self._refuse(_Refused(408, "request_timeout", "The request came too slowly."))
        elif is_late:
            self.transport.close()

    def _too_large(self) -> _Refused:
        limits = self._limits
        return _Refused(
            431,
            "headers_too_large",
            f"Send at most {limits.header_bytes} bytes in {limits.header_count} headers.",
        )

    def _refuse(self, refused: _Refused) -> None:
        """Answer a request that has no route, after the requests before it, and close."""
        self._is_refused = True
        identifier = uuid.uuid4().hex
        if self._is_answering and not self._in_body:
            # The requests before it are still answered.
            self.cycle.keep_alive = False
            self._note(refused.status, identifier)
            return
        if self._is_answering:
            if self.pipeline or self.cycle.response_started:
                self.transport.abort()
                return
            state = self.cycle.scope["state"]
            state["refused"] = refused.status
            identifier = state.setdefault("id", identifier)
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        elif self._in_body:
            # The request is answered already.
            self.transport.abort()
            return
        else:
            self._note(refused.status, identifier)
        body = error_body(refused.code, str(refused), identifier)
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", identifier.encode()),
            (b"connection", b"close"),
            *([(b"retry-after", b"1")] if refused.status == 503 else []),
        ]
        lines = b"".join(b"%s: %s\r\n" % header for header in headers)
        self.transport.write(STATUS_LINE[refused.status] + lines + b"\r\n" + body)
        self.transport.close()


_warned_at = -_QUIET_SECONDS


def _make_room(connections: set[Any]) -> bool:
    """Close some idle connections: those without an answer so far, then the longest idle.

    Returns False if there are none, since all wait for answers.
    """
    idle = [connection for connection in connections if getattr(connection, "is_idle", False)]
    idle.sort(key=lambda connection: (connection._was_used, connection._idle_since))
    closed = idle[: max(1, len(connections) // _SHARE)]
    for connection in closed:
        connection.transport.abort()
        connections.discard(connection)
    global _warned_at
    if time.monotonic() - _warned_at > _QUIET_SECONDS:
        _warned_at = time.monotonic()
        LOG.warning(
            "%d connections are open; %d idle ones are closed.", len(connections), len(closed)
        )
    return bool(closed)


class Server(uvicorn.Server):
    """Uvicorn's server with `HttpProtocol`, which drops no request when it stops.

    Args:
        application: What answers.
        limits: For connections.
        batch: Connections that are accepted at once.
        note: Called for each refused request.
        linger: Seconds that open connections have for requests on their way, once the port is
            closed.
        settings: More of uvicorn's settings.
    """

    def __init__(
        self,
        application: Any,
        limits: ClientLimits,
        batch: int,
        note: RefusalLog,
        linger: float,
        **settings: Any,
    ) -> None:
        protocol: Any = functools.partial(HttpProtocol, limits, 2 * batch, note)
        super().__init__(
            uvicorn.Config(
                application,
                http=protocol,
                ws="websockets-sansio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=cast(int, limits.keep_alive_seconds),
                backlog=batch,
                **settings,
            )
        )
        self._linger = linger

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `should_exit` is set. Signals are the caller's concern."""
        checking = asyncio.create_task(self._check_connections())
        try:
            await self._serve(sockets)
        finally:
            checking.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the port. The kernel's backlog is longer than the batch that asyncio accepts."""
        await super().startup(sockets)
        for sock in sockets or []:
            sock.listen(_BACKLOG)

    async def _check_connections(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            now = loop.time()
            for connection in [*self.server_state.connections]:
                if isinstance(connection, HttpProtocol):
                    connection.check(now)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the port without resetting a connection, and answer requests on their way."""
        for sock in sockets or []:
            _ignore_handshakes(sock)
        # Handshakes that have begun are completed, and their connections accepted.
        await asyncio.sleep(_HANDSHAKE_SECONDS)
        for server in self.servers:
            server.close()
        await asyncio.sleep(self._linger)
        await super().shutdown(sockets)


def _ignore_handshakes(sock: socket.socket) -> None:
    """Make the kernel drop segments that begin a connection.

    A connection that is established between the last accept() and close() is reset, though its
    client may have sent a request. Without an answer to its SYN the client tries again a second
    later, and is refused.
    """
    buffer = ctypes.create_string_buffer(_DROP_SYN)
    program = struct.pack("HL", len(_DROP_SYN) // 8, ctypes.addressof(buffer))
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
