"""A connection's transport that loses no answer, and waits for no client forever."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any, Protocol, cast

from amphora.serving.settings import ClientLimits

# If an answer was sent before the whole request was read, what still arrives is read and dropped
# for this long.
_LINGER_SECONDS = 2.0
_FIRST_BYTES = b"HTTP/1.1 "
GONE = "amphora.gone"
"""Where a request's scope has a future that is done once its connection is lost."""


class ProtocolState(Protocol):
    """What a transport needs of its protocol."""

    @property
    def lingers(self) -> bool:
        """Whether the client may still be sending what nobody will read."""


class BoundedTransport:
    """A connection's transport: it closes without destroying what is on its way, within a time."""

    def __init__(
        self, transport: asyncio.Transport, protocol: ProtocolState, limits: ClientLimits
    ) -> None:
        self._transport = transport
        self._protocol = protocol
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._is_lingering = False
        self._unread: int | None = None
        self.is_lost = False
        self.write: Callable[[bytes], None] = transport.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Whether nothing more is to be written."""
        return self._is_lingering or self._transport.is_closing()

    def close(self) -> None:
        """Close; if the client may still be sending, let it read its answer first: data that
        nobody has read would make the kernel reset the connection."""
        if self._is_lingering and not self.is_lost:
            return
        if self.is_lost or not self._protocol.lingers or self._transport.is_closing():
            self._transport.close()
            self.watch_reading()
            return
        self._is_lingering = True
        try:
            self._transport.write_eof()
        except OSError:
            # The client has reset the connection, which the event loop has yet to see.
            self._transport.abort()
            return
        self._transport.resume_reading()
        self._loop.call_later(_LINGER_SECONDS, self._transport.abort)

    def watch_reading(self) -> None:
        """Break the connection if the client does not read what was written."""
        if self._unread is None and (size := self._transport.get_write_buffer_size()):
            self._unread = size
            self._loop.call_later(self._limits.body_seconds, self._check_reading)

    def _check_reading(self) -> None:
        unread, self._unread = cast(int, self._unread), None
        size = 0 if self.is_lost else self._transport.get_write_buffer_size()
        if size > unread - self._limits.body_seconds * self._limits.body_rate and size > 0:
            self._transport.abort()
        else:
            self.watch_reading()

    def probe(self) -> None:
        """Send what every answer starts with, and see whether the client's kernel refuses it."""

        def write_rest(data: bytes) -> None:
            self.write = self._transport.write
            self._transport.write(data[len(_FIRST_BYTES) :])

        def ask_kernel(pause: float) -> None:
            if self.is_lost or self._transport.is_closing():
                return
            sock = self._transport.get_extra_info("socket")
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._transport.abort()
            else:
                pause = min(2 * pause, 1.0)
                self._loop.call_later(pause, ask_kernel, pause)

        self._transport.write(_FIRST_BYTES)
        self.write = write_rest
        self._loop.call_later(0.02, ask_kernel, 0.02)


def unframed(app: Any, cycle: Any) -> Any:
    """An application for a client of HTTP/1.0, who would read the lengths of chunks as the answer.
    One without a length ends with its connection, and one that breaks off resets it, so that it is
    not taken for a whole one.

    Args:
        app: An ASGI application.
        cycle: Uvicorn's, of the request.
    """

    def end_by_reset(resets: bool) -> None:
        sock = cycle.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", resets, 0))

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        has_length = True

        async def send_on(message: Any) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(
                    name.lower() == b"content-length" for name, _ in message["headers"]
                )
                if not has_length:
                    cycle.chunked_encoding = False
                    end_by_reset(True)
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))
                if not message.get("more_body", False):
                    end_by_reset(False)
            await send(message)

        await app(scope, receive, send_on)

    return answer
