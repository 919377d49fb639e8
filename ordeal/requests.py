"""Hostile requests: schemathesis on the server's own OpenAPI, and raw sockets.

Each raw request is drawn from a seed, so that a broken promise can be repeated by its number.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import pickle
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from ordeal.common import Trial, clean_environ
from ordeal.serving import HEALTHY, Healthy, Server

PLANNED = "no 5xx but 503 overloaded and 504 deadline_exceeded"
CODE = "no code of a request is run"
FLAT = "memory and file descriptors do not grow"
BESIDE = "healthy requests beside are answered, and rightly"
ALIVE = "no worker dies, and the log has no traceback"
SCHEMA = "schemathesis finds nothing against /openapi.json"
PIPELINE = "pipelined requests are all answered, in their order"
PROMISES = (PLANNED, CODE, FLAT, BESIDE, ALIVE, SCHEMA, PIPELINE)

TYPES = (
    "application/json", "application/jsonlines", "text/csv", "text/plain", "application/x-npy",
    "application/octet-stream", "application/python-pickle", "application/json; charset=utf-16",
    "application/json; charset=rot13", "text/plain; charset=punycode", "text/csv; charset=idna",
    "application/yaml", "", ";", "text/\xff", "application/json; charset=\x01",
)  # fmt: skip
WANTS = ("", "*/*", "application/json", "text/csv", "application/x-npy", "image/png", "a" * 3000)


class _Payload:
    """Unpickled anywhere, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


