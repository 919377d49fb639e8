"""The API of TEI (text-embeddings-inference): embed, rerank and predict; and reranking as in Jina's
API."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from recipe.backend.requests import routes
from recipe.backend.requests.parameters import (
    FLAG,
    SIDE,
    TEXT,
    TEXT_OR_TEXTS,
    Rule,
    are_texts,
    whole,
)
from recipe.backend.requests.payloads import (
    Answers,
    Document,
    Prepared,
    Request,
    checked_body,
)
from recipe.inference.apis.openai import served_name

_LENGTHS: Mapping[str, Rule] = {"truncate": FLAG, "truncation_direction": SIDE}


def is_sequence(value: Any) -> bool:
    """Return whether a JSON value is one input of /predict: a text, or a list of one or two."""
    return isinstance(value, str) or (are_texts(value) and len(value) <= 2)


_TEXTS = Rule(are_texts, "a list of texts")
_RULES: Mapping[str, Mapping[str, Rule]] = {
    routes.EMBED: {
        "inputs": TEXT_OR_TEXTS,
        "prompt_name": TEXT,
        "normalize": FLAG,
        "dimensions": whole(1),
        **_LENGTHS,
    },
    routes.RERANK: {
        "query": TEXT,
        "texts": _TEXTS,
        "raw_scores": FLAG,
        "return_text": FLAG,
        **_LENGTHS,
    },
    routes.RERANK_1: {
        "query": TEXT,
        "documents": _TEXTS,
        "top_n": whole(1),
        "return_documents": FLAG,
        "model": TEXT,
        "user": TEXT,
        **_LENGTHS,
    },
    routes.PREDICT: {
        "inputs": Rule(
            lambda value: (
                is_sequence(value)
                or (
                    isinstance(value, list)
                    and bool(value)
                    and all(isinstance(part, list) and is_sequence(part) for part in value)
                )
            ),
            "a text, a pair [a, b], or a list of lists of one or two texts",
        ),
        "raw_scores": FLAG,
        **_LENGTHS,
    },
}
_NEEDED: Mapping[str, set[str]] = {
    routes.RERANK: {"query", "texts"},
    routes.RERANK_1: {"query", "documents"},
}
"""The keys that a body must have, where these are not `inputs`."""
_KEPT = ("prompt_name", "truncation_direction", "dimensions")
"""Keys that are parameters of the same name."""


def read(path: str, document: Any) -> Request:
    """Read a body of one of the API's routes. Raise BadRequest with all keys that are unknown or
    have invalid values."""
    if path == routes.RERANK_2:
        path = routes.RERANK_1
    body = checked_body(path, document, _RULES[path], _NEEDED.get(path, {"inputs"}))
    parameters = {name: body[name] for name in _KEPT if name in body}
    if body.get("truncate") is False:
        parameters["truncation"] = False
    if body.get("raw_scores"):
        parameters["function_to_apply"] = "none"
    if path == routes.RERANK_1:
        documents = body["documents"]

        def rank(prediction: Answers, prepared: Prepared) -> Document:
            results: list[dict[str, Any]] = []
            for entry in prediction[: body.get("top_n")]:
                results.append({"index": entry["index"], "relevance_score": entry["score"]})
                if body.get("return_documents", True):
                    results[-1]["document"] = {"text": documents[entry["index"]]}
            head = {"id": f"rerank-{uuid.uuid4().hex}", "model": served_name()}
            usage = {"total_tokens": prepared.tokens}
            return Document({**head, "usage": usage, "results": results}, prediction.truncated)

        return _compare({"query": body["query"], "texts": documents}, parameters, rank)
    if path == routes.PREDICT:
        inputs = body["inputs"]
        is_single = is_sequence(inputs)
        texts = [
            part[0] if isinstance(part, list) and len(part) == 1 else part
            for part in ([inputs] if is_single else inputs)
        ]

        def form(prediction: Answers, prepared: Prepared) -> Document:
            return Document(prediction[0] if is_single else list(prediction), prediction.truncated)

        return Request(inputs=texts, parameters={**parameters, "top_k": None}, form=form)
    if path == routes.RERANK:
        parameters["return_text"] = body.get("return_text", False)
        return _compare({"query": body["query"], "texts": body["texts"]}, parameters, as_document)
    parameters["normalize"] = body.get("normalize", True)
    texts = [body["inputs"]] if isinstance(body["inputs"], str) else body["inputs"]
    return Request(inputs=texts, parameters=parameters, form=as_document)


def _compare(
    inputs: dict[str, Any],
    parameters: dict[str, Any],
    form: Callable[[Answers, Prepared], Document],
) -> Request:
    """Return a request that compares texts with one other text."""
    return Request(inputs=[inputs], single=True, parameters=parameters, form=form)


def as_document(prediction: Answers, prepared: Prepared) -> Document:
    """Return the answers as a JSON list."""
    return Document(list(prediction), prediction.truncated)
