"""`GET /openapi.json`: the server's routes for programs, as OpenAPI 3.1.

The content of a request's body belongs to the handlers, so that bodies are described by their media
types only.
"""

from __future__ import annotations

from typing import Any

from amphora import __version__
from amphora.serving.http.invocations import OPENAI_ROUTES, PREFIX, TEI_ROUTES, TGI_ROUTES
from amphora.serving.settings import MIB, ServerSettings

_JSON = "application/json"
_MEANINGS = {
    200: "The answer.",
    400: "The request cannot be understood.",
    403: "A page of another site sent it.",
    404: "There is no such model.",
    406: "No type in Accept can be written.",
    409: "The model is already loaded.",
    413: "The body is too large.",
    415: "The body's type is not supported.",
    500: "The model or its code failed.",
    503: "Not ready, or too many requests wait; see Retry-After.",
    504: "The time for an answer has passed.",
    507: "The model, or what it makes of a request, does not fit into memory.",
}
_INVOKED = (200, 400, 404, 406, 413, 415, 500, 503, 504, 507)
_TEXT = {"type": "string"}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


_SCHEMAS = {
    "Error": _object(error=_object(code=_TEXT, message=_TEXT, request_id=_TEXT)),
    "TEIError": _object(error=_TEXT, error_type=_TEXT, code=_TEXT, message=_TEXT, request_id=_TEXT),
    "TGIError": _object(error=_TEXT, error_type=_TEXT, code=_TEXT, message=_TEXT, request_id=_TEXT),
    "ModelError": _object(
        Message=_TEXT, OriginalStatusCode={"type": "integer"}, OriginalMessage=_TEXT
    ),
}


def describe(settings: ServerSettings) -> dict[str, Any]:
    """The document for a server with these settings."""
    alive = _operation("Whether a model is ready to answer.", (200, 503), answers=None)
    chosen = (400, 404) if settings.is_multi_model else ()
    listed = _operation("The loaded models, as OpenAI's API lists them.", (200, 503))
    shown = _operation("A loaded model, by its name.", (200, 404, 503))
    info = _operation("What is served, and how to ask for it.", (200, *chosen, 503))
    if settings.is_multi_model:
        info["parameters"] = [{"name": "model", "in": "query", "schema": _TEXT}]
    paths = {
        "/ping": {"get": alive, "post": alive},
        "/health": {"get": alive},
        "/metrics": {"get": _operation("Prometheus metrics.", (200,), answers="text/plain")},
        "/openapi.json": {"get": _operation("This document.", (200,))},
        **{
            path: {"post": _operation(f"OpenAI's API: {path}.", _INVOKED, body=True, answers="*/*")}
            for route in OPENAI_ROUTES
            for path in (route, PREFIX + route)
        },
        **{
            path: {"post": _operation(f"TEI's API: {path}.", _INVOKED, body=True, error="TEIError")}
            for path in TEI_ROUTES
        },
        **{
            path: {"post": _operation(f"TGI's API: {path}.", _INVOKED, body=True, error="TGIError")}
            for path in TGI_ROUTES
        },
        **{f"{prefix}/v1/models": {"get": listed} for prefix in ("", PREFIX)},
        **{f"{prefix}/v1/models/{{name}}": {"get": shown} for prefix in ("", PREFIX)},
        "/info": {"get": info},
    }
    most = f"An invocation, of at most {settings.max_body / MIB:g} MiB."
    invocation = {"post": _operation(most, _INVOKED, body=True, answers="*/*")}
    paths |= {"/invocations": invocation, "/": invocation}
    if settings.is_multi_model:
        paths.update(_multi_model_paths())
    else:
        parameters = {"get": _operation("What batch transform asks for.", (200,))}
        listed = _operation("The LoRA adapters that are loaded.", (200,))
        loaded = _operation(
            "Load a LoRA adapter: name, src.", (200, 400, 403, 404, 409, 415, 503, 507), body=True
        )
        removed = _operation("Unload a LoRA adapter.", (200, 403, 404, 503))
        paths |= {
            "/adapters": {"get": listed, "post": loaded},
            "/adapters/{name}": {"delete": removed},
            "/execution-parameters": parameters,
        }
    if settings.shows_page:
        page = _operation("A page to try the model.", (200,), answers="text/html")
        paths["/"] = {**paths.get("/", {}), "get": page}
    name = {"name": "name", "in": "path", "required": True, "schema": _TEXT}
    return {
        "openapi": "3.1.0",
        "info": {"title": "amphora serve", "version": __version__},
        "paths": {
            path: {"parameters": [name], **item} if "{name}" in path else item
            for path, item in paths.items()
        },
        "components": {"schemas": _SCHEMAS},
    }


def _multi_model_paths() -> dict[str, Any]:
    statuses = (200, 400, 403, 404, 409, 413, 415, 500, 507)
    order = _operation("Load a model: model_name, url.", statuses)
    order["requestBody"] = {"required": True, "content": {_JSON: {"schema": {"type": "object"}}}}
    listed = _operation("The loaded models, in pages.", (200, 400))
    listed["parameters"] = [
        {
            "name": name,
            "in": "query",
            "schema": {"type": "integer", "minimum": 0, "maximum": 999_999_999},
        }
        for name in ("limit", "next_page_token")
    ]
    return {
        "/models": {"get": listed, "post": order},
        "/models/{name}": {
            "get": _operation("A loaded model.", (200, 404)),
            "delete": _operation("Unload a model.", (200, 403, 404)),
        },
        "/models/{name}/invoke": {
            "post": _operation("An invocation.", _INVOKED, body=True, answers="*/*")
        },
    }


def _operation(
    summary: str,
    statuses: tuple[int, ...],
    *,
    body: bool = False,
    answers: str | None = _JSON,
    error: str = "Error",
) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status in statuses:
        response: dict[str, Any] = {"description": _MEANINGS[status]}
        responses[str(status)] = response
        if answers is not None and status == 200:
            response["content"] = {answers: {}}
        elif answers is not None:
            form = "ModelError" if status == 424 else error
            schema = {"$ref": f"#/components/schemas/{form}"}
            response["content"] = {_JSON: {"schema": schema}}
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if body:
        operation["requestBody"] = {"required": True, "content": {_JSON: {}, "*/*": {}}}
    return operation
