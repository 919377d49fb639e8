"""More than the server can do: twice its capacity, and 256 clients that never back off."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

from ordeal.common import ROOT, Trial
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
    """The peak first, by 16 clients; then 32 of them, then 256, each for its share of the time."""
    seconds = 4 if trial.short else 60
    with Server(trial, AMPHORA_QUEUE_LIMIT="64") as server:
        _hammer(server, 16, 2)
        peak = _rate(trial, server, "peak: 16 clients", 16, seconds)
        before = server.weight[0]
        stop = threading.Event()
        pinger = threading.Thread(target=_pinger, args=(trial, server, stop))
        pinger.start()
        for clients, times in ((32, 1), (256, 1)):
            for _ in range(times if trial.short else times * 5):
                rate = _rate(trial, server, f"{clients} clients", clients, seconds)
                # In seconds-long rounds on shared cores the share says nothing.
                least = 0.3 if trial.short else 0.9
                trial.check(SHARE, rate >= least * peak, f"{clients} clients: {rate} of {peak}")
        stop.set()
        pinger.join()
        after = server.weight[0]
        trial.figure("MB before, after", f"{before:.0f}, {after:.0f}")
        trial.check(MEMORY, after - before < 60, (before, after))


def _rate(trial: Trial, server: Server, name: str, clients: int, seconds: float) -> float:
    counts = _hammer(server, clients, seconds)
    trial.check(ONLY, counts.other == 0 and counts.good > 0, counts)
    rate = round(counts.good / seconds)
    trial.figure(name, f"{rate}/s good, {round(counts.refused / seconds)}/s refused")
    return rate


def _hammer(server: Server, clients: int, seconds: float) -> Counts:
    """Clients in a process of its own, so that they do not share this one's lock."""
    command = [sys.executable, "-m", "ordeal.load", str(server.port), str(clients), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    return Counts(**json.loads(done.stdout))


def _pinger(trial: Trial, server: Server, stop: threading.Event) -> None:
    while not stop.wait(0.2):
        began = time.monotonic()
        status = server.ping()
        took = time.monotonic() - began
        trial.check(PING, status == 200 and took < 2, (status, took))
        longest = max(trial.figures.get("longest ping, s", 0), round(took, 2))
        trial.figure("longest ping, s", longest)


def _client(port: int, end: float, counts: Counts) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps(HEALTHY).encode()
    while time.monotonic() < end:
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


def _main(port: int, clients: int, seconds: float) -> None:
    counts = [Counts() for _ in range(clients)]
    end = time.monotonic() + seconds
    threads = [threading.Thread(target=_client, args=(port, end, each)) for each in counts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = {key: sum(vars(each)[key] for each in counts) for key in vars(Counts())}
    print(json.dumps(total))


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
