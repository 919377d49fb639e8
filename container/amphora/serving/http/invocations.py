"""Turns HTTP requests into calls of a pool, and their answers and errors into HTTP's."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import urllib.parse
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Match, Route
from starlette.types import ExceptionHandler

from amphora.serving.pool.connections import Call
from amphora.serving.pool.pool import too_late
from amphora.serving.protocol import media_types, routes
from amphora.serving.protocol.media_types import Fault, bad_request
from amphora.serving.protocol.messages import Answer
from amphora.serving.settings import MIB, ServerSettings
from amphora.serving.telemetry import GONE

if TYPE_CHECKING:
    from amphora.serving.pool.pool import Pool
    from amphora.serving.vllm.proxy import VllmServer

    Backend: TypeAlias = Pool | VllmServer
    """Answers the requests of a model."""

LOG = logging.getLogger("amphora.server")
_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
_MOST_ATTRIBUTES = 1024
# Clients that retry at once instead of after Retry-After would be refused thousands of times a
# second, by the process that also sends the answers.
_REFUSAL_SECONDS = 0.1
PREFIXES = ("/openai", "/invocations")
"""Prefixes of the routes of OpenAI's API: SageMaker's own client calls them by the first, clients
whose address ends in the second by that."""
_OPENAI_ERRORS = {404: "not_found_error", 503: "overloaded_error"}
_TEI_ERRORS = {503: "Overloaded", 504: "Overloaded"}
_LOCAL = {"localhost", "127.0.0.1", "::1"}


class Invocations:
    """Turns requests into calls of a pool and their answers into responses, for every route."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.draining = False
        """Whether every answer asks its client to close the connection."""
        self.answered: Callable[[], Sequence[str]] = tuple
        """Returns the routes of other servers' APIs that the model answers."""

    @property
    def exception_handlers(self) -> dict[Any, ExceptionHandler]:
        return {
            Fault: self.answer_fault,
            HTTPException: self.answer_http_error,
            ClientDisconnect: self.answer_disconnect,
            Exception: self.answer_bug,
        }

    def reply(self, status: int, value: Any = None) -> Response:
        """Return an answer of the front itself: a JSON value, or an empty body."""
        if value is None:
            return Response(status_code=status, headers=self._closing())
        headers = {"content-type": media_types.JSON, **self._closing()}
        return Response(json.dumps(value).encode(), status, headers)

    async def invoke(self, request: Request, pool: Backend, body: bytes | None = None) -> Response:
        """Answer a request, whose body may be read already, by the model of a pool."""
        if body is None:
            body = await self.body(request)
        # A custom attribute `route` names the route, as in AWS's vLLM image: SageMaker forwards no
        # other header for it. If the model answers no other servers' routes, its handlers may use
        # the attribute for something else.
        answered = pool.description.get("routes", ())
        pairs = (pair.partition("=") for pair in request.headers.get(_ATTRIBUTES, "").split(","))
        named = {name.strip(): value.strip() for name, _, value in pairs}.get("route", "")
        if answered and named.startswith("/") and route_of(request) not in routes.CLIENTS:
            named = named.removeprefix(PREFIXES[0])
            if named not in ("/invocations", *answered):
                raise _absent(named, answered)
            request.state.route = named
        call = self._call(request, body)
        try:
            pool.submit(call)
        except Fault as fault:
            if fault.code == "overloaded":
                await asyncio.sleep(_REFUSAL_SECONDS)
            raise
        answer = await self._wait(pool, call, request.scope[GONE])
        headers: dict[str, str] = {}
        # SageMaker's headers, unless the handler has set its own.
        if attributes := call.headers.get(_ATTRIBUTES, "")[:_MOST_ATTRIBUTES]:
            headers[_ATTRIBUTES] = attributes
        headers = {**headers, **answer.headers, **self._closing()}
        headers.update({"content-type": answer.type, "x-request-id": call.id})
        if not answer.more:
            # HTTP allows no body with these statuses.
            body = b"" if answer.status in (204, 304) else call.answer_body
            return Response(body, answer.status, headers)
        if request.scope["http_version"] == "1.0":
            # HTTP/1.0 has no chunks: the client would read their lengths as part of the answer.
            whole = b"".join([chunk async for chunk in chunks(call, pool)])
            return Response(whole, answer.status, headers)
        return StreamingResponse(chunks(call, pool), answer.status, headers)

    async def order(self, request: Request, name_key: str, folder_key: str = "") -> tuple[str, str]:
        """Return the name and the folder in a request that loads a model or an adapter; no folder
        without its key.

        Raises Fault: as `check_origin` and `body`; 400 for a wrong body; 415 if it is not JSON by
        its type, which a page of another site cannot send without asking first.
        """
        check_origin(request)
        kind = media_types.media_type(request.headers.get("content-type", ""))
        if kind != media_types.JSON:
            raise Fault(
                415, "unsupported_media_type", f"Send it as {media_types.JSON}, not {kind[:80]!r}."
            )
        try:
            document = json.loads(await self.body(request))
            name, folder = document[name_key], document[folder_key] if folder_key else ""
            is_order = bool(name.strip()) and (not folder_key or Path(folder).is_absolute())
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            is_order = False
        if not is_order:
            example = {name_key: "a name", folder_key: "/path/to/its/folder"}
            example.pop("", None)
            raise bad_request(f"Send {json.dumps(example)}.")
        # SageMaker names models by keys on S3, which have 1024 characters at most.
        for key, text, longest in ((name_key, name, 1024), (folder_key, folder, 4096)):
            if len(text) > longest or not text.isprintable():
                count = f"of {len(text)} characters. Give 1 to {longest} printable ones."
                raise bad_request(f"{key} is {text[:80]!r}, {count}")
        return name, folder

    async def body(self, request: Request) -> bytes:
        """Return a request's whole body.

        Raises Fault (413 beyond the limit, 415 if it is compressed), and ClientDisconnect.
        """
        limit = self.settings.max_body
        headers = request.headers
        if "expect" in headers and int(headers.get("content-length", 0)) > limit:
            # The client waits for "100 Continue" and has sent nothing of the body yet.
            raise _too_large(limit)
        if (coding := headers.get("content-encoding", "identity").lower()) != "identity":
            raise Fault(
                415,
                "unsupported_content_encoding",
                f"Content-Encoding is {coding[:100]!r}. Send the body without compression.",
            )
        parts: list[bytes] = []
        size = 0
        async for part in request.stream():
            size += len(part)
            parts.append(part)
            if size > limit:
                # Many clients read no answer before they have sent the whole body, so that the rest
                # is read too, up to a limit, and dropped.
                parts.clear()
            if size > 4 * limit + MIB:
                break
        if size > limit:
            raise _too_large(limit)
        return b"".join(parts)

    def _call(self, request: Request, body: bytes) -> Call:
        """Make a call of a request. Raises Fault (415) for an unknown charset."""
        headers, loop = request.headers, asyncio.get_running_loop()
        media_types.check_charset(headers.get("content-type", ""))
        accept = headers.get("accept", "").strip()
        return Call(
            id=request_id(request), body=body, headers=dict(headers), path=route_of(request),
            content_type=headers.get("content-type", media_types.JSON),
            accept=self.settings.default_accept if accept in ("", "*/*") else accept,
            deadline=loop.time() + self.settings.timeout, reply=loop.create_future(),
        )  # fmt: skip

    async def _wait(self, pool: Backend, call: Call, gone: asyncio.Future[None]) -> Answer:
        """Wait for the answer. Raises Fault at the deadline, ClientDisconnect if `gone` is done."""

        def give_up(error: Exception) -> None:
            if not call.reply.done():
                pool.cancel(call)
                call.reply.set_exception(error)

        def leave(_: object) -> None:
            give_up(ClientDisconnect())

        loop = asyncio.get_running_loop()
        late = loop.call_at(call.deadline, give_up, too_late(self.settings.timeout))
        # A task that waits for the end of the connection would take a tenth of the front's time.
        gone.add_done_callback(leave)
        try:
            return await call.reply
        except asyncio.CancelledError:
            pool.cancel(call)
            raise
        finally:
            late.cancel()
            gone.remove_done_callback(leave)

    def _closing(self) -> dict[str, str]:
        return {"connection": "close"} if self.draining else {}

    async def answer_fault(self, request: Request, error: Exception) -> Response:
        """Answer with the error that a handler or the front has raised."""
        assert isinstance(error, Fault)
        headers = {"retry-after": "1"} if error.status == 503 else {}
        if error.code == "payload_too_large":
            # The rest of the body may still arrive.
            headers["connection"] = "close"
        if error.code == "unsupported_content_encoding":
            headers["accept-encoding"] = "identity"
        return self._error(request, error.status, error.code, str(error), headers, error.param)

    async def answer_http_error(self, request: Request, error: Exception) -> Response:
        """Answer a request for an unknown route, or with a method that its route does not take."""
        assert isinstance(error, HTTPException)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "bad_request")
        message = f"{request.method} {request.scope['path']}: {error.detail}."
        if error.status_code == 404:
            message += f" Routes: {', '.join(['/ping', '/invocations', *self.answered()])}."
        if (request.method, request.scope["path"]) == ("GET", "/"):
            message = "The page is off here. Set AMPHORA_UI=1 to show it."
        headers = dict(error.headers or {})
        if error.status_code == 405:
            # Starlette names the methods of one route, and a path may have several. Routes of other
            # paths may match too: /models/a/invoke might be a model `a/invoke`.
            meant = [
                route
                for route in request.app.routes
                if isinstance(route, Route) and route.matches(request.scope)[0] != Match.NONE
            ]
            same = [route for route in meant if route.path == meant[0].path]
            headers["Allow"] = ", ".join(sorted({m for route in same for m in route.methods or ()}))
        return self._error(request, error.status_code, code, message, headers)

    async def answer_disconnect(self, request: Request, error: Exception) -> Response:
        """Set the status for the access log, that of nginx; nobody reads this answer."""
        return self._error(request, 499, "client_gone", "The client has gone.", {})

    async def answer_bug(self, request: Request, error: Exception) -> Response:
        """Log an error of the front itself, and answer 500 without its text."""
        LOG.error("Request %s failed in the server.", request_id(request), exc_info=error)
        return self._error(request, 500, "internal_error", "See the server's log.", {})

    def _error(
        self,
        request: Request,
        status: int,
        code: str,
        message: str,
        headers: dict[str, str],
        param: str | None = None,
    ) -> Response:
        identifier = request_id(request)
        body = error_body(code, message, identifier, status, route_of(request), param)
        headers = {**headers, "content-type": media_types.JSON, "x-request-id": identifier}
        if attributes := request.headers.get(_ATTRIBUTES, "")[:_MOST_ATTRIBUTES]:
            headers[_ATTRIBUTES] = attributes
        return Response(body, status, {**headers, **self._closing()})


