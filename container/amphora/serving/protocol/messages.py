"""The messages between the front process and its model workers, over a socket pair.

A message is sent as a frame: two lengths, a JSON object and raw bytes. Bodies travel as they are,
and nothing that came from the network is ever unpickled.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from dataclasses import dataclass, field
from typing import Any, TypeAlias, get_args

_LENGTHS = struct.Struct("!IQ")
# One for all messages, since its construction takes as long as a short message.
_ENCODER = json.JSONEncoder(separators=(",", ":"), default=vars)
CHUNKS_AHEAD = 64
"""Chunks of a stream that wait for a client that reads slower than its worker writes."""


# From the front to a new process, and its answers.


@dataclass(frozen=True, kw_only=True)
class Load:
    settings: dict[str, Any]
    """The fields of a `ServerSettings`, with paths as text."""
    log_level: int
    share: bool
    """Whether the process is to be forked."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    batches: bool
    turns: bool = False
    """Whether a worker takes more requests while others are at work."""
    description: dict[str, Any]
    """The result of the handlers' `describe_fn`; empty if there is none."""
    forkable: bool
    """Whether it forks a worker for each descriptor that it is sent; else it is itself a worker."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Failed:
    reason: str


@dataclass(frozen=True, kw_only=True)
class Forked:
    pid: int


# From the front to a worker.


@dataclass(frozen=True, kw_only=True)
class Batch:
    batch: int
    """Its number."""
    items: list[dict[str, Any]]
    """Of each request `id`, `content_type`, `accept`, `headers`, `path`, and its body's `size`. The
    bodies follow one another."""


@dataclass(frozen=True, kw_only=True)
class Cancel:
    """The client of a request has gone."""

    id: str


@dataclass(frozen=True, kw_only=True)
class Credit:
    """The client of a stream has read so many more chunks."""

    id: str
    count: int


@dataclass(frozen=True, kw_only=True)
class Adapt:
    """Load an adapter of the model, or unload it if no folder is given."""

    name: str
    folder: str = ""


# From a worker to the front.


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """The outcome of `Adapt`."""

    name: str
    description: dict[str, Any]
    """What the handlers' `load_adapter_fn` returned."""
    reason: str = ""
    """Why it is not loaded."""


@dataclass(frozen=True, kw_only=True)
class State:
    """The worker's state, and its statistics since the last report."""

    state: str
    """`begun` when the work on a batch begins, `open` if it takes more requests while jobs are at
    work, `rests` if all jobs wait for their clients to read on, `idle` without jobs."""
    batch: int
    """The last batch that it has received."""
    tokens: int = 0
    padded: int = 0
    calls: int = 0
    slices: int = 0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer, or with `more` the head of a stream."""

    id: str
    status: int = 200
    type: str
    headers: dict[str, str] = field(default_factory=dict)
    more: bool = False


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A chunk of a stream, or without `more` its end."""

    id: str
    more: bool


@dataclass(frozen=True, kw_only=True)
class Error:
    """An error, in place of an answer or of the rest of a stream."""

    id: str
    status: int
    error: dict[str, Any]
    """`code`, `message` and `param` of a Fault."""


Message: TypeAlias = (
    Load | Loaded | Failed | Forked | Batch | Cancel | Credit | Adapt | Adapted | State | Answer
    | Chunk | Error
)  # fmt: skip
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Message)}


def pack(message: Message, body: bytes = b"") -> bytes:
    """Return a message and its body as a frame."""
    fields = {"message": type(message).__name__, **vars(message)}
    text = _ENCODER.encode(fields).encode()
    return b"".join((_LENGTHS.pack(len(text), len(body)), text, body))


def send(sock: socket.socket, message: Message, body: bytes = b"") -> None:
    """Send a message from a worker. Raises SystemExit if the front has ended."""
    try:
        sock.sendall(pack(message, body))
    except OSError as error:
        raise SystemExit(0) from error


def receive(sock: socket.socket) -> tuple[Any, bytes]:
    """Wait for the next message. Raises EOFError if the other side has closed the socket."""
    size, body_size = _LENGTHS.unpack(_receive_exactly(sock, _LENGTHS.size))
    return _parsed(_receive_exactly(sock, size)), _receive_exactly(sock, body_size)


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


async def read(reader: asyncio.StreamReader) -> tuple[Any, bytes]:
    """Wait for the next message in asyncio. Raises EOFError (asyncio.IncompleteReadError)."""
    size, body_size = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
    message = _parsed(await reader.readexactly(size))
    return message, await reader.readexactly(body_size) if body_size else b""


def _parsed(text: bytes) -> Any:
    fields = json.loads(text)
    return _KINDS[fields.pop("message")](**fields)
