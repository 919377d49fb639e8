"""Model workers killed at random while clients send requests."""

from __future__ import annotations

import signal
import threading
import time
from functools import partial

from ordeal.common import Trial, background_threads
from ordeal.serving import Server
from tests.support.processes import children, send
from tests.support.until import wait_until

BACK = "serving again within 10 s of each kill"
HONEST = "/ping says 200 only while a worker can answer, and always answers within 2 s"
ONLY = "requests fail only by what was in the dead worker: 500 worker_died or 503, never otherwise"
PROMISES = (BACK, HONEST, ONLY)

CLIENTS = 6


def run(trial: Trial) -> None:
    """Kill one worker, all of them, or also the process that holds the model, until the end."""
    stop = threading.Event()
    with Server(trial) as server:
        trial.limit_time(min(trial.end - time.monotonic(), 8 if trial.short else 300))
        clients = [partial(_client, trial, server, stop)] * CLIENTS
        with background_threads(*clients, partial(_pinger, trial, server, stop), stop=stop):
            while trial.has_time() or not trial.figures.get("kills"):
                time.sleep(trial.random.uniform(0.1, 3))
                _kill(trial, server)
                began = time.monotonic()
                wait_until(lambda: server.post(timeout=30)[0] == 200, 30)
                seconds = time.monotonic() - began
                trial.check(BACK, seconds < 10, f"{seconds:.1f} s")
                trial.longest("longest until serving, s", seconds)


def _kill(trial: Trial, server: Server) -> None:
    workers = server.workers()
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


def _client(trial: Trial, server: Server, stop: threading.Event) -> None:
    while not stop.is_set():
        status, body = server.post()
        trial.count(f"answers {status}")
        reasons = (b"worker_died", b"not_ready", b"overloaded")
        is_planned = status == 200 or (status > 0 and any(reason in body for reason in reasons))
        trial.check(ONLY, is_planned, (status, body))
        if status == 503:
            time.sleep(0.05)


def _pinger(trial: Trial, server: Server, stop: threading.Event) -> None:
    while not stop.wait(0.1):
        began = time.monotonic()
        status = server.ping()
        took = time.monotonic() - began
        living = server.metric("amphora_workers")
        # Between both questions a worker may come or go: only a clear contradiction counts.
        lied = status == 200 and living == 0 and server.ping() == 200 and not server.workers()
        trial.check(HONEST, status in (200, 503) and took < 2 and not lied, (status, took, living))
