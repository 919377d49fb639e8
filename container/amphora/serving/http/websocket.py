"""The WebSocket `/invocations-bidirectional-stream`: each message is an invocation; at a route of a
client's API, a body of that route.

An answer is one message; a stream is one message for each chunk. Errors have the same JSON as over
HTTP, and leave the connection open. All messages have the headers of the handshake.
"""

from __future__ import annotations

import asyncio
import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING

from starlette.websockets import WebSocket, WebSocketDisconnect

from amphora.serving.http.invocations import Invocations, check_route, chunks, error_body
from amphora.serving.protocol import media_types
from amphora.serving.protocol.media_types import Fault

if TYPE_CHECKING:
    from amphora.serving.http.invocations import Backend

# Messages that are read before earlier ones are answered. The end of the connection is only seen
# behind them.
_MOST_AHEAD = 8


async def converse(socket: WebSocket, invocations: Invocations, pool: Backend) -> None:
    """Answer each message as an invocation, in order, until the client leaves."""
    await socket.accept()
    inbox: asyncio.Queue[bytes] = asyncio.Queue(_MOST_AHEAD)

    async def read() -> None:
        while (message := await socket.receive())["type"] != "websocket.disconnect":
            data = message.get("bytes")
            await inbox.put(data if data is not None else (message.get("text") or "").encode())

    async def answer() -> None:
        while not invocations.draining:
            body, identifier = await inbox.get(), uuid.uuid4().hex
            try:
                call = invocations.call(socket, identifier, body)
                if len(body) > invocations.settings.max_body:
                    raise Fault(413, "payload_too_large", f"{len(body)} bytes are too many.")
                check_route(call.path, pool)
                pool.submit(call)
                reply = await invocations.wait(pool, call)
                if reply.chunks is None:
                    await _send(socket, reply.body, reply.content_type)
                else:
                    async with aclosing(chunks(call, reply, pool)) as parts:
                        async for chunk in parts:
                            await _send(socket, chunk, reply.content_type)
            except Fault as fault:
                await socket.send_text(error_body(fault.code, str(fault), identifier).decode())
        await socket.close(1012, "The server is stopping.")

    tasks = [asyncio.create_task(read()), asyncio.create_task(answer())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception) and not isinstance(end, (WebSocketDisconnect, RuntimeError)):
            raise end


async def _send(socket: WebSocket, body: bytes, content_type: str) -> None:
    if media_types.is_text(content_type):
        await socket.send_text(body.decode(media_types.charset(content_type)))
    else:
        await socket.send_bytes(body)