def _too_large(limit: int) -> Fault:
    message = f"The body is larger than {limit} bytes; SAGEMAKER_MAX_PAYLOAD_IN_MB sets the limit."
    return Fault(413, "payload_too_large", message)


def route_of(request: Request) -> str:
    """Return the route of a request: its path, unless a custom attribute names another one."""
    path: str = request.scope["path"]
    for prefix in PREFIXES:
        if path.startswith((f"{prefix}/v1/", f"{prefix}/v2/")):
            path = path.removeprefix(prefix)
    named: str = request.scope.get("state", {}).get("route", path)
    return named


def _absent(path: str, answered: Sequence[str]) -> Fault:
    """Return the error for a route of another server's API that the model does not answer."""
    known = ", ".join(["/invocations", *answered])
    return Fault(404, "not_found", f"The loaded model does not answer {path}. Routes: {known}.")


def check_route(path: str, pool: Backend) -> None:
    """Raise Fault (404) if a model is loaded and does not answer a client's route."""
    answered = pool.description.get("routes", [])
    if pool.living and path in routes.CLIENTS and path not in answered:
        raise _absent(path, answered)


def error_body(
    code: str,
    message: str,
    identifier: str,
    status: int = 500,
    path: str = "/invocations",
    param: str | None = None,
) -> bytes:
    """Return an error as JSON, in the form of the API that the route belongs to."""
    error: dict[str, Any] = {"code": code, "message": message, "request_id": identifier}
    document: dict[str, Any] = {"error": error}
    if path.startswith(("/v1/", "/v2/")):
        other = "invalid_request_error" if status < 500 else "server_error"
        error.update({"type": _OPENAI_ERRORS.get(status, other), "param": param})
    elif path in routes.TEI:
        other = "Validation" if status < 500 else "Backend"
        document = {"error": message, "error_type": _TEI_ERRORS.get(status, other), **error}
    elif path in routes.TGI:
        other = _TEI_ERRORS.get(status, "validation" if status < 500 else "generation")
        document = {"error": message, "error_type": other.lower(), **error}
    return json.dumps(document, ensure_ascii=False).encode()


