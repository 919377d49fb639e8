"""Hostile requests, by raw sockets.

Each is drawn from a seed, so that a broken promise can be repeated by its number.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import re
import socket
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

from ordeal.common import Trial, background_threads
from ordeal.hostile import Hostile, request_bytes
from ordeal.serving import HEALTHY, Healthy, Server

PLANNED = "no 5xx but 503 overloaded, 504 deadline_exceeded, and 501 for a transfer coding"
CODE = "no code of a request is run"
FLAT = "memory and file descriptors do not grow"
OTHERS = "healthy requests sent meanwhile get right answers"
ALIVE = "no worker dies, and the log has no traceback"
PIPELINE = "pipelined requests are all answered, in their order"
PROMISES = (PLANNED, CODE, FLAT, OTHERS, ALIVE, PIPELINE)
REASONS = {501: b"not_implemented", 503: b"overloaded", 504: b"deadline_exceeded"}


def run(trial: Trial) -> None:
    """Send everything to one server, while a client sends healthy requests."""
    mark = trial.folder / "code-was-run"
    wanted = 200 if trial.short else 100_000
    with Server(trial, AMPHORA_UI="1") as server, Healthy(server) as healthy:
        _oversized(trial, server)
        _slow(trial, server)
        _pipelined(trial, server)
        # Pages that the workers share are written to for the first time, the last ones after some
        # 50,000 requests; then each worker has its own.
        _raw(trial, server, mark, wanted // 2)
        before = server.weight
        _raw(trial, server, mark, wanted // 2)
        time.sleep(2)
        after = server.weight
        for name, seen in zip(("before", "after"), (before, after), strict=True):
            trial.figure(f"{name}: MB, descriptors", f"{seen[0]:.0f}, {seen[1]}")
        grown = after[0] - before[0]
        most = 60 if trial.short else 25
        trial.check(FLAT, grown < most and after[1] <= before[1] + 10, (before, after))
        restarts = server.metric("amphora_worker_restarts_total")
        trial.check(ALIVE, restarts == 0, f"{restarts} restarts")
        trial.check(CODE, not mark.exists(), mark)
        trial.check(ALIVE, server.ping() == 200, "ping")
    trial.check(OTHERS, not healthy.wrong, healthy.wrong[:3])
    trial.promises[OTHERS].times += healthy.answered
    trial.figure("longest healthy answer, s", round(healthy.longest, 2))
    matches = re.findall(r"^\w*Error.*$|^.*internal_error.*$", server.log, re.MULTILINE)
    trial.check(ALIVE, "Traceback" not in server.log, matches[-3:] or server.log[-2000:])


def _raw(trial: Trial, server: Server, mark: Path, count: int) -> None:
    """Send `count` requests of four seeds, by four threads."""
    seeds = [trial.random.random() for _ in range(4)]
    answers: Counter[str] = Counter()
    lock = threading.Lock()

    def work(seed: float) -> None:
        hostile = Hostile(random.Random(seed), mark)
        for number in range(count // len(seeds)):
            if not trial.has_time():
                return
            request, framed = hostile.request()
            status, body = _exchange(server.port, request, framed)
            reason = REASONS.get(status)
            is_explained = reason and (request.startswith(b"HEAD ") or reason in body)
            with lock:
                answers[str(status)] += 1
                sent = f"{request[:300]!r} ... {request[-100:]!r}"
                detail = f"{seed} {number}: {sent} -> {body[:300]!r}"
                trial.check(PLANNED, bool(status < 500 or is_explained), detail)

    with background_threads(*(partial(work, seed) for seed in seeds)):
        pass
    for status, times in answers.items():
        trial.count(f"answers {status}", times)


def _exchange(port: int, request: bytes, framed: bool) -> tuple[int, bytes]:
    """Return status and body; 0 if the server closed without an answer, or waits for the rest."""
    with socket.create_connection(("127.0.0.1", port), timeout=30 if framed else 0.05) as sock:
        with contextlib.suppress(OSError):  # It may answer, and close, before it has all.
            sock.sendall(request)
        try:
            answer = http.client.HTTPResponse(sock, method=request.split(b" ", 1)[0].decode())
            answer.begin()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            return 0, repr(error).encode()


def _slow(trial: Trial, server: Server) -> None:
    """Open connections that send a byte now and then, or nothing, or half-close."""
    begin = request_bytes("POST", "/invocations", [("Host", "x"), ("Content-Length", "500")], b"{")
    socks = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
    for number, sock in enumerate(socks):
        sock.sendall(begin[: number if number < len(begin) else len(begin)])
        if number % 5 == 0:
            sock.shutdown(socket.SHUT_WR)
    for _ in range(5):
        for sock in socks[1::5]:
            with contextlib.suppress(OSError):
                sock.sendall(b"x")
        time.sleep(0.2)
    trial.check(OTHERS, server.post()[0] == 200, "beside slow clients")
    for sock in socks:
        sock.close()


def _oversized(trial: Trial, server: Server) -> None:
    head = [("Host", "x"), ("Content-Type", "application/json")]
    megabyte = b" " * 2**20
    for framing in (("Content-Length", str(200 * 2**20)), ("Transfer-Encoding", "chunked")):
        part = b"100000\r\n" + megabyte + b"\r\n" if framing[1] == "chunked" else megabyte
        request = request_bytes("POST", "/invocations", [*head, framing], part * 27)
        status, _ = _exchange(server.port, request + part * 100, True)
        trial.check(PLANNED, status in (413, 0), f"{framing}: {status}")
        trial.count(f"oversized answered {status}")


def _pipelined(trial: Trial, server: Server) -> None:
    """Send forty requests in one write, good ones and wrong ones by turns."""
    good = json.dumps(HEALTHY).encode()
    wrong = b'{"inputs": 1}'
    bodies = [good, wrong] * 20
    head = [("Host", "x"), ("Content-Type", "application/json")]
    requests = [
        request_bytes("POST", "/invocations", [*head, ("Content-Length", str(len(body)))], body)
        for body in bodies
    ]
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        sock.sendall(b"".join(requests))
        received = b""
        while received.count(b"HTTP/1.1 ") < 40 and (part := sock.recv(65536)):
            received += part
    statuses = re.findall(rb"HTTP/1.1 (\d+)", received)
    trial.check(PIPELINE, statuses == [b"200", b"400"] * 20, statuses)
