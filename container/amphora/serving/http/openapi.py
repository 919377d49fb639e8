"""`GET /openapi.json`: the server's routes for programs, as OpenAPI 3.1, from one table.

The bodies of `/invocations` belong to the model's handlers; those of other servers' APIs are
described by the keys that each API requires.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from amphora import __version__
from amphora.serving.http.invocations import OPENAI_ROUTES, PREFIX, TEI_ROUTES, TGI_ROUTES
from amphora.serving.settings import MIB, ServerSettings

Schema = dict[str, Any]
_JSON = "application/json"
_MEANINGS = {
    200: "The answer.",
    400: "The request cannot be understood.",
    403: "A page of another site sent it.",
    404: "There is no such model, adapter or route.",
    406: "No type in Accept can be written.",
    409: "The model, or the adapter, is already loaded.",
    413: "The body is too large.",
    415: "The body's type is not supported.",
    500: "The model or its code failed.",
    503: "Not ready, or too many requests wait; see Retry-After.",
    504: "The time for an answer has passed.",
    507: "The model, or what it makes of a request, does not fit into memory.",
}
_INVOKED = (200, 400, 404, 406, 413, 415, 500, 503, 504, 507)
_MANAGED = (200, 400, 403, 404, 409, 413, 415, 500, 503, 504, 507)

_TEXT: Schema = {"type": "string"}
_PAGE: Schema = {"type": "integer", "minimum": 0, "maximum": 999_999_999}
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
    "/v1/chat/completions": _object(
        {"messages": {"type": "array", "items": _MESSAGE, "minItems": 1}}, **_WRITTEN
    ),
    "/v1/completions": _object({"prompt": _INPUTS}, **_WRITTEN),
    "/v1/embeddings": _object({"input": _INPUTS}, model=_TEXT),
    "/v1/rerank": _object({"query": _TEXT, "documents": {"type": "array", "minItems": 1}}),
    "/v1/responses": _object({"input": {"anyOf": [_TEXT, {"type": "array"}]}}, model=_TEXT),
    "/embed": _object({"inputs": _INPUTS}),
    "/embed_all": _object({"inputs": _INPUTS}),
    "/embed_sparse": _object({"inputs": _INPUTS}),
    "/rerank": _object({"query": _TEXT, "texts": _TEXTS}),
    "/predict": _object({"inputs": {"anyOf": [_TEXT, {"type": "array", "minItems": 1}]}}),
    "/similarity": _object({"inputs": _SENTENCES}),
    "/tokenize": _object({"inputs": {"anyOf": [_TEXT, _TEXTS]}}),
    "/decode": _object({"ids": {"anyOf": [_IDS, {"type": "array", "items": _IDS}]}}),
    "/generate": _GENERATED,
    "/generate_stream": _GENERATED,
    "/models": _object({"model_name": _TEXT, "url": _TEXT}),
    "/adapters": _object({"name": _TEXT, "src": _TEXT}),
}
_ANY: Schema = {
    "description": "What the handlers read; the image's own: inputs, parameters, or a body of"
    " OpenAI's, TEI's or TGI's API."
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


@dataclass(frozen=True)
class _Operation:
    """One method of a route."""

    path: str
    method: str
    summary: str
    statuses: tuple[int, ...] = (200,)
    body: Schema | None = None
    answers: str | None = _JSON
    """The answer's media type; None: it is empty, and so are errors."""
    error: str = "Error"
    query: tuple[tuple[str, Schema], ...] = ()

    @property
    def entry(self) -> dict[str, Any]:
        """Return its entry in the document."""
        responses: dict[str, Any] = {str(s): {"description": _MEANINGS[s]} for s in self.statuses}
        for status, response in responses.items():
            if self.answers is not None:
                schema = {"schema": {"$ref": f"#/components/schemas/{self.error}"}}
                response["content"] = {self.answers: {}} if status == "200" else {_JSON: schema}
        entry: dict[str, Any] = {"summary": self.summary, "responses": responses}
        if self.query:
            entry["parameters"] = [
                {"name": name, "in": "query", "schema": schema} for name, schema in self.query
            ]
        if self.body is not None:
            content = {_JSON: {"schema": self.body}}
            entry["requestBody"] = {
                "required": True,
                "content": {**content, "*/*": {}} if self.body is _ANY else content,
            }
        return entry


