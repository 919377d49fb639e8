"""Ports for servers that tests start."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port of 127.0.0.1 that the kernel gives to nobody else for a minute.

    A connection that ended here leaves it in TIME_WAIT: neither `bind` to port 0 nor a client that
    connects is given such a port, and a server that asks for it by its number, with SO_REUSEADDR as
    servers do, gets it. One that was only bound and closed again is now and then given to another test
    before the server that it is for has started.
    """
    with socket.socket() as listening, socket.socket() as client:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", 0))
        listening.listen(1)
        client.connect(listening.getsockname())
        accepted, _ = listening.accept()
        # Who closes first has the TIME_WAIT.
        accepted.close()
        port: int = listening.getsockname()[1]
        return port
