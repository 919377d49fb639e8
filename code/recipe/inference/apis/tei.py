"""TEI's API (text-embeddings-inference): embed, rerank, predict and similarity."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from recipe.inference.apis.openai_forms import check_dimensions
from recipe.inference.parameters import (
    FLAG,
    OBJECT,
    TEXT,
    TEXT_OR_TEXTS,
    Rule,
    are_texts,
    faults,
    whole,
)
from recipe.inference.payloads import Answers, BadRequest, Document, Request

EMBED, RERANK, PREDICT, SIMILARITY = "/embed", "/rerank", "/predict", "/similarity"

_LENGTHS: Mapping[str, Rule] = {
    "truncate": FLAG,
    "truncation_direction": Rule(
        lambda value: str(value).lower() == "right", '"Right": texts are cut at their ends'
    ),
}


def is_sequence(value: Any) -> bool:
    """Whether a value of JSON is one input of /predict: a text, or a list of one or two."""
    return isinstance(value, str) or (are_texts(value) and len(value) <= 2)


_RULES: Mapping[str, Mapping[str, Rule]] = {
    EMBED: {
        "inputs": TEXT_OR_TEXTS,
        "normalize": FLAG,
        "prompt_name": TEXT,
        "dimensions": whole(1),
        **_LENGTHS,
    },
    RERANK: {
        "query": TEXT,
        "texts": Rule(are_texts, "a list of texts"),
        "raw_scores": FLAG,
        "return_text": FLAG,
        **_LENGTHS,
    },
    PREDICT: {
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
    SIMILARITY: {
        "inputs": Rule(
            lambda value: (
                isinstance(value, dict)
                and set(value) == {"source_sentence", "sentences"}
                and isinstance(value["source_sentence"], str)
                and are_texts(value["sentences"])
            ),
            '{"source_sentence": "a text", "sentences": ["a text", ...]}',
        ),
        "parameters": OBJECT,
    },
}
_NEEDED = {EMBED: {"inputs"}, RERANK: {"query", "texts"}, PREDICT: {"inputs"},
           SIMILARITY: {"inputs"}}  # fmt: skip


def read(path: str, document: Any) -> Request:
    """The request that a body of one of the API's routes makes.

    Raises:
        BadRequest: A key is unknown, or has a value that it may not have; all that is wrong is
            said.
    """
    rules = _RULES[path]
    if not isinstance(document, dict):
        raise BadRequest(f"The body is not an object with {', '.join(sorted(_NEEDED[path]))}.")
    body = {name: value for name, value in document.items() if value is not None}
    if path == SIMILARITY and isinstance(body.get("parameters"), dict):
        nested = {k: v for k, v in body.pop("parameters").items() if v is not None}
        rules = {**rules, **_LENGTHS, "prompt_name": TEXT}
        body |= nested
    wrong = faults(body, rules)
    if unknown := sorted(set(body) - set(rules)):
        wrong.append(f"{path} does not take {', '.join(unknown)}, but {', '.join(sorted(rules))}")
    wrong += [f"there is no {name!r}" for name in sorted(_NEEDED[path] - set(body))]
    if wrong:
        raise BadRequest(". ".join(wrong) + ".")
    parameters: dict[str, Any] = {}
    if body.get("truncate") is False:
        parameters["truncation"] = False
    if "prompt_name" in body:
        parameters["prompt_name"] = body["prompt_name"]
    if body.get("raw_scores"):
        parameters["function_to_apply"] = "none"
    return _READERS[path](body, parameters)


def _embed(body: Mapping[str, Any], parameters: dict[str, Any]) -> Request:
    texts = body["inputs"] if isinstance(body["inputs"], list) else [body["inputs"]]
    parameters["normalize"] = body.get("normalize", True)

    def form(prediction: Answers, request: Request) -> Document:
        check_dimensions(prediction, body.get("dimensions"))
        return as_document(prediction, request)

    return Request(texts=texts, parameters=parameters, form=form)


def _rerank(body: Mapping[str, Any], parameters: dict[str, Any]) -> Request:
    parameters["return_text"] = body.get("return_text", False)
    inputs = {"query": body["query"], "texts": body["texts"]}
    return Request(texts=[inputs], raw=inputs, single=True, parameters=parameters, form=as_document)


def _predict(body: Mapping[str, Any], parameters: dict[str, Any]) -> Request:
    inputs = body["inputs"]
    is_single = is_sequence(inputs)
    sequences = [inputs] if is_single else inputs
    texts = [part[0] if isinstance(part, list) and len(part) == 1 else part for part in sequences]
    parameters["top_k"] = None

    def form(prediction: Answers, request: Request) -> Document:
        entries = list(prediction)
        return Document(entries[0] if is_single else entries, prediction.truncated)

    return Request(texts=texts, parameters=parameters, form=form)


def _similarity(body: Mapping[str, Any], parameters: dict[str, Any]) -> Request:
    inputs = body["inputs"]
    return Request(texts=[inputs], raw=inputs, single=True, parameters=parameters, form=as_document)


def as_document(prediction: Answers, request: Request) -> Document:
    """The answers as a list of JSON."""
    return Document(list(prediction), prediction.truncated)


_READERS: Mapping[str, Callable[[Mapping[str, Any], dict[str, Any]], Request]] = {
    EMBED: _embed, RERANK: _rerank, PREDICT: _predict, SIMILARITY: _similarity,
}  # fmt: skip
