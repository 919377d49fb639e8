"""OpenTelemetry traces: a span for each request, and one for its time in a model worker.

The standard variables decide, and the OpenTelemetry packages read them: nothing of these is
imported where no variable asks for traces. Whatever is wrong with them is told in the log and stops
no request, as the standard wants it.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

import amphora
from amphora.common import logs

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

LOG = logging.getLogger("amphora.server")
_QUIET = {"/ping", "/ping/", "/health", "/metrics"}
# What is not sent by then is lost: the platform kills soon.
_LAST_SECONDS = 2.0
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PACKAGES = {
    "otlp_proto_http": "opentelemetry-exporter-otlp-proto-http",
    "otlp_proto_grpc": "opentelemetry-exporter-otlp-proto-grpc",
    "console": "opentelemetry-sdk",
}
_HOW = "in the image or by the model's requirements.txt"


def exporters(environ: Mapping[str, str]) -> list[str]:
    """The exporters that the variables ask for, by their packages' names for them; [] for none.

    Without OTEL_TRACES_EXPORTER an endpoint for OTLP asks for that one.
    """
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    has_endpoint = any(environ.get(name, "").strip() for name in _ENDPOINTS)
    asked = environ.get("OTEL_TRACES_EXPORTER", "").strip() or ("otlp" if has_endpoint else "none")
    protocol = next((environ[name].strip() for name in _PROTOCOLS if environ.get(name)), "")
    by_protocol = {"": "otlp_proto_http", "http/protobuf": "otlp_proto_http"}
    by_protocol["grpc"] = "otlp_proto_grpc"
    names = [name.strip() for name in asked.split(",")]
    return [
        by_protocol.get(protocol, f"otlp ({protocol})") if name == "otlp" else name
        for name in dict.fromkeys(names)
        if name not in ("", "none")
    ]


class Tracing:
    """The front's spans, from `start` to `close`."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._names = exporters(environ)
        headers = (environ.get(f"OTEL_EXPORTER_OTLP_{kind}HEADERS", "") for kind in ("", "TRACES_"))
        # Keys of a collector's account.
        logs.remember(pair.partition("=")[2] for value in headers for pair in value.split(","))
        self._provider: Any = None
        self.tracer: Tracer | None = None
        """None: nothing is recorded."""
        self.is_settled = not self._names
        """Whether it is known what is recorded: nothing, or every request from now on."""

    @property
    def is_wanted(self) -> bool:
        """Whether a variable asks for traces."""
        return bool(self._names)

    async def start(self, installed: asyncio.Event | None) -> None:
        """Begin to record, as far as the packages are there.

        Args:
            installed: Set when the model's requirements.txt, which may bring them, is installed.
        """
        problem = await asyncio.to_thread(self._open)
        if problem and installed is not None:
            await installed.wait()
            problem = await asyncio.to_thread(self._open)
        self.is_settled = True
        if problem:
            LOG.error("Nothing is traced: %s", problem)
        else:
            LOG.info("Requests are traced, for %s.", ", ".join(self._names))

    def _open(self) -> str:
        """Import, and make the exporters. Returns what is wrong; '' if nothing is."""
        importlib.invalidate_caches()
        # Its lines, such as a collector's that does not answer, stand in our form, masked.
        logging.getLogger("opentelemetry").handlers[:] = logging.getLogger("amphora").handlers
        # Not imported where nothing is traced: it takes as long as all of this module's others.
        metadata = importlib.import_module("importlib.metadata")
        try:
            trace = importlib.import_module("opentelemetry.sdk.trace")
            export = importlib.import_module("opentelemetry.sdk.trace.export")
            resources = importlib.import_module("opentelemetry.sdk.resources")
            # Finds the propagators, or raises.
            importlib.import_module("opentelemetry.propagate")
            resource = resources.Resource.create()
            if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
                resource = resource.merge(resources.Resource({"service.name": "amphora"}))
            provider = trace.TracerProvider(resource=resource, shutdown_on_exit=False)
            for name in self._names:
                group = "opentelemetry_traces_exporter"
                found = metadata.entry_points(group=group, name=name)
                if not found:
                    package = _PACKAGES.get(name, "its package")
                    return (
                        f"no installed package has the exporter {name!r}, which"
                        " OTEL_TRACES_EXPORTER, OTEL_EXPORTER_OTLP_PROTOCOL (http/protobuf or grpc)"
                        f" or an OTLP endpoint asks for. Install {package}, {_HOW}."
                    )
                provider.add_span_processor(export.BatchSpanProcessor(next(iter(found)).load()()))
        except ModuleNotFoundError as error:
            is_sdk = (error.name or "") in "opentelemetry.sdk.trace"
            return f"{error}. Install {'opentelemetry-sdk' if is_sdk else 'its package'}, {_HOW}."
        except Exception as error:
            # Such as a propagator that is not installed, or a limit that is no number.
            return f"{type(error).__name__}: {error}"
        self._provider = provider
        self.tracer = provider.get_tracer("amphora", amphora.__version__)
        return ""

    def begin(self, title: str, scope: Scope) -> RequestTrace | None:
        """A request's span, below the client's where its headers name one; None: nothing is
        recorded."""
        if self.tracer is None:
            return None
        from opentelemetry import propagate, trace

        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        attributes: dict[str, str | int] = {
            # Not the query, which may hold a secret.
            "url.path": scope["path"],
            "url.scheme": scope.get("scheme", "http"),
            "network.protocol.version": scope.get("http_version", ""),
        }
        if scope["type"] == "http":
            attributes["http.request.method"] = scope["method"]
        if "user-agent" in headers:
            attributes["user_agent.original"] = headers["user-agent"]
        span = self.tracer.start_span(
            title, propagate.extract(headers), trace.SpanKind.SERVER, attributes
        )
        return RequestTrace(self.tracer, span)

    async def close(self) -> None:
        """Send what is recorded, if the collector takes it in time."""
        if self._provider is not None:
            self.tracer = None
            sending = threading.Thread(target=self._provider.shutdown, daemon=True)
            sending.start()
            await asyncio.to_thread(sending.join, _LAST_SECONDS)


