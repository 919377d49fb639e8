"""`amphora serve`: the HTTP front, one process that never imports a user's code.

It owns the port, the queue and the answers; the model lives in workers (`amphora.serving.pool`), so
that `/ping` is answered whatever happens to a model.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
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
from amphora.serving.http.adapters import Adapters
from amphora.serving.http.client_routes import ClientRoutes
from amphora.serving.http.invocations import Invocations
from amphora.serving.http.multi_model import TARGET_MODEL, MultiModel
from amphora.serving.http.refusal import Refusal
from amphora.serving.http.runtime_api import RuntimeApi
from amphora.serving.http.websocket import WebSocketInvocations
from amphora.serving.pool.pool import Pool
from amphora.serving.settings import MOST_TRANSFORM_MB, ServerSettings
from amphora.serving.settings import read as read_settings
from amphora.serving.tracing import TracedApp, Tracing

LOG = logging.getLogger("amphora.server")
# SageMaker kills 30 s after SIGTERM.
_DRAIN_SECONDS = 24
# What is on its way is still accepted; once the port is closed, requests that are on their way on
# open connections have as long again.
_LINGER_SECONDS = 0.3
_BACKLOG = 2048


def serve(base_dir: Path, environ: Mapping[str, str]) -> int:
    """Serve the model under `base_dir` until SIGTERM; 0 if every request was answered.

    Raises AmphoraError if the configuration is wrong or the model cannot be loaded.
    """
    log_relay.start()
    uvicorn_compat.check()
    host_devices = devices.detect(environ)
    environ = {**environ, **host_devices.variables}
    settings = read_settings(base_dir, environ, host_devices)
    settings = replace(settings, worker_open_files=acceptor.raise_limit())
    LOG.info(
        "Starting on %s, port %d, on %s (%s), with %d workers of %d threads; batches of up to %d"
        " requests, time-out %g s, queue limit %d. /ping answers 200 once the model is loaded.",
        settings.address, settings.port, host_devices.kind, host_devices.reason, settings.workers,
        settings.threads, settings.batch_size, settings.timeout, settings.queue_limit,
    )  # fmt: skip
    # The protocol is named because asyncio turns Nagle's delay off only if it is.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((settings.address, settings.port))
        except OSError as error:
            raise ConfigError(
                f"Port {settings.port} cannot be used on {settings.address}:"
                f" {error.strerror or error}.",
                "Stop what uses it, or name another one in SAGEMAKER_BIND_TO_PORT; AMPHORA_BIND is"
                " the IPv4 address.",
            ) from error
        return asyncio.run(_run(settings, environ, sock))


class Front:
    """The application: the routes of one model, or of the multi-model API."""

    def __init__(self, settings: ServerSettings, environ: Mapping[str, str]) -> None:
        self.settings = settings
        self.invocations = Invocations(settings)
        self.metrics = metrics.Metrics()
        self.tracing = Tracing(environ)
        self._dropped_before = 0
        self.models: MultiModel | None = None
        self.pool: Pool | None = None
        if settings.is_multi_model:
            self.models = MultiModel(settings, environ, self.metrics, self.invocations)
        else:
            self.adapters = Adapters(settings, self.invocations)
            variables = {**environ, **self.adapters.variables}
            self.pool = Pool(settings, variables, self.metrics)
            self.adapters.pool = pool = self.pool
            self.invocations.answered = lambda: pool.description.get("routes", [])

    def application(self) -> ASGIApp:
        """The ASGI application."""
        routes: list[BaseRoute] = [
            Route("/ping", self.ping, methods=["GET", "POST"]),
            Route("/ping/", self.ping, methods=["GET", "POST"]),
            Route("/health", self.ping, methods=["GET"]),
            Route("/metrics", self.show_metrics, methods=["GET"]),
            Route("/openapi.json", self.describe, methods=["GET"]),
            *RuntimeApi(self.invocations, self.target_of).routes,
        ]
        if self.settings.shows_page:
            routes.append(Route("/", self.page, methods=["GET"]))
        if self.models is not None:
            client_routes = ClientRoutes(self.settings, self.invocations, self.models)
            routes += [*client_routes.routes, *self.models.routes]
        elif self.pool is not None:
            web_socket = WebSocketInvocations(
                self.settings, self.invocations, self.pool, self.tracing
            )
            routes += [
                Route("/invocations", self.invoke, methods=["POST"]),
                Route("/invocations/", self.invoke, methods=["POST"]),
                # Clients of Hugging Face's servers post here if they have the server's address.
                Route("/", self.invoke, methods=["POST"]),
                *ClientRoutes(self.settings, self.invocations, self.pool, self.adapters).routes,
                *self.adapters.routes,
                Route("/execution-parameters", self.execution_parameters, methods=["GET"]),
                WebSocketRoute("/invocations-bidirectional-stream", web_socket.converse),
            ]
        app = Starlette(routes=routes, exception_handlers=self.invocations.exception_handlers)
        # A redirect would name whatever host the client's Host header names.
        app.router.redirect_slashes = False
        self._access_log = metrics.AccessLog(app, self.metrics, sys.stdout)
        if self.tracing.is_wanted:
            return TracedApp(self._access_log, self.tracing)
        return self._access_log

    def note_refusal(self, refusal: Refusal, identifier: str) -> None:
        """Log and count a request that was refused before it reached a route."""
        self._access_log.note_refusal(refusal.status, identifier)

    @property
    def pools(self) -> list[Pool]:
        """Every pool that runs."""
        return self.models.pools if self.models is not None else [self.pool] if self.pool else []

    async def close(self) -> None:
        """End all workers."""
        await asyncio.gather(*(pool.close() for pool in self.pools))

    def target_of(self, request: Request) -> tuple[Pool, Mapping[str, str]]:
        """The pool of the one model, or of the one that the header names, and what tells the pool
        which model is meant. Raises Fault as `MultiModel.select`."""
        if self.models is not None:
            model = self.models.select(request.headers.get(TARGET_MODEL, ""))
            return model.pool, model.headers
        assert self.pool is not None
        return self.pool, {}

    async def ping(self, request: Request) -> Response:
        """Tell whether a model is ready to answer."""
        is_ready = (self.pool is None or self.pool.is_ready) and self.tracing.is_settled
        return self.invocations.reply(200 if is_ready else 503)

    async def show_metrics(self, request: Request) -> Response:
        """Give the metrics in Prometheus' text format."""
        self.metrics.waiting.set(sum(pool.waiting for pool in self.pools))
        self.metrics.queue_age.set(max((pool.oldest for pool in self.pools), default=0.0))
        self.metrics.log_lines_dropped.inc(log_relay.dropped() - self._dropped_before)
        self._dropped_before = log_relay.dropped()
        self.metrics.workers.set(sum(pool.living for pool in self.pools))
        return Response(self.metrics.text(), headers={"content-type": metrics.CONTENT_TYPE})

    async def describe(self, request: Request) -> Response:
        """Give the OpenAPI document."""
        return self.invocations.reply(200, openapi.describe(self.settings))

    async def page(self, request: Request) -> Response:
        """Give the page to try the model."""
        return FileResponse(Path(__file__).with_name("page.html"))

    async def invoke(self, request: Request) -> Response:
        """Answer a request by the one model."""
        assert self.pool is not None
        return await self.invocations.invoke(request, self.pool)

    async def execution_parameters(self, request: Request) -> Response:
        """Tell batch transform how to send, before it begins; a job's own settings go before these.

        One record a request is right for every content type and every handler: several lines sent
        as application/json are not JSON, and several as text/plain would be taken for one text. The
        service refuses jobs whose payloads times requests are more than 100 MB.
        """
        settings = self.pool.settings if self.pool is not None else self.settings
        merged = settings.batch_size if self.pool is not None and self.pool.merges else 1
        useful = settings.workers * max(2, merged)
        payload = settings.transform_payload
        most = min(useful, settings.queue_limit, MOST_TRANSFORM_MB // payload)
        return self.invocations.reply(
            200,
            {
                "MaxConcurrentTransforms": most,
                "BatchStrategy": "SINGLE_RECORD",
                "MaxPayloadInMB": payload,
            },
        )


async def _run(settings: ServerSettings, environ: Mapping[str, str], sock: socket.socket) -> int:
    """Serve on a bound socket until a signal comes, or the model's workers give up."""
    front = Front(settings, environ)
    limits = settings.limits
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
        ws=uvicorn_compat.WebSocketProtocol,
        ws_max_size=settings.max_body,
    )
    connections = acceptor.affordable(limits.connections, settings.workers)
    limits = replace(limits, connections=connections)
    server = uvicorn_compat.Server(config, limits, front.note_refusal, _LINGER_SECONDS)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    stopping = asyncio.create_task(stop.wait())
    ends: list[asyncio.Future[Any]] = [serving, stopping]
    if front.tracing.is_wanted:
        installed = None if front.pool is None else front.pool.loaded
        tracing = asyncio.create_task(front.tracing.start(installed))
    if front.pool is not None:
        front.pool.start()
        ends.append(front.pool.failed)
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        LOG.info("Stopping: what has arrived is answered first.")
        front.invocations.draining = True
        await asyncio.sleep(_LINGER_SECONDS)
    server.should_exit = True
    await serving
    stopping.cancel()
    await front.close()
    if front.tracing.is_wanted:
        tracing.cancel()
        await front.tracing.close()
    if front.pool is not None and front.pool.failed.done():
        raise front.pool.failed.result()
    LOG.info("All requests are answered; good bye.")
    return 0
