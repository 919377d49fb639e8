"""Extends uvicorn's HTTP protocol: bounds on headers, on connections and on the time that clients
take, no upgrades, a log line for each refusal.

uvicorn's httptools protocol keeps headers of any size; h11 costs three times the CPU time
(docs/LAB.md). The locks pin uvicorn, since this overrides private methods.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from amphora.serving.http.invocations import error_body
from amphora.serving.telemetry import GONE

LOG = logging.getLogger("amphora.server")
_HEADER_BYTES, _HEADERS = 65536, 128
_UPGRADE = (b"upgrade", b"http2-settings")
_TOO_LARGE = 431, "headers_too_large", f"Send at most {_HEADER_BYTES} bytes in {_HEADERS} headers."
_SLOWEST = 8192
"""Bytes a second, sent or received: a client that is slower than this runs out of time."""


class HttpProtocol(HttpToolsProtocol):
    """One connection. `scope[GONE]` of its requests is done once the client has left.

    It is closed if the server has waited for the client for `timeout_keep_alive` seconds, and a
    second more for each `_SLOWEST` bytes: for a request from its first byte to its last one, for
    the next request, or until an answer is read. Answers may take as long as they do.
    """

    def __init__(self, *, most_connections: int, **options: Any) -> None:
        """
        Args:
            most_connections: Open at a time; one more closes that which waits for its client for
                longest.
            options: Those of uvicorn's protocol.
        """
        super().__init__(**options)
        self._gone: asyncio.Future[None] = self.loop.create_future()
        self._in_head = False
        self._head_bytes = 0
        self._refusal = 400, "bad_request", "This is not an HTTP request."
        self._most_connections = most_connections
        self._since = self.loop.time()
        self._received = self._unsent = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for a request."""
        super().connection_made(transport)
        self._start_waiting()
        self._watch = self.loop.call_later(self.timeout_keep_alive, self._close_if_slow)
        if len(self.connections) > self._most_connections:
            self._close_another()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the wait for an answer that nobody will read."""
        if not self._gone.done():
            self._gone.set_result(None)
        self._watch.cancel()
        super().connection_lost(exc)

    def _start_waiting(self) -> None:
        self._since, self._received = self.loop.time(), 0
        self._unsent = self.transport.get_write_buffer_size()

    @property
    def _awaits_client(self) -> bool:
        """Whether the server waits for bytes of the client, or until it reads an answer."""
        cycle = self.cycle
        # The head, or the body behind a cycle in the pipeline, is that of a later request.
        is_answering = (
            cycle is not None
            and not cycle.response_complete
            and (self._in_head or not cycle.more_body or bool(self.pipeline))
        )
        return self.flow.write_paused or not (is_answering or self.flow.read_paused)

    def _close_if_slow(self) -> None:
        """Close the connection if its client has run out of time, or look again when it will."""
        if not self._awaits_client:
            self._start_waiting()
        read = max(0, self._unsent - self.transport.get_write_buffer_size())
        end = self._since + self.timeout_keep_alive + (self._received + read) / _SLOWEST
        if self.loop.time() < end:
            self._watch = self.loop.call_at(end, self._close_if_slow)
        elif self.transport.get_write_buffer_size():
            # `close` would wait until the client has read it all.
            self.transport.abort()
        elif self._in_head or (self.cycle is not None and not self.cycle.response_complete):
            self._refusal = 408, "too_slow", "The request has not arrived in time."
            self.send_400_response("it has not arrived in time")
        else:
            self.transport.close()

    def _close_another(self) -> None:
        """Close the connection that waits for its client for longest: this one, if all others wait
        for their answers."""
        opened = [one for one in self.connections if isinstance(one, HttpProtocol)]
        opened = [one for one in opened if not one.transport.is_closing()]
        if len(opened) > self._most_connections:
            waiting = (one for one in opened if one._awaits_client)
            closed = min(waiting, key=lambda one: one._since)
            reason = f"{self._most_connections} connections are open (AMPHORA_MAX_CONNECTIONS)"
            if closed is self:
                self._refusal = 503, "overloaded", "Too many connections are open."
                self.send_400_response(reason)
            else:
                LOG.warning(
                    "%s; that which has waited for its client for longest is closed.", reason
                )
                closed.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived, unless its headers do not end."""
        self._unset_keepalive_if_required()
        self._received += len(data)
        view = memoryview(data)
        try:
            while view and not self.transport.is_closing():
                try:
                    self.parser.feed_data(view)
                    break
                except httptools.HttpParserUpgrade as upgrade:
                    self._ignore_upgrade()
                    view = view[upgrade.args[0] :]
        except httptools.HttpParserCallbackError as error:
            # A ValueError is raised here. Those of the path's parser quote it.
            ours = type(error.__context__) is ValueError
            self.send_400_response(str(error.__context__) if ours else "not a path")
        except httptools.HttpParserError as error:
            self.send_400_response(str(error))
        self._head_bytes += len(data) if self._in_head else 0
        if self._head_bytes > _HEADER_BYTES and not self.transport.is_closing():
            self._refusal = _TOO_LARGE
            self.send_400_response("headers without an end")

    def _ignore_upgrade(self) -> None:
        """Parse the head again without the upgrade that it offers (h2c, WebSocket).

        The parser takes what follows such a head for another protocol, while clients that offer
        HTTP/2 send a body and further requests as HTTP/1.1.
        """
        head = [f"{self.parser.get_method().decode()} ".encode(), self.url]
        head.append(f" HTTP/{self.parser.get_http_version()}\r\n".encode())
        for name, value in self.headers:
            if name == b"connection":
                items = [item.strip() for item in value.split(b",")]
                value = b", ".join(item for item in items if item.lower() not in _UPGRADE)
            if name not in _UPGRADE:
                head += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # As uvicorn does.
        self.parser.feed_data(b"".join([*head, b"\r\n"]))

    def on_message_begin(self) -> None:
        """Start to count with the first byte of a request."""
        super().on_message_begin()
        cast(dict[str, Any], self.scope)[GONE] = self._gone
        self._in_head, self._head_bytes = True, 0
        self._start_waiting()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. One behind a body (a trailer) is dropped."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start to answer, within the bound for headers."""
        self._in_head, self._head_bytes = False, 0
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > _HEADER_BYTES or len(self.headers) > _HEADERS:
            self._refusal = _TOO_LARGE
            raise ValueError("headers too large")  # The parser reports it to send_400_response.
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("a CONNECT request")
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Pass on the end of a body, unless its head is parsed again."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start to wait for the next request, and until this answer is read."""
        super().on_response_complete()
        self._start_waiting()

    def pause_writing(self) -> None:
        """Start to wait until the client has read what is written."""
        super().pause_writing()
        self._start_waiting()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that has no route, and close the connection."""
        status, code, text = self._refusal
        cycle, identifier = self.cycle, uuid.uuid4().hex
        client = self.client[0] if self.client else "a client"
        LOG.warning("Request %s from %s is refused with %d: %s.", identifier, client, status, msg)
        if cycle is None or cycle.response_complete or cycle.more_body > cycle.response_started:
            body = error_body(code, text, identifier)
            head = (
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
                f"x-request-id: {identifier}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(STATUS_LINE[status] + head.encode() + body)
        self.transport.close()
