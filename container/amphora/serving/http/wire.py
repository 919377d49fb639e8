"""Extends uvicorn's HTTP protocol: bounds on headers, no upgrades, a log line for each refusal.

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


class HttpProtocol(HttpToolsProtocol):
    """One connection. `scope[GONE]` of its requests is done once the client has left."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._gone: asyncio.Future[None] = self.loop.create_future()
        self._in_head = self._is_too_large = False
        self._head_bytes = 0

    def connection_lost(self, exc: Exception | None) -> None:
        """End the wait for an answer that nobody will read."""
        if not self._gone.done():
            self._gone.set_result(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived, unless its headers do not end."""
        self._unset_keepalive_if_required()
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
            self._is_too_large = True
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

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. One behind a body (a trailer) is dropped."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start to answer, within the bound for headers."""
        self._in_head, self._head_bytes = False, 0
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > _HEADER_BYTES or len(self.headers) > _HEADERS:
            self._is_too_large = True
            raise ValueError("headers too large")  # The parser reports it to send_400_response.
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("a CONNECT request")
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Pass on the end of a body, unless its head is parsed again."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that has no route, and close the connection."""
        status, code, text = 400, "bad_request", "This is not an HTTP request."
        if self._is_too_large:
            status, code = 431, "headers_too_large"
            text = f"Send at most {_HEADER_BYTES} bytes in {_HEADERS} headers."
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
