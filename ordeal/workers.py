"""Model workers killed at random while clients ask."""

from __future__ import annotations

import http.client
import signal
import threading
import time

from ordeal.common import Trial, children, send
from ordeal.serving import Server

BACK = "serving again within 10 s of each kill"
HONEST = "/ping says 200 only while a worker can answer, and always answers within 2 s"
ONLY = "requests fail only by what was in the dead worker: 500 worker_died or 503, never otherwise"
PROMISES = (BACK, HONEST, ONLY)

CLIENTS = 6


def run(trial: Trial) -> None:
    """Kills one worker, all of them, or the process that holds the model, to the end."""
    stop = threading.Event()
    with Server(trial) as server:
        trial.bound(min(trial.end - time.monotonic(), 8 if trial.short else 300))
        threads = [
            threading.Thread(target=_client, args=(trial, server, stop)) for _ in range(CLIENTS)
        ]
        threads.append(threading.Thread(target=_pinger, args=(trial, server, stop)))
        for thread in threads:
            thread.start()
        while trial.has_time() or not trial.figures.get("kills"):
            time.sleep(trial.random.uniform(0.1, 3))
            _kill(trial, server)
            _wait_until_it_serves(trial, server)
        stop.set()
        for thread in threads:
            thread.join()


def _kill(trial: Trial, server: Server) -> None:
    workers = server.workers
    choice = trial.random.randrange(4)
    if choice == 0:
        victims = [*children(server.process.pid), *workers]
    elif choice == 1:
        victims = workers
    else:
        victims = workers[:1]
    for pid in victims:
        send(pid, signal.SIGKILL)
    trial.count("kills")
    trial.count("processes killed", len(victims))


def _wait_until_it_serves(trial: Trial, server: Server) -> None:
    began = time.monotonic()
    while not _answers(server) and time.monotonic() - began < 30:
        time.sleep(0.05)
    took = time.monotonic() - began
    trial.check(BACK, took < 10, f"{took:.1f} s")
    longest = max(trial.figures.get("longest until serving, s", 0), round(took, 1))
    trial.figure("longest until serving, s", longest)


def _answers(server: Server) -> bool:
    try:
        return server.invoke(timeout=30)[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def _client(trial: Trial, server: Server, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            status, body = server.invoke(timeout=60)
        except (OSError, http.client.HTTPException) as error:
            trial.check(ONLY, False, repr(error))
            continue
        trial.count(f"answers {status}")
        planned = status == 200 or b"worker_died" in body or b"not_ready" in body
        trial.check(ONLY, planned or b"overloaded" in body, (status, body))
        if status == 503:
            time.sleep(0.05)


def _pinger(trial: Trial, server: Server, stop: threading.Event) -> None:
    while not stop.wait(0.1):
        began = time.monotonic()
        status = server.ping()
        took = time.monotonic() - began
        living = server.metric("amphora_workers")
        # Between both questions a worker may come or go: only a clear contradiction counts.
        lied = status == 200 and living == 0 and server.ping() == 200 and not server.workers
        trial.check(HONEST, status in (200, 503) and took < 2 and not lied, (status, took, living))
