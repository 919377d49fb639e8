"""Uvicorn with limits: every place where the server relies on what uvicorn does not document.

Uvicorn leaves a connection open forever that sends nothing or a byte at a time; keeps headers of
any size; drops the answer to a client that has closed its half of the connection. It has no
setting for these, so that its protocols are extended here, and nowhere else. `check` looks, at
start, for all that is overridden or used, and names what another version no longer has.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import uuid
from collections.abc import Callable, Iterator
from typing import Any, cast

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from amphora.common.errors import AmphoraError
from amphora.serving.http.acceptor import Acceptor
from amphora.serving.http.refusal import Refusal
from amphora.serving.http.transport import GONE, BoundedTransport, unframed
from amphora.serving.settings import ClientLimits

# Requests that a client has sent ahead of the answers to earlier ones.
_MAX_PIPELINED = 64
# Of a body whose request is answered already.
_MAX_DISCARDED_BYTES = 1 << 20
# What a server over its bound for connections still answers, and for how long it waits for it.
_ALWAYS_ANSWERED = (b"/ping", b"/health", b"/metrics")
_CROWDED_SECONDS = 2.0
# For the request of a connection that is about to be closed for another one.
_NEW_SECONDS = 0.1
# What `check` looks for: attributes of classes, and names that `__init__` sets.
_USED: dict[type, tuple[str, ...]] = {
    uvicorn.Server: ("startup", "shutdown", "capture_signals"),
    HttpToolsProtocol: (
        *("connection_made", "connection_lost", "data_received", "eof_received", "pause_writing"),
        *("resume_writing", "on_message_begin", "on_url", "on_header", "on_headers_complete"),
        *("on_body", "on_message_complete", "on_response_complete", "send_400_response"),
        *("_start_asgi_task", "_unset_keepalive_if_required", "_should_upgrade"),
        "handle_websocket_upgrade",
    ),
    WebSocketsSansIOProtocol: ("data_received",),
}
_SET: dict[type, tuple[str, ...]] = {
    uvicorn.Server: ("config", "server_state", "started"),
    ServerState: ("connections", "default_headers"),
    HttpToolsProtocol: (
        *("transport", "flow", "parser", "loop", "cycle", "pipeline", "headers", "scope", "url"),
        *("server_state", "expect_100_continue"),
    ),
    RequestResponseCycle: (
        *("scope", "disconnected", "keep_alive", "message_event", "response_started"),
        *("response_complete", "transport", "chunked_encoding", "expected_content_length"),
    ),
    WebSocketsSansIOProtocol: ("handshake_initiated", "transport", "default_headers"),
}


def check() -> None:
    """Raises AmphoraError if the installed uvicorn lacks what is overridden or used here."""
    missing = [
        f"{kind.__name__}.{name}"
        for kind, names in _USED.items()
        for name in names
        if not hasattr(kind, name)
    ]
    for kind, names in _SET.items():
        code = cast(Any, kind).__init__.__code__
        # HttpToolsProtocol.url is set with the first byte of a request.
        begun = getattr(kind, "on_message_begin", None)
        names_used = {*code.co_names, *(begun.__code__.co_names if begun else ())}
        missing += [f"{kind.__name__}.{name}" for name in names if name not in names_used]
    if missing:
        raise AmphoraError(
            f"uvicorn {uvicorn.__version__} has no {', '.join(missing)}.",
            "Install the version that the image's lock names.",
        )


_NOT_HTTP = Refusal(400, "bad_request", "This is not an HTTP request.")
RefusalLog = Callable[[Refusal, str], None]
"""Called for each refused request, with the id in its answer."""


class HttpProtocol(HttpToolsProtocol):
    """One connection, within bounds of size and time."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        limits: ClientLimits,
        note: RefusalLog,
        crowded: bool = False,
    ) -> None:
        super().__init__(config, server_state, {})
        self._idle_since = self.loop.time()
        self._was_used = False
        self._limits = limits
        self._most_head_bytes, self._most_headers = limits.header_bytes, limits.header_count
        self._note = note
        self._crowded = crowded
        self._wait_seconds = limits.header_seconds
        if crowded:
            self._wait_seconds = min(_CROWDED_SECONDS, limits.header_seconds)
        self._wire: BoundedTransport = None  # type: ignore[assignment]
        self._running: RequestResponseCycle | None = None
        self._in_head = self._in_body = False
        # Of the message that is being read; stray is what brought neither a header nor a body on.
        self._messages = self._head_bytes = self._body_bytes = self._stray_bytes = 0
        self._discarded = 0
        self._watch: asyncio.TimerHandle | None = None
        # Since when the rest of a head, or of a body, is waited for.
        self._began: float | None = self._idle_since
        self._progressed = self._idle_since
        self._refusal: Refusal | None = None

    @property
    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    @property
    def is_idle(self) -> bool:
        """Whether closing takes no answer from anybody, nor a request that is just on its way."""
        return (
            not self._is_answering
            and self.loop.time() - self._idle_since > _NEW_SECONDS
            and not self._wire.get_write_buffer_size()
        )

    @property
    def rank(self) -> tuple[bool, float]:
        """Which connections to close first for new ones: the unused, then the longest idle."""
        return self._was_used, self._idle_since

    @property
    def lingers(self) -> bool:
        """Whether the client may still be sending what nobody will read."""
        return self._refusal is not None or self._in_body

    def evict(self) -> None:
        """Close at once, to make room for another connection."""
        self._wire.abort()

    # The connection.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for a request, and not forever."""
        stream = cast(asyncio.Transport, transport)
        self._wire = BoundedTransport(stream, self, self._limits)
        super().connection_made(cast(asyncio.Transport, self._wire))
        self._watch_for(self._wait_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request whose answer nobody will read."""
        self._wire.is_lost = True
        self._stop_watching()
        if self._running is not None:
            gone: asyncio.Future[None] = cast(dict[str, Any], self._running.scope)[GONE]
            if not gone.done():
                gone.set_result(None)
            if self._running is not self.cycle:
                self._running.disconnected = True
                self._running.message_event.set()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep a half-closed connection for the answer that it waits for.

        Whoever left altogether looks the same. The answer's first bytes, which never differ, are
        sent at once: the kernel of a client that left refuses them.
        """
        running = self._running
        if (self.lingers and self.cycle is running) or running is None or not self._is_answering:
            return False
        self.cycle.keep_alive = False
        if not running.response_started:
            self._wire.probe()
        return True

    def pause_writing(self) -> None:
        """Wait for a client that reads slower than it is answered, within bounds."""
        super().pause_writing()
        self._wire.watch_reading()

    def data_received(self, data: bytes) -> None:
        """Parse, and keep time if a request is not complete."""
        if self._refusal is not None:
            return
        self._unset_keepalive_if_required()
        before = (self._messages, self._in_head, self._in_body, self._body_bytes)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self._should_upgrade():
                # Such as h2c: the request is answered as it is, and the next one is read anew.
                self.parser = httptools.HttpRequestParser(self)
                if rest := data[upgrade.args[0] :]:
                    self.data_received(rest)
            elif self._is_answering:
                self._refuse(_NOT_HTTP)
            else:
                self._stop_watching()
                self.handle_websocket_upgrade()
            return
        except httptools.HttpParserError:
            self._refuse(self._refusal or _NOT_HTTP)
            return
        if not self._in_head and not self._in_body and self._is_answering:
            return
        after = (self._messages, self._in_head, self._in_body, self._body_bytes)
        now = self.loop.time()
        if self._began is None:
            self._began = self._progressed = now
        if after != before:
            self._stray_bytes = 0
            self._progressed = now
        else:
            self._stray_bytes += len(data)
            if self._stray_bytes > self._limits.header_bytes:
                self._refuse(_NOT_HTTP if self._in_body else self._head_too_large())
                return
        self._watch_for(self._limits.body_seconds if self._in_body else self._wait_seconds)

    # The parser's calls.

    def on_message_begin(self) -> None:
        """Start to count with the first byte of a request."""
        super().on_message_begin()
        self._messages += 1
        self._in_head = True
        self._head_bytes = self._stray_bytes = 0

    def on_url(self, url: bytes) -> None:
        """Take a part of the path, within bounds."""
        super().on_url(url)
        if len(self.url) > self._limits.header_bytes:
            self._stop(414, "uri_too_long", "The path is too long.")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header within the limits; one behind a body (a trailer) is dropped."""
        if not self._in_head:
            return
        self._head_bytes += len(name) + len(value) + 4
        headers = self.headers
        if self._head_bytes > self._most_head_bytes or len(headers) >= self._most_headers:
            self._refusal = self._head_too_large()
            raise ValueError
        # As uvicorn does, without a second call for each header of each request.
        name = name.lower()
        if name == b"expect":
            self.expect_100_continue = value.strip().lower() == b"100-continue"
            if not self.expect_100_continue:
                self._stop(417, "expectation_failed", "The only Expect is 100-continue.")
        elif name == b"transfer-encoding" and value.strip().lower() != b"chunked":
            self._stop(501, "not_implemented", "The only Transfer-Encoding is chunked.")
        headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Start to answer, unless the server has too much to do."""
        self._in_head = False
        self._began = None
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            self._stop(400, "bad_request", f"The request has {hosts} Host headers, and not one.")
        if self._crowded and self.url.partition(b"?")[0].rstrip(b"/") not in _ALWAYS_ANSWERED:
            self._stop(503, "overloaded", "Too many connections are open.")
        if len(self.pipeline) >= _MAX_PIPELINED:
            self._stop(503, "overloaded", "Too many requests were sent ahead.")
        super().on_headers_complete()
        self._in_body = True
        self._body_bytes = self._discarded = 0

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._body_bytes += len(body)
        if self.cycle is not None and self.cycle.response_complete:
            self._discarded += len(body)
            if self._discarded > _MAX_DISCARDED_BYTES:
                raise ValueError
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note the end of a request."""
        self._in_body = False
        self._began = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Note the end of an answer."""
        self._idle_since = self.loop.time()
        self._was_used = True
        if self._crowded or (self.expect_100_continue and self._in_body and not self._body_bytes):
            # The client was not asked for its body: what it sends next is another request.
            self._wire.close()
        super().on_response_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        cast(dict[str, Any], cycle.scope)[GONE] = self.loop.create_future()
        if self._crowded:
            cycle.keep_alive = False  # uvicorn says so in the answer
        if cycle.scope["http_version"] == "1.0":
            app = unframed(app, cycle)
        super()._start_asgi_task(cycle, app)

    # Time.

    def _watch_for(self, seconds: float) -> None:
        when = self.loop.time() + seconds
        if self._watch is not None:
            if self._watch.when() <= when:
                return
            self._watch.cancel()
        self._watch = self.loop.call_at(when, self._check_time)

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _check_time(self) -> None:
        """Refuse or close if what is waited for is late; else check again when it would be."""
        self._watch = None
        now = self.loop.time()
        if self._wire.is_closing() or self._began is None:
            return
        if self.flow.read_paused:
            # It is the server that does not read.
            self._began = self._progressed = now
        if self._in_body:
            grace = self._body_bytes / self._limits.body_rate
            due = min(self._progressed, self._began + grace) + self._limits.body_seconds
        else:
            due = self._began + self._wait_seconds
        if now < due:
            self._watch_for(due - now)
        elif self._in_head or self._in_body:
            self._refuse(Refusal(408, "request_timeout", "The request came too slowly."))
        elif not self._is_answering:
            self._wire.close()

    # Refusals.

    def _stop(self, status: int, code: str, message: str) -> None:
        self._refusal = Refusal(status, code, message)
        raise ValueError(message)

    def _head_too_large(self) -> Refusal:
        limits = self._limits
        return Refusal(
            431,
            "headers_too_large",
            f"Send at most {limits.header_bytes} bytes in {limits.header_count} headers.",
        )

    def _refuse(self, refusal: Refusal) -> None:
        """Answer what cannot go on, after what came before it, and close."""
        self._refusal = refusal
        self._stop_watching()
        identifier = uuid.uuid4().hex
        if not self._is_answering:
            if self._in_body:
                # It is answered already.
                self._wire.abort()
                return
            self._note(refusal, identifier)
            self._wire.write(refusal.written(identifier, self.server_state.default_headers))
            self._wire.close()
            return
        running = cast(RequestResponseCycle, self._running)
        if not self._in_body or self.cycle is not running:
            # A later request is broken: the answers to those before it are the last ones.
            if self._in_body:
                self.pipeline.popleft()
            last = self.pipeline[0][0] if self.pipeline else running
            last.keep_alive = False
            self._note(refusal, identifier)
            return
        if running.response_started:
            self._wire.abort()
            return
        state = running.scope["state"]
        state["refused"] = refusal.status
        self._wire.write(
            refusal.written(state.setdefault("id", identifier), self.server_state.default_headers)
        )
        running.disconnected = True
        running.message_event.set()
        self._wire.close()


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """Answers requests that ask for an upgrade and are not a handshake: uvicorn's own leaves those
    with a body, or another method than GET, without an answer for as long as the client waits.
    """

    def data_received(self, data: bytes) -> None:
        """Take the head of a request, which uvicorn hands over whole; then frames."""
        super().data_received(data)
        if not self.handshake_initiated and not self.transport.is_closing():
            refusal = Refusal(
                400, "bad_request", "A WebSocket begins with a GET request without a body."
            )
            self.transport.write(refusal.written(uuid.uuid4().hex, self.default_headers))
            self.transport.close()


class Server(uvicorn.Server):
    """Uvicorn's loop with our own acceptor, and an end that loses nothing.

    Args:
        config: Uvicorn's settings.
        limits: For connections.
        note: Called for each refused request.
        linger: Seconds, once the port is closed, for requests on their way on connections.
    """

    def __init__(
        self, config: uvicorn.Config, limits: ClientLimits, note: RefusalLog, linger: float
    ) -> None:
        super().__init__(config)
        self._limits = limits
        self._note = note
        self._linger = linger

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""

        def make_protocol(crowded: bool) -> HttpProtocol:
            return HttpProtocol(self.config, self.server_state, self._limits, self._note, crowded)

        connections = cast(set[Any], self.server_state.connections)
        backlog, limits = self.config.backlog, self._limits
        self.servers = cast(
            Any,
            [
                Acceptor(sock, make_protocol, connections, backlog, limits.connections)
                for sock in sockets or []
            ],
        )
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the port, but not the connections that came last: all of them are accepted, and
        their requests have the time to arrive.
        """
        for acceptor in self.servers:
            acceptor.close()
        await asyncio.sleep(self._linger)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: the caller handles signals, and ends with exit code 0, not by a signal."""
        yield
