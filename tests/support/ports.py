"""Free ports for servers that tests start."""

import socket


def free_port() -> int:
    """Return a port of 127.0.0.1 that the kernel assigns to no other socket for a minute.

    A connection that ended here leaves the port in TIME_WAIT: the kernel assigns it neither to a
    `bind` to port 0 nor to a client, but a server that binds its number with SO_REUSEADDR gets it. A
    port that was only bound and closed may be assigned to another test before its server starts.
    """
    with socket.socket() as listening, socket.socket() as client:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", 0))
        listening.listen(1)
        client.connect(listening.getsockname())
        accepted, _ = listening.accept()
        # The side that closes first keeps the TIME_WAIT.
        accepted.close()
        port: int = listening.getsockname()[1]
        return port
