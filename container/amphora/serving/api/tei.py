"""The API of TEI (text-embeddings-inference): embed, rerank and predict; and reranking as in Jina's
and Cohere's APIs."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from amphora.serving.api.canonical import (
    ApiRequest,
    ModelTraits,
    check_flags,
    check_keys,
    wrong_value,
)
from amphora.serving.protocol.routes import EMBED, PREDICT, RANKING, RERANK, RERANK_1

_LENGTHS = ("truncate", "truncation_direction")
_KEYS: Mapping[str, tuple[set[str], set[str]]] = {
    EMBED: ({"inputs"}, {"prompt_name", "normalize", "dimensions"}),
    PREDICT: ({"inputs"}, {"raw_scores"}),
    RERANK: ({"query", "texts"}, {"raw_scores", "return_text", "top_n"}),
    RERANK_1: (
        {"query", "documents"},
        {"raw_scores", "top_n", "return_documents", "model", "user"},
    ),
}
"""For each route the keys that a body must have, and others that it may have."""
_FLAGS = ("truncate", "normalize", "raw_scores", "return_text", "return_documents")
_KEPT = ("prompt_name", "truncation_direction", "dimensions", "normalize", "return_text")
"""Keys that are parameters of the same name."""
NAMES = {"truncate_dim": "dimensions"}
"""A parameter of vectors by another name, which TEI and OpenAI's API give it."""
_entries = itemgetter("entries")
_USUAL: Mapping[str, Mapping[str, Any]] = {
    EMBED: {"normalize": True},
    PREDICT: {"top_k": None},
    RERANK: {"return_text": False},
}
"""Parameters that a body leaves out."""


def read(route: str, document: Any, model: ModelTraits) -> ApiRequest:
    """Return the request of a body of one of the API's routes. Raise Fault (400) for keys that are
    unknown or have invalid values."""
    has_documents = isinstance(document, dict) and "documents" in document
    if route in RANKING and (route != RERANK or has_documents):
        route = RERANK_1  # Jina's, Cohere's, vLLM's and Infinity's bodies, whatever their route
    needed, others = _KEYS[route]
    body = check_keys(route, document, needed, others.union(_LENGTHS))
    check_flags(body, _FLAGS)
    parameters = {**_USUAL.get(route, {}), **{name: body[name] for name in _KEPT if name in body}}
    if body.get("truncate") is False:
        parameters["truncation"] = False
    if body.get("raw_scores"):
        parameters["function_to_apply"] = "none"
    if route == EMBED:
        texts = [body["inputs"]] if isinstance(body["inputs"], str) else body["inputs"]
        _check_texts("inputs", texts, " or a text")
        return ApiRequest(inputs=texts, parameters=parameters, form=_entries, names=NAMES)
    if route == PREDICT:
        inputs = body["inputs"]
        is_single = _is_sequence(inputs)
        sequences = [inputs] if is_single else inputs
        if (
            not isinstance(sequences, list)
            or not sequences
            or not all(
                _is_sequence(part) and (is_single or isinstance(part, list)) for part in sequences
            )
        ):
            remedy = "give a text, a pair [a, b], or a list of lists of one or two texts."
            raise wrong_value("inputs", inputs, remedy)
        texts = [p[0] if isinstance(p, list) and len(p) == 1 else p for p in sequences]
        form = (lambda prediction: prediction["entries"][0]) if is_single else _entries
        return ApiRequest(inputs=texts, parameters=parameters, form=form)
    name = "texts" if route == RERANK else "documents"
    texts = plain_documents(body[name])
    _check_texts(name, texts)
    if not isinstance(body["query"], str):
        raise wrong_value("query", body["query"], "give a text.")
    top = body.get("top_n")
    if top is not None and (type(top) is not int or top < 1):
        raise wrong_value("top_n", top, "give a whole number from 1.")

    def rank(prediction: Mapping[str, Any]) -> Any:
        if route == RERANK:
            return prediction["entries"][:top]
        results: list[dict[str, Any]] = []
        for entry in prediction["entries"][:top]:
            results.append({"index": entry["index"], "relevance_score": entry["score"]})
            if body.get("return_documents", True):
                results[-1]["document"] = {"text": texts[entry["index"]]}
        head = {"id": f"rerank-{uuid.uuid4().hex}", "model": model.name}
        return {**head, "usage": {"total_tokens": prediction["tokens"]}, "results": results}

    inputs = [{"query": body["query"], "texts": texts}]
    return ApiRequest(inputs=inputs, single=True, parameters=parameters, form=rank)


def plain_documents(documents: Any) -> Any:
    """Return the texts of documents, which Cohere's clients also send as objects with a `text`."""
    if not isinstance(documents, list):
        return documents
    return [d["text"] if isinstance(d, dict) and set(d) == {"text"} else d for d in documents]


def _is_sequence(value: Any) -> bool:
    """Return whether a JSON value is one input of /predict: a text, or a list of one or two."""
    return isinstance(value, str) or (
        isinstance(value, list)
        and 0 < len(value) <= 2
        and all(isinstance(text, str) for text in value)
    )


def _check_texts(name: str, texts: Any, also: str = "") -> None:
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        raise wrong_value(name, texts, f"give a list of texts{also}.")