def check_origin(request: Request) -> None:
    """Refuse requests from web pages of other sites. Raises Fault (403).

    The origin of a page of this server is the server's address, which must be a local one: by DNS,
    any site may claim an address here.
    """
    origin = request.headers.get("origin")
    if origin is None:
        return
    try:
        parts = urllib.parse.urlsplit(origin)
        is_own = parts.netloc == request.headers.get("host") and parts.hostname in _LOCAL
    except ValueError:
        is_own = False
    if not is_own:
        raise Fault(403, "foreign_origin", f"A page of {origin[:80]!r} may not manage models.")


def request_id(request: Request) -> str:
    """Return the id of a request, which answers, errors and the log contain."""
    if not hasattr(request.state, "id"):
        # A UUID's object would take five times as long.
        request.state.id = os.urandom(16).hex()
    identifier: str = request.state.id
    return identifier


async def chunks(call: Call, pool: Backend) -> AsyncGenerator[bytes, None]:
    """Yield the chunks of a streamed answer. A client that leaves early cancels the call.

    Raises Fault if the stream broke: its status is sent already, so that only a broken connection
    can report the error.
    """
    finished = False
    try:
        while (chunk := await call.chunks.get()) is not None:
            if isinstance(chunk, Exception):
                raise chunk
            pool.took(call)
            yield chunk
        finished = True
    finally:
        if not finished:
            pool.cancel(call)
