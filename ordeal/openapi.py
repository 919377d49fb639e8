"""The routes of a server with one model as OpenAPI 3.1, from which schemathesis makes requests.

The bodies of `/invocations` belong to the model's handlers; those of other servers' APIs are
described by the keys that each API requires.
"""

from __future__ import annotations

from typing import Any

from amphora.serving.http.invocations import PREFIX
from amphora.serving.protocol import routes

Schema = dict[str, Any]
_JSON = "application/json"
_INVOKED = (200, 400, 404, 406, 413, 415, 500, 503, 504, 507)
_MANAGED = (200, 400, 403, 404, 409, 413, 415, 500, 503, 504, 507)

_TEXT: Schema = {"type": "string"}
_TEXTS: Schema = {"type": "array", "items": _TEXT, "minItems": 1}
_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_INPUTS: Schema = {"anyOf": [_TEXT, _TEXTS, _IDS, {"type": "array", "items": _IDS, "minItems": 1}]}


def _object(required: Schema, **optional: Schema) -> Schema:
    properties = {**required, **optional}
    return {"type": "object", "required": list(required), "properties": properties}


_MESSAGE = _object({"role": _TEXT}, content={"anyOf": [_TEXT, {"type": "array"}, {"type": "null"}]})
_WRITTEN: dict[str, Schema] = {
    "model": _TEXT,
    "max_tokens": {"type": "integer", "minimum": 1},
    "temperature": {"type": "number", "minimum": 0},
    "stream": {"type": "boolean"},
}
_GENERATED = _object({"inputs": _TEXT}, parameters={"type": "object"}, stream={"type": "boolean"})
_SENTENCES = _object({"source_sentence": _TEXT, "sentences": _TEXTS})
_BODIES: dict[str, Schema] = {
    routes.CHAT: _object(
        {"messages": {"type": "array", "items": _MESSAGE, "minItems": 1}}, **_WRITTEN
    ),
    routes.COMPLETIONS: _object({"prompt": _INPUTS}, **_WRITTEN),
    routes.EMBEDDINGS: _object({"input": _INPUTS}, model=_TEXT),
    routes.RERANK_1: _object({"query": _TEXT, "documents": {"type": "array", "minItems": 1}}),
    routes.RERANK_2: _object({"query": _TEXT, "documents": {"type": "array", "minItems": 1}}),
    routes.RESPONSES: _object({"input": {"anyOf": [_TEXT, {"type": "array"}]}}, model=_TEXT),
    **dict.fromkeys((routes.SCORE, routes.SCORE_1), _object({"text_1": _TEXTS, "text_2": _TEXTS})),
    routes.EMBED: _object({"inputs": _INPUTS}),
    routes.RERANK: _object({"query": _TEXT, "texts": _TEXTS}),
    routes.PREDICT: _object({"inputs": {"anyOf": [_TEXT, {"type": "array", "minItems": 1}]}}),
    routes.SIMILARITY: _object({"inputs": _SENTENCES}),
    routes.TOKENIZE: _object({"inputs": {"anyOf": [_TEXT, _TEXTS]}}),
    "/decode": _object({"ids": {"anyOf": [_IDS, {"type": "array", "items": _IDS}]}}),
    routes.GENERATE: _GENERATED,
    routes.GENERATE_STREAM: _GENERATED,
    "/adapters": _object({"name": _TEXT, "src": _TEXT}),
}
_ERROR = {"code": _TEXT, "message": _TEXT, "request_id": _TEXT}
_FLAT_ERROR = _object({"error": _TEXT, "error_type": _TEXT, **_ERROR})
_NULLABLE: Schema = {"type": ["string", "null"]}
_SCHEMAS = {
    "Error": _object({"error": _object(_ERROR)}),
    "OpenAIError": _object({"error": _object({**_ERROR, "type": _TEXT, "param": _NULLABLE})}),
    "TEIError": _FLAT_ERROR,
    "TGIError": _FLAT_ERROR,
}


def _operation(
    statuses: tuple[int, ...],
    error: str = "Error",
    answers: str | None = _JSON,
    content: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return one method of a route.

    Args:
        statuses: Its answers.
        error: The schema of an error.
        answers: The media type of an answer; None: it is empty, and so are errors.
        content: Bodies by media type.
    """
    schema = {"schema": {"$ref": f"#/components/schemas/{error}"}}
    responses: dict[str, Any] = {}
    for status in statuses:
        responses[str(status)] = {"description": ""}
        if answers is not None:
            shown = {answers: {}} if status == 200 else {_JSON: schema}
            responses[str(status)]["content"] = shown
    operation: dict[str, Any] = {"responses": responses}
    if content is not None:
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def describe() -> dict[str, Any]:
    """Return the document."""
    alive = _operation((200, 503), answers=None)
    invoke = _operation(_INVOKED, answers="*/*", content={_JSON: {}, "*/*": {}})
    load = _operation(_MANAGED, content={_JSON: {"schema": _BODIES["/adapters"]}})
    listed = _operation((200, 503), "OpenAIError")
    shown = _operation((200, 404, 503), "OpenAIError")
    name = {"name": "name", "in": "path", "required": True, "schema": _TEXT}
    paths: dict[str, Any] = {
        "/ping": {"get": alive, "post": alive},
        "/health": {"get": alive},
        "/metrics": {"get": _operation((200,), answers="text/plain")},
        "/info": {"get": _operation((200, 503))},
        "/": {"get": _operation((200,), answers="text/html"), "post": invoke},
        "/invocations": {"post": invoke},
        "/execution-parameters": {"get": _operation((200,))},
        "/adapters": {"get": _operation((200,)), "post": load},
        "/adapters/{name}": {"parameters": [name], "delete": _operation((200, 403, 404, 503))},
    }
    for prefix in ("", PREFIX):
        paths[f"{prefix}/v1/models"] = {"get": listed}
        paths[f"{prefix}/v1/models/{{name}}"] = {"parameters": [name], "get": shown}
        for route in routes.OPENAI:
            content = {_JSON: {"schema": _BODIES[route]}}
            paths[prefix + route] = {"post": _operation(_INVOKED, "OpenAIError", "*/*", content)}
    for error, group in (("TEIError", routes.TEI), ("TGIError", routes.TGI)):
        for route in group:
            content = {_JSON: {"schema": _BODIES[route]}}
            paths[route] = {"post": _operation(_INVOKED, error, content=content)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "amphora serve", "version": "1"},
        "paths": paths,
        "components": {"schemas": _SCHEMAS},
    }
