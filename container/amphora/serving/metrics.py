"""What operators see: Prometheus metrics, and one JSON line for each answered request."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any, TextIO

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# The platform asks for these every few seconds; a line for each would bury the requests.
_QUIET = {"/ping", "/ping/", "/health", "/metrics"}
_ENCODER = json.JSONEncoder(ensure_ascii=False)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The server's figures, as `/metrics` shows them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "amphora_requests", "Answers by status.", ["status"], registry=self.registry
        )
        self.seconds = Histogram(
            "amphora_request_seconds",
            "From a request's arrival to the end of its answer.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.queued_seconds = Histogram(
            "amphora_queue_seconds",
            "From a request's arrival to the start of its prediction.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.batch_size = Histogram(
            "amphora_batch_size",
            "Requests that a worker took together.",
            buckets=_SIZES,
            registry=self.registry,
        )
        self.slices = Counter(
            "amphora_slices",
            "Turns of requests that share a worker: a list's calls of the model, a text's tokens.",
            registry=self.registry,
        )
        self.calls = Counter("amphora_predictions", "Calls of the model.", registry=self.registry)
        self.tokens = Counter(
            "amphora_tokens", "Tokens of requests, without padding.", registry=self.registry
        )
        self.padding = Counter(
            "amphora_padding_tokens",
            "Tokens of padding; over both, they are the padding's share.",
            registry=self.registry,
        )
        self.restarts = Counter(
            "amphora_worker_restarts", "Model workers that were replaced.", registry=self.registry
        )
        self.waiting = Gauge(
            "amphora_queue_requests", "Requests that wait for a worker.", registry=self.registry
        )
        self.queue_age = Gauge(
            "amphora_queue_age_seconds",
            "How long the oldest of them has waited.",
            registry=self.registry,
        )
        self.workers = Gauge("amphora_workers", "Living model workers.", registry=self.registry)

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)


class AccessLog:
    """ASGI middleware: counts every answer, and writes a line for it, without its body.

    Args:
        app: What answers.
        metrics: Where it counts.
        output: What the lines go to, each a JSON object.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, output: TextIO) -> None:
        self._app = app
        self._metrics = metrics
        self._output = output
        self._by_status: dict[int, Counter] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.monotonic()
        status = bytes_out = 0

        async def counting_send(message: Message) -> None:
            nonlocal status, bytes_out
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                bytes_out += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, counting_send)
        finally:
            if scope["path"] not in _QUIET:
                seconds = time.monotonic() - start
                self._count(status)
                self._metrics.seconds.observe(seconds)
                headers = dict(scope["headers"])
                inference_id = headers.get(b"x-amzn-sagemaker-inference-id", b"")
                line = {
                    "time": _now(),
                    "request_id": scope.get("state", {}).get("id", ""),
                    "inference_id": inference_id.decode("latin-1"),
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status,
                    "milliseconds": round(seconds * 1000, 2),
                    "content_type": headers.get(b"content-type", b"").decode("latin-1"),
                    "bytes_in": int(headers.get(b"content-length", b"0")),
                    "bytes_out": bytes_out,
                }
                self._write(line)

    def note_refusal(self, status: int, identifier: str) -> None:
        """Count and log a request that has reached no route: its head was broken, late or too
        large, so that method and path are not known."""
        self._count(status)
        self._write({"time": _now(), "request_id": identifier, "status": status})

    def _count(self, status: int) -> None:
        if (counter := self._by_status.get(status)) is None:
            counter = self._by_status[status] = self._metrics.requests.labels(status)
        counter.inc()

    def _write(self, line: dict[str, Any]) -> None:
        # Not by logging, which takes three times as long.
        with contextlib.suppress(OSError, ValueError):
            self._output.write(_ENCODER.encode(line) + "\n")
            self._output.flush()


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
