"""Prometheus metrics, and the access log: one JSON line for each answer."""

from __future__ import annotations

import contextlib
import json
import time
from functools import partial
from typing import TextIO

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# The platform requests these every few seconds; their lines would bury those of invocations.
_QUIET = {"/ping", "/ping/", "/health", "/metrics"}
_ENCODER = json.JSONEncoder(ensure_ascii=False)
GONE = "amphora.gone"
"""The key of a request's scope whose future is done once the client has gone."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The server's metrics, in the order in which `/metrics` shows them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, namespace="amphora", registry=self.registry)
        gauge = partial(Gauge, namespace="amphora", registry=self.registry)
        histogram = partial(
            Histogram, namespace="amphora", registry=self.registry, buckets=_SECONDS
        )
        self.requests = counter("requests", "Answers by status.", ["status"])
        self.seconds = histogram(
            "request_seconds", "From a request's arrival to the end of its answer."
        )
        self.queued_seconds = histogram(
            "queue_seconds", "From a request's arrival to the start of its prediction."
        )
        self.batch_size = histogram(
            "batch_size", "Requests that a worker got together.", buckets=_SIZES
        )
        self.slices = counter(
            "slices",
            "Turns of requests that share a worker: a list's model calls, a text's tokens.",
        )
        self.calls = counter("predictions", "Model calls.")
        self.tokens = counter("tokens", "Tokens of requests, without padding.")
        self.padding = counter("padding_tokens", "Padding tokens.")
        self.restarts = counter("worker_restarts", "Model workers that were replaced.")
        self.waiting = gauge("queue_requests", "Requests that wait for a worker.")
        self.queue_age = gauge("queue_age_seconds", "How long the oldest of them has waited.")
        self.workers = gauge("workers", "Living model workers.")
        self.model = gauge(
            "model", "1 for the task and engine of each loaded model.", ["task", "engine"]
        )


class AccessLog:
    """ASGI middleware that counts answers and writes a line of JSON for each, without its body."""

    def __init__(self, app: ASGIApp, metrics: Metrics, output: TextIO) -> None:
        self._app = app
        self._metrics = metrics
        self._output = output
        self._by_status: dict[int, Counter] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.monotonic()
        status = bytes_out = 0
        is_whole = False

        async def counting_send(message: Message) -> None:
            nonlocal status, bytes_out, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                bytes_out += len(message.get("body", b""))
                is_whole = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, counting_send)
        finally:
            if not is_whole and GONE in scope and scope[GONE].done():
                status = 499  # as for a client that left before the answer began
            if scope["path"] not in _QUIET:
                seconds = time.monotonic() - start
                if (counter := self._by_status.get(status)) is None:
                    counter = self._by_status[status] = self._metrics.requests.labels(status)
                counter.inc()
                self._metrics.seconds.observe(seconds)
                headers = dict(scope["headers"])
                inference_id = headers.get(b"x-amzn-sagemaker-inference-id", b"")
                line = {
                    "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
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
                # logging would take three times as long.
                with contextlib.suppress(OSError, ValueError):
                    self._output.write(_ENCODER.encode(line) + "\n")
                    self._output.flush()