class Hostile:
    """Requests of one seed."""

    def __init__(self, random_: random.Random, mark: Path) -> None:
        self.random = random_
        self.payload = pickle.dumps(_Payload(mark))
        self.mark = mark

    def body(self) -> bytes:
        """Something that looks like what a handler reads, or not at all."""
        return self.random.choice((
            self._json, self._json, self._nested, self._npy, self._text, self._bytes, self._lines,
        ))()  # fmt: skip

    def _json(self) -> bytes:
        odd = (
            "\ud800", "\0", "", " ", "a" * self.random.choice((10, 5000, 200_000)), 1e400, None,
            -0.0, 10**400, [], {}, True, "\u202e", "good " * 3000, "<s>", "[MASK]", ["\udfff"],
            [["good"]], {"text": "good"}, ["good"] * self.random.choice((0, 1, 300)), float("nan"),
        )  # fmt: skip
        value = self.random.choice(odd)
        key = self.random.choice(("inputs", "text", "instances", "", "parameters", "inputs\0"))
        parameters = self.random.choice((
            None, {}, [], {"top_k": value}, {"normalize": True}, {"top_k": 10**30}, {"stream": 1},
            {"top_k": -1}, {"top_k": True}, {"max_new_tokens": 1e9}, "x",
        ))  # fmt: skip
        document = self.random.choice((value, {key: value, "parameters": parameters}))
        return json.dumps(document).encode()

    def _nested(self) -> bytes:
        depth = self.random.choice((10, 900, 100_000, 2_000_000))
        opening = self.random.choice((b"[", b'{"inputs":', b'[{"text":'))
        return opening * (depth // len(opening))

    def _npy(self) -> bytes:
        import numpy as np

        stream = io.BytesIO()
        choice = self.random.randrange(7)
        if choice == 0:
            np.save(stream, np.array([_Payload(self.mark)], dtype=object), allow_pickle=True)
        elif choice == 1:
            return b"\x93NUMPY\x01\x00" + self._header(f"({10**9},)", "<U0")
        elif choice == 2:
            return b"\x93NUMPY\x01\x00" + self._header(f"({10**13},)", "<U5") + b"abc"
        elif choice == 3:
            return b"\x93NUMPY\x01\x00" + self._header("(" * 200, "<U5")
        elif choice == 4:
            np.savez(stream, a=np.array(["good"]))
            return stream.getvalue()[: self.random.randrange(1, 300)]
        elif choice == 5:
            np.save(stream, np.array([["good", "bad\0\ud800"]]))
        else:
            np.save(stream, np.array([1.0, float("nan")]))
        return stream.getvalue()[: self.random.choice((20, 70, 90, 10**6))]

    def _header(self, shape: str, kind: str) -> bytes:
        text = (
            f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
        )
        return struct.pack("<H", len(text)) + text.encode()

    def _text(self) -> bytes:
        return self.random.choice((
            b'"a,b\n', b'text,label\n"x', b"a\rb\rc", b"\xef\xbb\xbftext\ngood", b"text\n" * 500,
            b"\xff\xfeg\0o\0", b"good\0bad", b"\n" * 5000, b'"' * 9999, b"x," * 9999,
            b'text\n"' + b"z" * 200_000 + b'"', b"!!python/object/apply:os.system ['id']",
        ))  # fmt: skip

    def _bytes(self) -> bytes:
        some = self.random.randbytes(self.random.choice((0, 1, 64, 4096)))
        return self.random.choice((some, self.payload, b"\x1f\x8b" + some, b"PK\x03\x04" + some))

    def _lines(self) -> bytes:
        lines = [self.random.choice((b'"good"', b"{}", b"", b"[[", b'{"inputs": "x"}', b"NaN"))
                 for _ in range(self.random.randrange(20))]  # fmt: skip
        return b"\n".join(lines)

    def head(self) -> tuple[str, str, list[tuple[str, str]]]:
        """Method, path and headers."""
        target = self.random.choice((
            "/invocations", "/invocations", "/invocations", "/invocations", "/ping", "/metrics",
            "/models", "/models/x/invoke", "/endpoints/e/invocations", "/openapi.json", "/%2e%2e/",
            "/endpoints/e/invocations-response-stream", "/execution-parameters", "/%00", "/%ff%fe",
            "/../../etc/passwd", "//invocations", "/" + "a" * self.random.choice((10, 9000)), "*",
            "/invocations?" + "q=%F0&" * 100, "http://x/invocations",
            "/endpoints/%0d%0aX:1/invocations",
        ))  # fmt: skip
        method = self.random.choice(
            ("POST", "POST", "POST", "GET", "PUT", "HEAD", "OPTIONS", "DELETE")
        )
        headers = [("Host", "x"), ("Content-Type", self.random.choice(TYPES))]
        headers.append(("Accept", self.random.choice(WANTS)))
        extra = (
            ("X-Amzn-SageMaker-Custom-Attributes", self.random.choice(("a=b", "\xe9" * 2000))),
            ("X-Amzn-SageMaker-Session-Id", self.random.choice(("NEW_SESSION", "x" * 300, "\xff"))),
            ("X-Amzn-SageMaker-Inference-Id", "\xff{}\"'"),
            ("X-Amzn-SageMaker-Target-Model", "../../etc"),
            ("Expect", "100-continue"), ("Upgrade", "websocket"), ("Connection", "Upgrade, close"),
            ("Content-Encoding", "gzip"), ("X-" + "y" * 3000, "z"), ("Cookie", "c" * 8000),
        )  # fmt: skip
        headers += self.random.sample(extra, self.random.randrange(3))
        return method, target, headers

    def request(self) -> tuple[bytes, bool]:
        """The bytes of a request, and whether its framing is right."""
        method, target, headers = self.head()
        body = self.body()
        framing = self.random.randrange(12)
        if framing < 7:
            headers.append(("Content-Length", str(len(body))))
        elif framing < 9:
            headers.append(("Transfer-Encoding", "chunked"))
            cut = self.random.randrange(len(body) + 1)
            parts = [part for part in (body[:cut], body[cut:]) if part]
            body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        else:
            return self._misframed(method, target, headers, body), False
        return _bytes(method, target, headers, body), True

    def _misframed(
        self, method: str, target: str, headers: list[tuple[str, str]], body: bytes
    ) -> bytes:
        lie = self.random.choice((
            [("Content-Length", str(len(body) + 50))], [("Content-Length", "-1")],
            [("Content-Length", "+5")], [("Content-Length", "5, 6")], [("Content-Length", "1e3")],
            [("Content-Length", str(10**30))], [("Content-Length", "5"), ("Content-Length", "6")],
            [("Transfer-Encoding", "chunked"), ("Content-Length", "5")],
            [("Transfer-Encoding", "gzip, chunked")], [("Transfer-Encoding", "chunked")],
            [("Content-Length", "\xb2")], [("Content-Length", "0x10")], [("Content-Length", "1_0")],
            [(f"X-{n}", "flood") for n in range(self.random.choice((100, 3000)))],
            [("X-Long", "l" * 100_000)], [("Bad Name", "x")], [("", "x")], [("X", "a\r\n b")],
        ))  # fmt: skip
        return _bytes(method, target, [*headers, *lie], body[:100_000])


def _bytes(method: str, target: str, headers: list[tuple[str, str]], body: bytes) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def run(trial: Trial) -> None:
    """One server; everything against it, with a healthy client beside."""
    mark = trial.folder / "code-was-run"
    wanted = 600 if trial.short else 100_000
    with Server(trial, AMPHORA_UI="1") as server, Healthy(server) as healthy:
        _oversized(trial, server)
        _slow(trial, server)
        _pipelined(trial, server)
        _schemathesis(trial, server, 6 if trial.short else 300)
        _raw(trial, server, mark, wanted // 3)
        before = server.weight
        _raw(trial, server, mark, wanted)
        time.sleep(2)
        after = server.weight
        for name, seen in zip(("before", "after"), (before, after), strict=True):
            trial.figure(f"{name}: MB, descriptors", f"{seen[0]:.0f}, {seen[1]}")
        grown = after[0] - before[0]
        # For some 1,000 requests, pages that the workers share are written to for the first time.
        most = 60 if trial.short else 25
        trial.check(FLAT, grown < most and after[1] <= before[1] + 10, (before, after))
        restarts = server.metric("amphora_worker_restarts_total")
        trial.check(ALIVE, restarts == 0, f"{restarts} restarts")
        trial.check(CODE, not mark.exists(), mark)
        trial.check(ALIVE, server.ping() == 200, "ping")
    trial.check(BESIDE, not healthy.wrong, healthy.wrong[:3])
    trial.promises[BESIDE].times += healthy.answered
    trial.figure("longest healthy answer, s", round(healthy.longest, 2))
    found = re.findall(r"^\w*Error.*$|^.*internal_error.*$", server.text, re.MULTILINE)
    trial.check(ALIVE, "Traceback" not in server.text, found[-3:] or server.text[-2000:])


def _raw(trial: Trial, server: Server, mark: Path, count: int) -> None:
    """So many requests of four seeds, by four threads."""
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
            planned = status < 500 or b"overloaded" in body or b"deadline_exceeded" in body
            with lock:
                answers[str(status)] += 1
                detail = (
                    f"{seed} {number}: {request[:300]!r} ... {request[-100:]!r} -> {body[:300]!r}"
                )
                trial.check(PLANNED, planned, detail)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for status, times in answers.items():
        trial.count(f"answers {status}", times)


def _exchange(port: int, request: bytes, framed: bool) -> tuple[int, bytes]:
    """Status and body; 0 where the server closed without an answer, or waits for the rest."""
    with socket.create_connection(("127.0.0.1", port), timeout=30 if framed else 0.05) as sock:
        with contextlib.suppress(OSError):  # It may answer, and close, before it has all.
            sock.sendall(request)
        try:
            answer = http.client.HTTPResponse(sock, method=request.split(b" ", 1)[0].decode())
            answer.begin()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            return 0, repr(error).encode()


def _schemathesis(trial: Trial, server: Server, seconds: int) -> None:
    checks = "not_a_server_error,status_code_conformance,content_type_conformance"
    checks += ",response_schema_conformance,unsupported_method,allow_header_conformance"
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "run",
        f"http://127.0.0.1:{server.port}/openapi.json", "--checks", checks,
        "--seed", str(trial.seed), "--max-time", str(seconds), "--phases", "coverage,fuzzing",
        "--suppress-health-check", "all", "--no-shrink", "--warnings", "off",
        "--request-timeout", "60",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=trial.folder, env=clean_environ(NO_COLOR="1")
    )
    (trial.folder / "schemathesis.txt").write_text(done.stdout + done.stderr)
    trial.check(SCHEMA, done.returncode == 0, done.stdout[-2500:] + done.stderr[-500:])
    if generated := re.search(r"(\d+) generated", done.stdout):
        trial.figure("schemathesis requests", int(generated[1]))


def _slow(trial: Trial, server: Server) -> None:
    """Connections that send a byte now and then, or nothing, or half-close."""
    begin = _bytes("POST", "/invocations", [("Host", "x"), ("Content-Length", "500")], b"{")
    socks = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
    for number, sock in enumerate(socks):
        sock.sendall(begin[: number if number < len(begin) else len(begin)])
        if number % 5 == 0:
            sock.shutdown(socket.SHUT_WR)
    for _ in range(5):
        for sock in socks[1::5]:
            try:
                sock.sendall(b"x")
            except OSError:
                continue
        time.sleep(0.2)
    trial.check(BESIDE, server.invoke()[0] == 200, "beside slow clients")
    for sock in socks:
        sock.close()


def _oversized(trial: Trial, server: Server) -> None:
    head = [("Host", "x"), ("Content-Type", "application/json")]
    megabyte = b" " * 2**20
    for framing in (("Content-Length", str(200 * 2**20)), ("Transfer-Encoding", "chunked")):
        part = b"100000\r\n" + megabyte + b"\r\n" if framing[1] == "chunked" else megabyte
        request = _bytes("POST", "/invocations", [*head, framing], part * 27)
        status, _ = _exchange(server.port, request + part * 100, True)
        trial.check(PLANNED, status in (413, 0), f"{framing}: {status}")
        trial.count(f"oversized answered {status}")


def _pipelined(trial: Trial, server: Server) -> None:
    """Forty requests in one write: a good one, then one that asks too much, in turns."""
    good = json.dumps(HEALTHY).encode()
    wrong = b'{"inputs": 1}'
    bodies = [good, wrong] * 20
    head = [("Host", "x"), ("Content-Type", "application/json")]
    requests = [
        _bytes("POST", "/invocations", [*head, ("Content-Length", str(len(body)))], body)
        for body in bodies
    ]
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        sock.sendall(b"".join(requests))
        received = b""
        while received.count(b"HTTP/1.1 ") < 40 and (part := sock.recv(65536)):
            received += part
    statuses = re.findall(rb"HTTP/1.1 (\d+)", received)
    trial.check(PIPELINE, statuses == [b"200", b"400"] * 20, statuses)
