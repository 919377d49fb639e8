"""`/invocations-bidirectional-stream`: a WebSocket whose every message is an invocation.

The answer comes back as one message, or as one for each chunk if the handler streams; an error
comes back as the JSON of every error, and the connection stays open. Sessions, content type and
accept are those of the handshake's headers.
"""

from __future__ import annotations

import asyncio
import uuid

from starlette.websockets import WebSocket, WebSocketDisconnect

from amphora.serving.http.invocations import Invocations, chunks, error_body
from amphora.serving.pool.pool import Pool, too_late
from amphora.serving.protocol import media_types
from amphora.serving.protocol.media_types import Fault
from amphora.serving.settings import ServerSettings
from amphora.serving.tracing import Tracing


class WebSocketInvocations:
    """The WebSocket route of one model."""

    def __init__(
        self, settings: ServerSettings, invocations: Invocations, pool: Pool, tracing: Tracing
    ) -> None:
        self._settings = settings
        self._tracing = tracing
        self._invocations = invocations
        self._pool = pool

    async def converse(self, socket: WebSocket) -> None:
        """Answer messages, in their order, until the client leaves or the server stops."""
        await socket.accept()
        try:
            while not self._invocations.draining:
                message = await socket.receive()
                if message["type"] == "websocket.disconnect":
                    return
                data = message.get("bytes")
                await self._answer(
                    socket, data if data is not None else (message.get("text") or "").encode()
                )
            await socket.close(1012, "The server is stopping.")
        except (WebSocketDisconnect, RuntimeError):
            return

    async def _answer(self, socket: WebSocket, body: bytes) -> None:
        identifier = uuid.uuid4().hex
        trace = self._tracing.begin("WebSocket message", socket.scope)
        error = "cancelled"
        try:
            call = self._invocations.call(socket, identifier, body)
            call.trace = trace
            if len(body) > self._settings.max_body:
                raise Fault(413, "payload_too_large", f"{len(body)} bytes are too many.")
            self._pool.submit(call)
            try:
                reply = await asyncio.wait_for(call.reply, self._settings.timeout)
            except asyncio.TimeoutError:
                self._pool.cancel(call)
                raise too_late(self._settings.timeout) from None
            except asyncio.CancelledError:
                self._pool.cancel(call)
                raise
            if reply.chunks is None:
                await _send(socket, reply.body, reply.content_type)
            else:
                async for chunk in chunks(call, reply, self._pool):
                    await _send(socket, chunk, reply.content_type)
            error = ""
        except Fault as fault:
            error = fault.code if fault.status >= 500 else ""
            await socket.send_text(error_body(fault.code, str(fault), identifier).decode())
        finally:
            if trace is not None:
                trace.end(error, {"amphora.request_id": identifier})


async def _send(socket: WebSocket, body: bytes, content_type: str) -> None:
    if media_types.is_text(content_type):
        await socket.send_text(body.decode(media_types.charset(content_type)))
    else:
        await socket.send_bytes(body)
