"""`amphora serve`: the HTTP front, one process that never imports a user's code.

It owns the port, the queue and the answers; the model lives in workers (`amphora.pool`), so that
nothing that happens to a model takes `/ping` with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message

from amphora import codecs, devices, hosting
from amphora.codecs import Fault
from amphora.errors import ConfigError
from amphora.pool import Call, Pool, Reply

LOG = logging.getLogger("amphora.server")
# SageMaker kills 30 s after SIGTERM.
_DRAIN_SECONDS = 24
# What lies in the listening socket's backlog, or is on its way, is still accepted.
_LINGER_SECONDS = 0.3
_KEEP_ALIVE_SECONDS = 75
_CONTRACT_HEADERS = "x-amzn-"


def serve(base_dir: Path, environ: Mapping[str, str]) -> int:
    """Serve the model under `base_dir` until SIGTERM; 0 when every request was answered.

    Raises AmphoraError where the configuration is wrong or the model cannot be loaded.
    """
    found = devices.detect(environ)
    settings = hosting.read(base_dir, environ, found)
    LOG.info(
        "Serving on %s (%s) with %d workers of %d threads.",
        found.kind, found.reason, settings.workers, settings.threads,
    )  # fmt: skip
    with _listen(settings.port) as sock:
        return asyncio.run(_run(settings, environ, sock))


def _listen(port: int) -> socket.socket:
    # The protocol is named because asyncio turns Nagle's delay off only where it is.
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(("0.0.0.0", port))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"Port {port} cannot be used: {error.strerror}.",
            "Stop what uses it, or name another one in SAGEMAKER_BIND_TO_PORT.",
        ) from error
    return sock


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing: `_run` handles signals, and ends with exit code 0 rather than by the signal."""
        yield


async def _run(settings: hosting.Hosting, environ: Mapping[str, str], sock: socket.socket) -> int:
    pool = Pool(settings, environ)
    front = Front(settings, pool)
    config = uvicorn.Config(
        front.application(),
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_DRAIN_SECONDS,
        backlog=2048,
    )
    server = _Server(config)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    pool.start()
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    stopping = asyncio.create_task(stop.wait())
    ends: list[asyncio.Future[Any]] = [serving, stopping, pool.failed]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if not pool.failed.done():
        await _drain(front)
    server.should_exit = True
    await serving
    stopping.cancel()
    await pool.close()
    if pool.failed.done():
        raise pool.failed.result()
    LOG.info("All requests are answered; good bye.")
    return 0


async def _drain(front: Front) -> None:
    LOG.info("Stopping: what has arrived is answered first.")
    front.draining = True
    await asyncio.sleep(_LINGER_SECONDS)


class Front:
    """The HTTP side of one model."""

    def __init__(self, settings: hosting.Hosting, pool: Pool) -> None:
        self._settings = settings
        self._pool = pool
        self.draining = False

    def application(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/ping", self._ping, methods=["GET", "POST"]),
                Route("/invocations", self._invocations, methods=["POST"]),
            ],
            exception_handlers={
                Fault: self._on_fault,
                HTTPException: self._on_http_error,
                Exception: self._on_bug,
            },
        )

    async def _ping(self, request: Request) -> Response:
        return Response(status_code=200 if self._pool.is_ready else 503, headers=self._closing())

    def _closing(self) -> dict[str, str]:
        return {"connection": "close"} if self.draining else {}

    async def _invocations(self, request: Request) -> Response:
        call = await self._call(request)
        self._pool.submit(call)
        return self._response(call, await self._reply(request, call))

    async def _call(self, request: Request) -> Call:
        loop = asyncio.get_running_loop()
        headers = {
            name: value
            for name, value in request.headers.items()
            if name.startswith(_CONTRACT_HEADERS)
        }
        return Call(
            id=_request_id(request),
            body=await _body(request, self._settings.max_body),
            content_type=request.headers.get("content-type", codecs.JSON),
            accept=codecs.accepted(
                request.headers.get("accept", ""), self._settings.default_accept
            ),
            headers=headers,
            deadline=loop.time() + self._settings.timeout,
            reply=loop.create_future(),
        )

    async def _reply(self, request: Request, call: Call) -> Reply:
        """Wait for the worker, the deadline, or the client's going, whatever comes first."""
        gone = asyncio.create_task(_disconnected(request))
        try:
            remaining = call.deadline - asyncio.get_running_loop().time()
            ends: list[asyncio.Future[Any]] = [call.reply, gone]
            await asyncio.wait(ends, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
        if not call.reply.done():
            self._pool.cancel(call)
            call.fail(
                Fault(504, "deadline_exceeded", f"No answer within {self._settings.timeout:g} s.")
            )
        return call.reply.result()

    def _response(self, call: Call, reply: Reply) -> Response:
        headers = {
            **reply.headers,
            "content-type": reply.content_type,
            "x-request-id": call.id,
            **self._closing(),
        }
        if reply.chunks is None:
            return Response(reply.body, reply.status, headers)
        return StreamingResponse(self._chunks(call, reply), reply.status, headers)

    async def _chunks(self, call: Call, reply: Reply) -> AsyncIterator[bytes]:
        assert reply.chunks is not None
        finished = False
        try:
            while (chunk := await reply.chunks.get()) is not None:
                if isinstance(chunk, Exception):
                    # The status is long sent: breaking the connection is the only honest end.
                    raise chunk
                yield chunk
            finished = True
        finally:
            if not finished:
                self._pool.cancel(call)

    async def _on_fault(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, Fault)
        headers = {"retry-after": "1"} if error.status == 503 else {}
        return self._error(request, error.status, error.code, str(error), headers)

    async def _on_http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "bad_request")
        message = f"{request.method} {request.url.path}: {error.detail}."
        return self._error(request, error.status_code, code, message, dict(error.headers or {}))

    async def _on_bug(self, request: Request, error: Exception) -> Response:
        LOG.error("Request %s failed in the server.", _request_id(request), exc_info=error)
        return self._error(request, 500, "internal_error", "See the server's log.", {})

    def _error(
        self, request: Request, status: int, code: str, message: str, headers: dict[str, str]
    ) -> Response:
        request_id = _request_id(request)
        body = {"error": {"code": code, "message": message, "request_id": request_id}}
        headers = {**headers, "content-type": codecs.JSON, "x-request-id": request_id}
        return Response(json.dumps(body).encode(), status, {**headers, **self._closing()})


def _request_id(request: Request) -> str:
    if not hasattr(request.state, "id"):
        request.state.id = uuid.uuid4().hex
    identifier: str = request.state.id
    return identifier


async def _body(request: Request, limit: int) -> bytes:
    """The whole body. Raises Fault (413) past the limit, without keeping what is beyond it."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= limit:
            parts.append(part)
        else:
            # Read on, since many a client reads no answer before it has written all; not forever.
            parts.clear()
            if size > 4 * limit + hosting.MIB:
                break
    if size > limit:
        raise Fault(
            413,
            "payload_too_large",
            f"The body is larger than {limit} bytes; SAGEMAKER_MAX_PAYLOAD_IN_MB sets the limit.",
        )
    return b"".join(parts)


async def _disconnected(request: Request) -> None:
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await request.receive()