class RequestTrace:
    """One request's span, and that of its time in a worker; a second one if it is tried again."""

    def __init__(self, tracer: Tracer, span: Span) -> None:
        from opentelemetry import trace

        self._tracer = tracer
        self._span = span
        self._context: Context = trace.set_span_in_context(span)
        self._in_worker: Span | None = None
        self.id = trace.format_trace_id(span.get_span_context().trace_id)

    def sent(
        self, headers: Mapping[str, str], worker: int, requests: int, queued: float
    ) -> dict[str, str]:
        """A worker has got the request. Returns its headers with the worker's span as the parent
        of what the handlers may record.

        Args:
            headers: The request's.
            worker: Its process id.
            requests: How many it has got together.
            queued: Seconds that the request has waited.
        """
        from opentelemetry import propagate, trace

        self.answered("worker_died")
        attributes: dict[str, str | int | float] = {
            "process.pid": worker,
            "amphora.batch.size": requests,
            "amphora.queue.seconds": queued,
        }
        self._in_worker = self._tracer.start_span(
            "model worker", self._context, attributes=attributes
        )
        carrier = dict(headers)
        propagate.inject(carrier, trace.set_span_in_context(self._in_worker, self._context))
        return carrier

    def streams(self) -> None:
        """The first chunk of a stream is there."""
        if self._in_worker is not None:
            self._in_worker.add_event("first chunk")

    def answered(self, error: str) -> None:
        """The worker has answered: '', or its error's code."""
        if self._in_worker is not None:
            _end(self._in_worker, error)
            self._in_worker = None

    def name(self, name: str) -> None:
        """Name the request's span, when its route is known."""
        self._span.update_name(name)

    def end(self, error: str, attributes: Mapping[str, str | int]) -> None:
        """The answer is sent, or broke off.

        Args:
            error: What failed on the server's side; '' if nothing did.
            attributes: What is known of the answer.
        """
        # Nobody waits for what a worker still does.
        self.answered("cancelled")
        self._span.set_attributes(attributes)
        _end(self._span, error)


def _end(span: Span, error: str) -> None:
    from opentelemetry.trace import StatusCode

    if error:
        span.set_attribute("error.type", error)
        span.set_status(StatusCode.ERROR)
    span.end()


class TracedApp:
    """ASGI middleware: a span for each HTTP request but those of the platform's probes."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        is_traced = scope["type"] == "http" and scope["path"] not in _QUIET
        trace = self._tracing.begin(scope["method"], scope) if is_traced else None
        if trace is None:
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["trace"] = trace
        status = 0

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        error = "cancelled"
        try:
            await self._app(scope, receive, noting_send)
            error = str(status) if status >= 500 else ""
        except Exception as failure:
            error = type(failure).__name__
            raise
        finally:
            attributes: dict[str, str | int] = {"amphora.request_id": state.get("id", "")}
            if status:
                attributes["http.response.status_code"] = status
            if inference_id := dict(scope["headers"]).get(b"x-amzn-sagemaker-inference-id"):
                attributes["amphora.inference_id"] = inference_id.decode("latin-1")
            if route := getattr(scope.get("route"), "path", ""):
                # A name of few values: the path itself may name a model.
                trace.name(f"{scope['method']} {route}")
                attributes["http.route"] = route
            trace.end(error, attributes)
