"""Accepts connections, within a bound, so that `/ping` is answered however many are open.

Beyond the bound, connections that wait for no answer are closed: those that never had one before
those that did, the longest idle first. If all wait for answers, a few more are accepted, for
`/ping` and `/metrics` alone. asyncio's own server has no bound: without free descriptors, it writes
a traceback for each place in its backlog, every second.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

LOG = logging.getLogger("amphora.server")
_AT_ONCE = 64
# Of the connections that are closed for new ones, as a share: looking for them takes time.
_SHARE = 16
# Connections beyond the bound, for `/ping`.
_SPARE = 16
# Descriptors that stay free for files, workers and models.
_RESERVE = 48
_PAUSE = 0.05
_QUIET_SECONDS = 10.0
_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Connection(Protocol):
    """What an acceptor needs of a connection."""

    @property
    def rank(self) -> tuple[bool, float]:
        """The lowest is closed first."""

    @property
    def is_idle(self) -> bool:
        """Whether closing takes no answer from anybody."""

    def evict(self) -> None:
        """Close at once."""


def raise_limit() -> int:
    """Let this process open as many files as it may. Returns the soft limit that it had."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft


def affordable(connections: int, workers: int) -> int:
    """How many of these connections have a descriptor, beside what is open already."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return connections
    open_files = len(list(Path("/proc/self/fd").glob("*")))
    free = limit - open_files - _SPARE - _RESERVE - 2 * workers
    if free < connections:
        LOG.warning(
            "At most %d connections are kept open, not %d: the limit of open files is %d.",
            max(free, _SPARE), connections, limit,
        )  # fmt: skip
    return min(connections, max(free, _SPARE))


class Acceptor:
    """Listens on a socket.

    Args:
        sock: Bound, not yet listening.
        protocol: Makes a connection's protocol, from whether the bound is passed.
        connections: All that are open, also those of other protocols (WebSockets).
        backlog: Connections that the kernel keeps waiting.
        most: The bound.
    """

    def __init__(
        self,
        sock: socket.socket,
        protocol: Callable[[bool], asyncio.Protocol],
        connections: set[Any],
        backlog: int,
        most: int,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._protocol = protocol
        self._connections = connections
        self._most = most
        self._opening: set[asyncio.Task[Any]] = set()
        self._warned_at = -_QUIET_SECONDS
        self._evicted = 0
        sock.setblocking(False)
        sock.listen(backlog)
        # A new connection is read from before the next ones may take its place.
        self._at_once = max(1, min(_AT_ONCE, most // 8))
        self._loop.add_reader(sock, self._accept, self._at_once)

    def close(self) -> None:
        """Take what the backlog holds, and close the port."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._accept(1 << 20)
            self._sock.close()

    async def wait_closed(self) -> None:
        """For uvicorn."""

    def _accept(self, most: int) -> None:
        for _ in range(most):
            excess = len(self._connections) + len(self._opening) - self._most
            if excess >= 0:
                excess -= self._make_room()
                if excess >= _SPARE:
                    self._pause()
                    return
            try:
                connection, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _SHORTAGES:
                    raise
                if not self._make_room():
                    self._pause()
                return
            connection.setblocking(False)
            make_protocol = functools.partial(self._protocol, excess >= 0)
            opening = self._loop.create_task(
                self._loop.connect_accepted_socket(make_protocol, connection)
            )
            self._opening.add(opening)
            opening.add_done_callback(self._finish_opening)

    def _finish_opening(self, opening: asyncio.Task[Any]) -> None:
        self._opening.discard(opening)
        if not opening.cancelled() and (error := opening.exception()) is not None:
            self._warn(f"A connection could not be opened: {error}")

    def _make_room(self) -> int:
        """Close some idle connections. Returns how many."""
        idle: list[Connection] = [
            connection for connection in self._connections if getattr(connection, "is_idle", False)
        ]
        idle.sort(key=lambda connection: connection.rank)
        closed = idle[: max(1, len(self._connections) // _SHARE)]
        for connection in closed:
            connection.evict()
            self._connections.discard(connection)
        self._evicted += len(closed)
        self._warn(f"{self._evicted} idle ones were closed.")
        return len(closed)

    def _pause(self) -> None:
        """Accept again soon; what waits stays in the kernel's backlog."""
        self._warn("All of them wait for answers.")
        self._loop.remove_reader(self._sock)

        def accept_again() -> None:
            if self._sock.fileno() >= 0:
                self._loop.add_reader(self._sock, self._accept, self._at_once)

        self._loop.call_later(_PAUSE, accept_again)

    def _warn(self, what: str) -> None:
        now = time.monotonic()
        if now - self._warned_at >= _QUIET_SECONDS:
            self._warned_at = now
            LOG.warning(
                "%d connections are open, and %d may be. %s",
                len(self._connections), self._most, what,
            )  # fmt: skip
