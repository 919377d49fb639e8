"""More than the server can do: twice its capacity, and 256 clients that never back off."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from functools import partial

from ordeal.common import ROOT, Trial, background_threads
from ordeal.serving import HEALTHY, Server

SHARE = "good answers under overload are at least 90 % of the peak without it"
MEMORY = "memory does not grow under overload"
PING = "/ping answers 200 within 2 s throughout"
ONLY = "every answer is 200, 503 overloaded or 504"
REFUSED = ("503 overloaded", "504 deadline_exceeded")
PROMISES = (SHARE, MEMORY, PING, ONLY)


def run(trial: Trial) -> None:
    """Measure the peak by 16 to 64 clients; then send twice as many requests a second, and then as
    many as 256 clients can that repeat at once."""
    seconds, rounds = (4, 1) if trial.short else (60, 10)
    with Server(trial, AMPHORA_QUEUE_LIMIT="64") as server:
        _hammer(server, 64, 2)
        few = (16, 32, 64)
        peak = max(_rate(trial, server, f"{many} clients", many, seconds / 2) for many in few)
        before = server.weight[0]
        stop = threading.Event()
        with background_threads(partial(_pinger, trial, server, stop), stop=stop):
            # In seconds-long rounds on shared cores the share says nothing.
            least = (0.3 if trial.short else 0.9) * peak
            for number in range(rounds):
                rate = _rate(trial, server, f"twice the peak {number + 1}", 192, seconds, 2 * peak)
                trial.check(SHARE, rate >= least, f"twice the peak: {rate} of {peak}")
            for number in range(rounds // 3 or 1):
                rate = _rate(trial, server, f"256 clients {number + 1}", 256, seconds)
                trial.check(SHARE, rate >= least, f"256 clients: {rate} of {peak}")
        after = server.weight[0]
        trial.figure("MB before, after", f"{before:.0f}, {after:.0f}")
        trial.check(MEMORY, after - before < 60, (before, after))


def _rate(
    trial: Trial, server: Server, name: str, clients: int, seconds: float, requests: float = 0
) -> float:
    """Return good answers a second to `requests` a second; 0: as many as the clients can send."""
    counts = _hammer(server, clients, seconds, requests)
    good = counts.pop("200", 0)
    refused = sum(counts.pop(answer, 0) for answer in REFUSED)
    trial.check(ONLY, good > 0 and not counts, (good, counts))
    rate = round(good / seconds)
    trial.figure(name, f"{rate}/s good, {round(refused / seconds)}/s refused")
    return rate


def _hammer(server: Server, clients: int, seconds: float, requests: float = 0) -> dict[str, int]:
    """Run clients in another process, so that they do not wait for this one's lock; return the
    counts of their answers."""
    body = server.log_path.with_name("body.jsonl")
    body.write_text(json.dumps(HEALTHY))
    pause = clients / requests if requests else 0
    arguments = (server.port, "/invocations", clients, seconds, body, pause)
    command = [sys.executable, str(ROOT / "benchmarks" / "load.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    counts: dict[str, int] = json.loads(done.stdout)["statuses"]
    return counts


def _pinger(trial: Trial, server: Server, stop: threading.Event) -> None:
    while not stop.wait(0.2):
        began = time.monotonic()
        status = server.ping()
        seconds = time.monotonic() - began
        trial.check(PING, status == 200 and seconds < 2, (status, seconds))
        trial.longest("longest ping, s", seconds)
