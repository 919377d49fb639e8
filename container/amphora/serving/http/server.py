"""`amphora serve`: the HTTP front, one process that never imports a user's code.

It owns the port, the queue and the answers; the model lives in workers (`amphora.serving.pool`), so
that nothing that happens to a model takes `/ping` with it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp

from amphora.common import devices
from amphora.common.errors import ConfigError
from amphora.serving import log_relay, metrics
from amphora.serving.http import acceptor, openapi, uvicorn_compat
from amphora.serving.http.clients import Clients
from amphora.serving.http.invocations import Exchange
from amphora.serving.http.multi_model import Models
from amphora.serving.http.refusal import Refusal
from amphora.serving.http.runtime_api import Runtime
from amphora.serving.http.websocket import Duplex
from amphora.serving.pool.pool import Pool
from amphora.serving.settings import MOST_TRANSFORM_MB, ServerSettings
from amphora.serving.settings import read as read_settings

LOG = logging.getLogger("amphora.server")
# SageMaker kills 30 s after SIGTERM.
_DRAIN_SECONDS = 24
# What is on its way is still accepted; once the port is closed, as long again for requests that
# are on their way in connections.
_LINGER_SECONDS = 0.3
_BACKLOG = 2048


def serve(base_dir: Path, environ: Mapping[str, str]) -> int:
    """Serve the model under `base_dir` until SIGTERM; 0 when every request was answered.

    Raises AmphoraError where the configuration is wrong or the model cannot be loaded.
    """
    log_relay.start()
    uvicorn_compat.check()
    host_devices = devices.detect(environ)
    settings = read_settings(base_dir, environ, host_devices)
    settings = replace(settings, worker_open_files=acceptor.raise_limit())
    LOG.info(
        "Serving on port %d, on %s (%s), with %d workers of %d threads.",
        settings.port, host_devices.kind, host_devices.reason, settings.workers, settings.threads,
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


class Front:
    """The application: the routes of one model, or of the multi-model API."""

    def __init__(self, settings: ServerSettings, environ: Mapping[str, str]) -> None:
        self.settings = settings
        self.exchange = Exchange(settings)
        self.metrics = metrics.Metrics()
        self._dropped_before = 0
        self.models: Models | None = None
        self.pool: Pool | None = None
        if settings.is_multi_model:
            self.models = Models(settings, environ, self.metrics, self.exchange)
        else:
            self.pool = Pool(settings, environ, self.metrics)

    def application(self) -> ASGIApp:
        """The ASGI application."""
        app = Starlette(
            routes=[*self._common_routes(), *self._model_routes()],
            exception_handlers=self.exchange.exception_handlers,
        )
        # A redirect would name whatever host the client's Host header names.
        app.router.redirect_slashes = False
        self._access = metrics.Access(app, self.metrics, metrics.access_logger())
        return self._access

    def note_refusal(self, refusal: Refusal, identifier: str) -> None:
        """Log and count a request that was refused before it reached a route."""
        self._access.note_refusal(refusal.status, identifier)

    def _common_routes(self) -> list[BaseRoute]:
        routes: list[BaseRoute] = [
            Route("/ping", self._ping, methods=["GET", "POST"]),
            Route("/ping/", self._ping, methods=["GET", "POST"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/openapi.json", self._openapi, methods=["GET"]),
            *Runtime(self.exchange, self._pool_of).routes,
        ]
        if self.settings.shows_page:
            routes.append(Route("/", self._page, methods=["GET"]))
        return routes

    def _model_routes(self) -> list[BaseRoute]:
        if self.models is not None:
            return list(self.models.routes)
        assert self.pool is not None
        duplex = Duplex(self.settings, self.exchange, self.pool)
        return [
            Route("/invocations", self._invocations, methods=["POST"]),
            Route("/invocations/", self._invocations, methods=["POST"]),
            # Where clients of Hugging Face's servers post that were given the server's address.
            Route("/", self._invocations, methods=["POST"]),
            *Clients(self.settings, self.exchange, self._pool_of).routes,
            Route("/execution-parameters", self._execution_parameters, methods=["GET"]),
            WebSocketRoute("/invocations-bidirectional-stream", duplex.__call__),
        ]

    @property
    def pools(self) -> list[Pool]:
        """Every pool that runs."""
        return self.models.pools if self.models is not None else [self.pool] if self.pool else []

    async def close(self) -> None:
        """End all workers."""
        await asyncio.gather(*(pool.close() for pool in self.pools))

    async def _ping(self, request: Request) -> Response:
        return self.exchange.reply(200 if self.pool is None or self.pool.is_ready else 503)

    async def _metrics(self, request: Request) -> Response:
        self.metrics.waiting.set(sum(pool.waiting for pool in self.pools))
        self.metrics.log_lines_dropped.inc(log_relay.dropped() - self._dropped_before)
        self._dropped_before = log_relay.dropped()
        self.metrics.workers.set(sum(pool.living for pool in self.pools))
        return Response(self.metrics.text(), headers={"content-type": metrics.CONTENT_TYPE})

    async def _openapi(self, request: Request) -> Response:
        return self.exchange.reply(200, openapi.describe(self.settings))

    async def _page(self, request: Request) -> Response:
        return FileResponse(Path(__file__).with_name("page.html"))

    def _pool_of(self, request: Request) -> Pool:
        if self.models is not None:
            return self.models.pool(request.headers.get("x-amzn-sagemaker-target-model", ""))
        assert self.pool is not None
        return self.pool

    async def _invocations(self, request: Request) -> Response:
        return await self.exchange.invoke(request, self._pool_of(request))

    async def _execution_parameters(self, request: Request) -> Response:
        """What batch transform asks before it begins; a job's own settings go before these.

        One record a request holds for every content type and every handler: several lines sent as
        application/json are no JSON, and several as text/plain would be taken for one text. The
        service refuses jobs whose payloads times requests are more than 100 MB.
        """
        settings = self.settings
        merged = settings.batch_size if self.pool is not None and self.pool.merges else 1
        useful = settings.workers * max(2, merged)
        payload = settings.transform_payload
        most = min(useful, settings.queue_limit, MOST_TRANSFORM_MB // payload)
        return self.exchange.reply(
            200,
            {
                "MaxConcurrentTransforms": most,
                "BatchStrategy": "SINGLE_RECORD",
                "MaxPayloadInMB": payload,
            },
        )


def _server(front: Front) -> uvicorn_compat.Server:
    limits = front.settings.limits
    config = uvicorn.Config(
        front.application(),
        http="httptools",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=cast(int, limits.keep_alive_seconds),
        timeout_graceful_shutdown=_DRAIN_SECONDS,
        backlog=_BACKLOG,
        ws=uvicorn_compat.Upgrades,
        ws_max_size=front.settings.max_body,
    )
    connections = acceptor.affordable(limits.connections, front.settings.workers)
    limits = replace(limits, connections=connections)
    return uvicorn_compat.Server(config, limits, front.note_refusal, _LINGER_SECONDS)


async def _run(settings: ServerSettings, environ: Mapping[str, str], sock: socket.socket) -> int:
    front = Front(settings, environ)
    server = _server(front)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    stopping = asyncio.create_task(stop.wait())
    ends: list[asyncio.Future[Any]] = [serving, stopping]
    if front.pool is not None:
        front.pool.start()
        ends.append(front.pool.failed)
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        LOG.info("Stopping: what has arrived is answered first.")
        front.exchange.draining = True
        await asyncio.sleep(_LINGER_SECONDS)
    server.should_exit = True
    await serving
    stopping.cancel()
    await front.close()
    if front.pool is not None and front.pool.failed.done():
        raise front.pool.failed.result()
    LOG.info("All requests are answered; good bye.")
    return 0
