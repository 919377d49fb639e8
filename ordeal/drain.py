"""SIGTERM under load, again and again: whatever was accepted is answered."""

from __future__ import annotations

import http.client
import json
import threading
import time

from ordeal.common import Trial
from ordeal.serving import HEALTHY, Server

LOST = "no accepted request is lost"
ENDS = "the server ends within 28 s of SIGTERM, with exit code 0"
PROMISES = (LOST, ENDS)

CLIENTS = 16


def run(trial: Trial) -> None:
    """Each round a server of its own, under the load of clients with and without keep-alive."""
    for _ in range(2 if trial.short else 50):
        if trial.has_time():
            with Server(trial) as server:
                _round(trial, server)
            trial.count("SIGTERM")


def _round(trial: Trial, server: Server) -> None:
    stop = threading.Event()
    threads = [
        threading.Thread(target=_client, args=(trial, server.port, number % 2 == 0, stop))
        for number in range(CLIENTS)
    ]
    for thread in threads:
        thread.start()
    time.sleep(trial.random.uniform(0.3, 1.5))
    began = time.monotonic()
    code = server.stop()
    took = time.monotonic() - began
    stop.set()
    for thread in threads:
        thread.join()
    trial.check(ENDS, code == 0 and took < 28, (code, took, server.text[-1000:]))
    longest = max(trial.figures.get("longest end, s", 0), round(took, 1))
    trial.figure("longest end, s", longest)


def _client(trial: Trial, port: int, keeps: bool, stop: threading.Event) -> None:
    """Ask until the port is closed. A refused connection is no loss; a broken one is.

    On a connection that is kept, the server may close while the next request is on its way, as
    HTTP allows: that one counts only where the answer before did not announce the end.
    """
    body = json.dumps(HEALTHY).encode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    while not stop.is_set():
        fresh = connection.sock is None
        try:
            if fresh:
                connection.connect()
        except OSError:
            return
        try:
            connection.request("POST", "/invocations", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            trial.check(LOST, answer.status == 200, answer.status)
            announced = answer.getheader("connection") == "close"
        except (TimeoutError, OSError, http.client.HTTPException) as error:
            trial.check(LOST, False, f"{error!r} on a {'fresh' if fresh else 'kept'} connection")
            return
        if announced or not keeps:
            connection.close()
