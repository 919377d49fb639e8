"""HTTP on one side, calls to a pool on the other: bodies, headers, answers, errors."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ExceptionHandler, Message

from amphora.serving.http import content_coding
from amphora.serving.pool import sessions
from amphora.serving.pool.connections import Call, Reply
from amphora.serving.pool.pool import Pool, too_late
from amphora.serving.protocol import media_types
from amphora.serving.protocol.media_types import Fault
from amphora.serving.settings import MIB, ServerSettings

LOG = logging.getLogger("amphora.server")
_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
_MOST_ATTRIBUTES = 1024
# Clients that ask again at once, and not after Retry-After, would be refused thousands of times a
# second, by the very process that the good answers go through.
_REFUSAL_SECONDS = 0.1
OPENAI_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
TEI_ROUTES = ("/embed", "/rerank", "/predict", "/similarity")
_OPENAI_ERRORS = {404: "not_found_error", 503: "overloaded_error"}
_TEI_ERRORS = {503: "Overloaded", 504: "Overloaded"}
# As nginx counts a client that went before its answer.
_CLIENT_GONE = 499
# Compressed bodies that are decoded between two requests; larger ones would make `/ping` wait.
_DECODED_AT_ONCE = 4096


class Exchange:
    """How requests become calls and replies become answers, for every route alike."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self.draining = False
        """Whether every answer asks its client to close the connection."""

    @property
    def exception_handlers(self) -> dict[Any, ExceptionHandler]:
        """For Starlette."""
        return {
            Fault: self._on_fault,
            HTTPException: self._on_http_error,
            ClientDisconnect: self._on_departure,
            Exception: self._on_bug,
        }

    def reply(self, status: int, value: Any = None) -> Response:
        """An answer of the server's own: a JSON value, or nothing."""
        if value is None:
            return Response(status_code=status, headers=self._closing())
        headers = {"content-type": media_types.JSON, **self._closing()}
        return Response(json.dumps(value).encode(), status, headers)

    async def invoke(self, request: Request, pool: Pool) -> Response:
        """Answer a request by a pool's model."""
        body = await self.body(request)
        call = self.call(request, request_id(request), body)
        try:
            pool.submit(call)
        except Fault as fault:
            if fault.code == "overloaded":
                await asyncio.sleep(_REFUSAL_SECONDS)
            raise
        return self._response(call, await self._wait(request, pool, call), pool)

    async def body(self, request: Request) -> bytes:
        """A request's whole body, decoded. Raises Fault: 413 past the bound, 415 where its coding
        is not supported, 400 where it is broken; ClientDisconnect where it broke off."""
        limit = self._settings.max_body
        headers = request.headers
        if "expect" in headers and int(headers.get("content-length", 0)) > limit:
            # Nothing of the body is on its way yet, and nothing of it shall be sent.
            raise content_coding.too_large(limit)
        applied = content_coding.codings(headers.get("content-encoding", ""))
        body = await _read(request, limit)
        if not applied:
            return body
        if len(body) < _DECODED_AT_ONCE:
            return content_coding.decode(body, applied, limit)
        return await asyncio.to_thread(content_coding.decode, body, applied, limit)

    def call(self, connection: HTTPConnection, identifier: str, body: bytes) -> Call:
        """A call with the headers of the connection. Raises Fault (415) for an unknown charset."""
        media_types.check_charset(connection.headers.get("content-type", ""))
        loop = asyncio.get_running_loop()
        headers = connection.headers
        return Call(
            id=identifier,
            body=body,
            content_type=headers.get("content-type", media_types.JSON),
            accept=media_types.accepted(headers.get("accept", ""), self._settings.default_accept),
            headers=dict(headers),
            path=connection.scope["path"],
            deadline=loop.time() + self._settings.timeout,
            reply=loop.create_future(),
        )

    async def _wait(self, request: Request, pool: Pool, call: Call) -> Reply:
        """Wait for the worker, the deadline, or the client's going, whatever comes first."""
        gone = asyncio.create_task(_disconnected(request))
        try:
            remaining = call.deadline - asyncio.get_running_loop().time()
            ends: list[asyncio.Future[Any]] = [call.reply, gone]
            await asyncio.wait(ends, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
        if not call.reply.done():
            pool.cancel(call)
            if gone.done():
                call.reply.cancel()
                raise ClientDisconnect
            call.fail(too_late(self._settings.timeout))
        return call.reply.result()

    def _response(self, call: Call, reply: Reply, pool: Pool) -> Response:
        headers = {**self._echoed(call, reply), **reply.headers, **self._closing()}
        headers.update({"content-type": reply.content_type, "x-request-id": call.id})
        if reply.chunks is None:
            return Response(reply.body, reply.status, headers)
        return StreamingResponse(chunks(call, reply, pool), reply.status, headers)

    def _echoed(self, call: Call, reply: Reply) -> dict[str, str]:
        """The contract's headers of an answer, where the handler has not set its own."""
        headers = {}
        if attributes := call.headers.get(_ATTRIBUTES, "")[:_MOST_ATTRIBUTES]:
            headers[_ATTRIBUTES] = attributes
        if call.session is not None and call.session.is_new:
            headers[sessions.NEW_HEADER] = call.session.announcement
        if call.session is not None and reply.closes_session:
            headers[sessions.CLOSED_HEADER] = call.session.id
        return headers

    def _closing(self) -> dict[str, str]:
        return {"connection": "close"} if self.draining else {}

    async def _on_fault(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, Fault)
        headers = {"retry-after": "1"} if error.status == 503 else {}
        if error.status == 413:
            # The rest of the body may still come, or never.
            headers["connection"] = "close"
        if isinstance(error, content_coding.UnsupportedCoding):
            headers["accept-encoding"] = content_coding.SUPPORTED
        if isinstance(error, sessions.SessionGone):
            headers[sessions.CLOSED_HEADER] = _printable(error.session)
        return self._error(request, error.status, error.code, str(error), headers)

    async def _on_http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "bad_request")
        message = f"{request.method} {request.scope['path']}: {error.detail}."
        return self._error(request, error.status_code, code, message, dict(error.headers or {}))

    async def _on_departure(self, request: Request, error: Exception) -> Response:
        """Nobody reads this answer, but the log of requests has its status."""
        status = request.scope.get("state", {}).get("refused", _CLIENT_GONE)
        return self._error(request, status, "client_gone", "The client has gone.", {})

    async def _on_bug(self, request: Request, error: Exception) -> Response:
        LOG.error("Request %s failed in the server.", request_id(request), exc_info=error)
        return self._error(request, 500, "internal_error", "See the server's log.", {})

    def _error(
        self, request: Request, status: int, code: str, message: str, headers: dict[str, str]
    ) -> Response:
        body = error_body(code, message, request_id(request), status, request.scope["path"])
        headers = {**headers, "content-type": media_types.JSON, "x-request-id": request_id(request)}
        return Response(body, status, {**headers, **self._closing()})


