"""Frames between the front process and its model workers, over a socket pair.

A frame is two lengths, a JSON object and raw bytes. Bodies travel as they are, and nothing that
came from the network is ever unpickled.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

Header = dict[str, Any]
_LENGTHS = struct.Struct("!IQ")
CHUNKS_AHEAD = 64
"""Chunks of a stream that wait for a client that reads slower than its worker writes."""


def pack(header: Header, body: bytes = b"") -> bytes:
    """Return a frame as bytes."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join((_LENGTHS.pack(len(text), len(body)), text, body))


def send(sock: socket.socket, header: Header, body: bytes = b"") -> None:
    """Send one frame from a worker. Raises SystemExit if the front has ended."""
    try:
        sock.sendall(pack(header, body))
    except OSError as error:
        raise SystemExit(0) from error


def receive(sock: socket.socket) -> tuple[Header, bytes]:
    """Wait for the next frame. Raises EOFError if the other side has closed the socket."""
    header_size, body_size = _LENGTHS.unpack(_receive_exactly(sock, _LENGTHS.size))
    header = json.loads(_receive_exactly(sock, header_size))
    return header, _receive_exactly(sock, body_size)


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    if size == 0:
        return b""
    buffer = bytearray(size)
    view, position = memoryview(buffer), 0
    while position < size:
        try:
            count = sock.recv_into(view[position:])
        except ConnectionError:
            # The front closed it with unread data.
            count = 0
        if count == 0:
            raise EOFError("the front process closed the connection")
        position += count
    return bytes(buffer)


async def read(reader: asyncio.StreamReader) -> tuple[Header, bytes]:
    """Wait for the next frame in asyncio. Raises EOFError (asyncio.IncompleteReadError)."""
    header_size, body_size = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
    header = json.loads(await reader.readexactly(header_size))
    return header, await reader.readexactly(body_size) if body_size else b""
