"""The API of TGI (text-generation-inference): generate, with and without a stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from recipe.backend.requests import bodies
from recipe.backend.requests.payloads import BadRequest, Document, EventStream, Request
from recipe.backend.requests.routes import GENERATE_STREAM


def read(path: str, document: Any) -> Request:
    """Read a body of one of the API's routes.

    Raises:
        BadRequest: The body is invalid.
    """
    if not isinstance(document, dict) or not isinstance(document.get("inputs"), str):
        raise BadRequest('Send {"inputs": "a text", "parameters": {...}}.', "inputs")
    if set(document) - {"inputs", "parameters", "stream"}:
        raise BadRequest(f"{path} takes inputs and parameters only.")
    request = bodies.read_document({name: document[name] for name in document if name != "stream"})
    if request.streams:
        raise BadRequest(f"{GENERATE_STREAM} streams: leave stream out.", "stream")
    streams = {"stream": True} if path == GENERATE_STREAM else {}
    return replace(request, parameters={"return_full_text": False, **request.parameters, **streams})


def format_answer(prediction: Any) -> Document | EventStream:
    """Return the only text as an object, or events of its tokens."""
    if isinstance(prediction, Iterator):
        return EventStream(prediction)
    return Document(prediction[0][0], prediction.truncated)
