"""SIGTERM under load, again and again: whatever was accepted is answered."""

from __future__ import annotations

import http.client
import json
import threading
import time
from functools import partial

from ordeal.common import Trial, background_threads
from ordeal.serving import HEALTHY, Server

LOST = "no accepted request is lost"
ENDS = "the server ends within 28 s of SIGTERM, with exit code 0"
PROMISES = (LOST, ENDS)

CLIENTS = 16


def run(trial: Trial) -> None:
    """Stop a new server each round, under the load of clients with and without keep-alive."""
    for _ in range(2 if trial.short else 50):
        if trial.has_time():
            with Server(trial) as server:
                _round(trial, server)
            trial.count("SIGTERM")


def _round(trial: Trial, server: Server) -> None:
    stop = threading.Event()
    clients = [
        partial(_client, trial, server.port, number % 2 == 0, stop) for number in range(CLIENTS)
    ]
    with background_threads(*clients, stop=stop):
        time.sleep(trial.random.uniform(0.3, 1.5))
        began = time.monotonic()
        code = server.stop()
        seconds = time.monotonic() - began
    trial.check(ENDS, code == 0 and seconds < 28, (code, seconds, server.log[-1000:]))
    trial.longest("longest end, s", seconds)


def _client(trial: Trial, port: int, keeps: bool, stop: threading.Event) -> None:
    """Send requests until the port is closed. A broken connection is a loss, a refused one is not.

    As HTTP allows, the server may close a connection that is kept while a request is on its way:
    such a request is lost only if the answer before it did not announce the end.
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
