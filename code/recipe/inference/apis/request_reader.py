"""Reads requests of all APIs. The route determines the API, or else the keys of the body."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from recipe.backend.requests import bodies, payloads, routes
from recipe.backend.requests.payloads import BadRequest, Prepared, Request
from recipe.inference.apis import openai, tei


def read_generate(path: str, document: Any) -> Request:
    """Read a body of TGI's routes. Raise BadRequest if it is invalid."""
    if not isinstance(document, dict) or not isinstance(document.get("inputs"), str):
        raise BadRequest('Send {"inputs": "a text", "parameters": {...}}.', "inputs")
    if set(document) - {"inputs", "parameters", "stream"}:
        raise BadRequest(f"{path} takes inputs and parameters only.")
    request = bodies.read_document({name: document[name] for name in document if name != "stream"})
    if request.streams:
        raise BadRequest(f"{routes.GENERATE_STREAM} streams: leave stream out.", "stream")
    streams = {"stream": True} if path == routes.GENERATE_STREAM else {}
    return replace(request, parameters={"return_full_text": False, **request.parameters, **streams})


_READERS: Mapping[str, Callable[[str, Any], Request]] = {
    **dict.fromkeys(openai.ROUTES, openai.read),
    **dict.fromkeys((*routes.TEI, *routes.RANKING), tei.read),
    **dict.fromkeys(routes.TGI, read_generate),
}
# Routes by a key of their bodies, for bodies without `inputs`.
_KEYS = {
    "messages": routes.CHAT,
    "prompt": routes.COMPLETIONS,
    "input": routes.EMBEDDINGS,
}
_MARKS = tuple(f'"{name}"'.encode() for name in (*_KEYS, "documents"))


def read(body: bytes, content_type: str, path: str) -> Request:
    """Return the request of a body in Hugging Face's form, OpenAI's, TEI's or TGI's. Raise
    BadRequest if it is invalid, and UnsupportedContentType if its content type is another one."""
    kind = payloads.media_type(content_type)
    if path in _READERS:
        if kind != payloads.JSON:
            raise payloads.UnsupportedContentType(
                f"{path} takes {payloads.JSON}, not {content_type!r}."
            )
        route, document = path, bodies.parsed(body)
    # Other bodies, most of them, are parsed by `read_request`.
    elif kind == payloads.JSON and any(mark in body for mark in _MARKS):
        document = bodies.parsed(body)
        route = route_of(document) if isinstance(document, dict) else ""
    else:
        route, document = "", None
    if not route:
        return bodies.read_request(body, content_type)
    request = replace(_READERS[route](route, document), route=route)
    bodies.check_encodable([request.inputs, dict(request.parameters)])
    return request


def route_of(document: dict[str, Any]) -> str:
    """Return the route of OpenAI's or Jina's API for a body; empty for bodies of other APIs. Raise
    BadRequest if it has keys of several routes."""
    if "inputs" in document:
        return ""
    if {"query", "documents"} <= set(document):
        return routes.RERANK_1
    named = [route for key, route in _KEYS.items() if key in document]
    # `input` without `model` may name a text in Hugging Face's form.
    if named == [routes.EMBEDDINGS] and "model" not in document:
        return ""
    if len(named) > 1:
        keys = " and ".join(key for key in _KEYS if key in document)
        raise BadRequest(f"The body has {keys}, which belong to different APIs: keep one.")
    return named[0] if named else ""


def format_answer(prediction: Any, prepared: Prepared) -> Any:
    """Return a task's answer in the form of the request's API, or an exception unchanged."""
    request = prepared.request
    if isinstance(prediction, Exception):
        return prediction
    if request.route in routes.TGI:
        # The only text as an object, or events of its tokens.
        if isinstance(prediction, Iterator):
            return payloads.EventStream(prediction)
        return payloads.Document(prediction[0][0])
    if request.form is None:
        return payloads.restore_records(prediction, prepared)
    try:
        return request.form(prediction, prepared)
    except BadRequest as error:
        return error
