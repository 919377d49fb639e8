"""More than the server can do: twice its capacity, and 256 clients that never back off."""

from __future__ import annotations

import http.client
import json
import random
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial

from ordeal.common import ROOT, Trial, background_threads
from ordeal.serving import HEALTHY, Server

SHARE = "good answers under overload are at least 90 % of the peak without it"
MEMORY = "memory does not grow under overload"
PING = "/ping answers 200 within 2 s throughout"
ONLY = "every answer is 200, 503 overloaded or 504"
PROMISES = (SHARE, MEMORY, PING, ONLY)


@dataclass
class Counts:
    """What clients saw."""

    good: int = 0
    refused: int = 0
    other: int = 0


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
    trial.check(ONLY, counts.other == 0 and counts.good > 0, counts)
    rate = round(counts.good / seconds)
    trial.figure(name, f"{rate}/s good, {round(counts.refused / seconds)}/s refused")
    return rate


def _hammer(server: Server, clients: int, seconds: float, requests: float = 0) -> Counts:
    """Run clients in another process, so that they do not wait for this one's lock."""
    command = [sys.executable, "-m", "ordeal.load", str(server.port), str(clients), str(seconds)]
    command.append(str(clients / requests if requests else 0))
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    return Counts(**json.loads(done.stdout))


def _pinger(trial: Trial, server: Server, stop: threading.Event) -> None:
    while not stop.wait(0.2):
        began = time.monotonic()
        status = server.ping()
        seconds = time.monotonic() - began
        trial.check(PING, status == 200 and seconds < 2, (status, seconds))
        trial.longest("longest ping, s", seconds)


def _client(port: int, end: float, pause: float, counts: Counts) -> None:
    """Send requests, one in `pause` seconds; a client that is late sends the next one at once."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps(HEALTHY).encode()
    due = time.monotonic() + random.uniform(0, pause)
    while time.monotonic() < end:
        time.sleep(max(0, due - time.monotonic()))
        due += pause
        try:
            connection.request("POST", "/invocations", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException):
            counts.other += 1
            connection.close()
            continue
        if answer.status == 200:
            counts.good += 1
        elif answer.status == 504 or (answer.status == 503 and b"overloaded" in text):
            counts.refused += 1
        else:
            counts.other += 1


def _main(port: int, clients: int, seconds: float, pause: float) -> None:
    counts = [Counts() for _ in range(clients)]
    end = time.monotonic() + seconds
    with background_threads(*(partial(_client, port, end, pause, count) for count in counts)):
        pass
    total = {key: sum(vars(count)[key] for count in counts) for key in vars(Counts())}
    print(json.dumps(total))


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
