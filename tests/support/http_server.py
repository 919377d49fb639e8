"""A real HTTP server of Python's own, for stand-ins of services that cannot be had here."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextlib.contextmanager
def running(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    """Serves by `handler` on a free port of the loopback address, which it gives."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
