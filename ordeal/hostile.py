"""Random requests, as bytes, that resemble what a server reads, or do not."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path

TYPES = (
    "application/json", "application/jsonlines", "text/csv", "text/plain", "application/x-npy",
    "application/octet-stream", "application/python-pickle", "application/json; charset=utf-16",
    "application/json; charset=rot13", "text/plain; charset=punycode", "text/csv; charset=idna",
    "application/yaml", "", ";", "text/\xff", "application/json; charset=\x01",
)  # fmt: skip
WANTS = ("", "*/*", "application/json", "text/csv", "application/x-npy", "image/png", "a" * 3000)


class _Payload:
    """Leaves a file when it is unpickled."""

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
        """Return bytes that resemble what a handler reads, or do not."""
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
        """Return method, path and headers."""
        target = self.random.choice((
            "/invocations", "/invocations", "/invocations", "/invocations", "/ping", "/metrics",
            "/models", "/models/x/invoke", "/%2e%2e/",
            "/execution-parameters", "/%00", "/%ff%fe",
            "/../../etc/passwd", "//invocations", "/" + "a" * self.random.choice((10, 9000)), "*",
            "/invocations?" + "q=%F0&" * 100, "http://x/invocations",
            "/models/%0d%0aX:1/invoke",
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
        """Return the bytes of a request, and whether its framing is right."""
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
        return request_bytes(method, target, headers, body), True

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
        return request_bytes(method, target, [*headers, *lie], body[:100_000])


def request_bytes(method: str, target: str, headers: list[tuple[str, str]], body: bytes) -> bytes:
    """Return the bytes of a request."""
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body