def error_body(
    code: str, message: str, identifier: str, status: int = 500, path: str = "/invocations"
) -> bytes:
    """The JSON of every error; on a route of a client's API in the form that its clients read."""
    error: dict[str, Any] = {"code": code, "message": message, "request_id": identifier}
    document: dict[str, Any] = {"error": error}
    if path.startswith("/v1/"):
        other = "invalid_request_error" if status < 500 else "server_error"
        error.update({"type": _OPENAI_ERRORS.get(status, other), "param": None})
    elif path in TEI_ROUTES:
        other = "Validation" if status < 500 else "Backend"
        document = {"error": message, "error_type": _TEI_ERRORS.get(status, other), **error}
    return json.dumps(document, ensure_ascii=False).encode()


def request_id(request: HTTPConnection) -> str:
    """The server's name of a request: in the answer, in errors, in the log."""
    if not hasattr(request.state, "id"):
        request.state.id = uuid.uuid4().hex
    identifier: str = request.state.id
    return identifier


async def chunks(call: Call, reply: Reply, pool: Pool) -> AsyncIterator[bytes]:
    """A streamed reply's chunks; leaving early tells the worker. Raises where the stream broke:
    its status is long sent, so that breaking the connection is the only honest end."""
    assert reply.chunks is not None
    finished = False
    try:
        while (chunk := await reply.chunks.get()) is not None:
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk
        finished = True
    finally:
        if not finished:
            pool.cancel(call)


def _printable(value: str) -> str:
    return "".join(letter for letter in value if letter.isascii() and letter.isprintable())[:256]


async def _read(request: Request, limit: int) -> bytes:
    """The body as it came. Raises Fault (413) past the limit, and keeps nothing beyond it."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= limit:
            parts.append(part)
        else:
            # Read on, since many a client reads no answer before it has written all; not forever.
            parts.clear()
            if size > 4 * limit + MIB:
                break
    if size > limit:
        raise content_coding.too_large(limit)
    return b"".join(parts)


async def _disconnected(request: Request) -> None:
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await request.receive()