def _operations(settings: ServerSettings) -> Iterator[_Operation]:
    """Yield every method of every route."""
    alive = "Whether a model is ready to answer."
    for path, method in (("/ping", "get"), ("/ping", "post"), ("/health", "get")):
        yield _Operation(path, method, alive, (200, 503), answers=None)
    yield _Operation("/metrics", "get", "Prometheus metrics.", answers="text/plain")
    yield _Operation("/openapi.json", "get", "This document.")
    for api, routes in (("OpenAI", OPENAI_ROUTES), ("TEI", TEI_ROUTES), ("TGI", TGI_ROUTES)):
        answers = "*/*" if api == "OpenAI" else _JSON
        for route in routes:
            for path in (route, PREFIX + route) if api == "OpenAI" else (route,):
                yield _Operation(
                    path, "post", f"{api}'s API: {path}.", _INVOKED, _BODIES[route], answers,
                    f"{api}Error",
                )  # fmt: skip
    for prefix in ("", PREFIX):
        path = f"{prefix}/v1/models"
        listed = "The loaded models, as OpenAI's API lists them."
        yield _Operation(path, "get", listed, (200, 503), error="OpenAIError")
        shown = "A loaded model, by its name."
        yield _Operation(f"{path}/{{name}}", "get", shown, (200, 404, 503), error="OpenAIError")
    several = settings.is_multi_model
    yield _Operation(
        "/info", "get", "What is served, and how to ask for it.",
        (200, 400, 404, 503) if several else (200, 503), query=(("model", _TEXT),) * several,
    )  # fmt: skip
    most = f"An invocation, of at most {settings.max_body / MIB:g} MiB."
    for path in ("/invocations", "/"):
        yield _Operation(path, "post", most, _INVOKED, _ANY, "*/*")
    if settings.shows_page:
        yield _Operation("/", "get", "A page to try the model.", answers="text/html")
    if several:
        pages = (("limit", _PAGE), ("next_page_token", _PAGE))
        yield _Operation("/models", "get", "The loaded models, in pages.", (200, 400), query=pages)
        load = "Load a model: model_name, url."
        yield _Operation("/models", "post", load, _MANAGED, _BODIES["/models"])
        yield _Operation("/models/{name}", "get", "A loaded model.", (200, 404))
        yield _Operation("/models/{name}", "delete", "Unload a model.", (200, 403, 404))
        yield _Operation("/models/{name}/invoke", "post", "An invocation.", _INVOKED, _ANY, "*/*")
    else:
        asks = "What batch transform asks for."
        yield _Operation("/execution-parameters", "get", asks)
        yield _Operation("/adapters", "get", "The LoRA adapters that are loaded.")
        load = "Load a LoRA adapter: name, src."
        yield _Operation("/adapters", "post", load, _MANAGED, _BODIES["/adapters"])
        unload = "Unload a LoRA adapter."
        yield _Operation("/adapters/{name}", "delete", unload, (200, 403, 404, 503))


def describe(settings: ServerSettings) -> dict[str, Any]:
    """Return the document for a server with these settings."""
    name = {"name": "name", "in": "path", "required": True, "schema": _TEXT}
    paths: dict[str, dict[str, Any]] = {}
    for operation in _operations(settings):
        path = operation.path
        item = paths.setdefault(path, {"parameters": [name]} if "{name}" in path else {})
        item[operation.method] = operation.entry
    return {
        "openapi": "3.1.0",
        "info": {"title": "amphora serve", "version": __version__},
        "paths": paths,
        "components": {"schemas": _SCHEMAS},
    }
