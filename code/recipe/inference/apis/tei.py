"""TEI's API (text-embeddings-inference): embed, rerank, predict and similarity."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from recipe.inference.apis.openai import Check
from recipe.inference.apis.openai_forms import check_dimensions
from recipe.inference.generation import options
from recipe.inference.payloads import Answers, BadRequest, Document, Request

EMBED, RERANK, PREDICT, SIMILARITY = "/embed", "/rerank", "/predict", "/similarity"

_FLAG: Check = (lambda value: type(value) is bool, "true or false")
_RIGHT: Check = (
    lambda value: str(value).lower() == "right",
    '"Right": texts are cut at their ends',
)
_LENGTHS: Mapping[str, Check] = {"truncate": _FLAG, "truncation_direction": _RIGHT}


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, str) or (_are_texts(value) and len(value) <= 2)


_CHECKS: Mapping[str, Mapping[str, Check]] = {
    EMBED: {
        "inputs": (
            lambda value: isinstance(value, str) or _are_texts(value), "a text or a list of texts"
        ),
        "normalize": _FLAG,
        "prompt_name": (lambda value: isinstance(value, str), "a text"),
        "dimensions": (lambda value: type(value) is int and value >= 1, "1 or more"),
        **_LENGTHS,
    },
    RERANK: {
        "query": (lambda value: isinstance(value, str), "a text"),
        "texts": (_are_texts, "a list of texts"),
        "raw_scores": _FLAG,
        "return_text": _FLAG,
        **_LENGTHS,
    },
    PREDICT: {
        "inputs": (
            lambda value: _is_sequence(value)
            or (isinstance(value, list) and bool(value)
            and all(isinstance(each, list) and _is_sequence(each) for each in value)),
            "a text, a pair [a, b], or a list of lists of one or two texts",
        ),
        "raw_scores": _FLAG,
        **_LENGTHS,
    },
    SIMILARITY: {
        "inputs": (
            lambda value: isinstance(value, dict)
            and set(value) == {"source_sentence", "sentences"}
            and isinstance(value["source_sentence"], str) and _are_texts(value["sentences"]),
            '{"source_sentence": "a text", "sentences": ["a text", ...]}',
        ),
        "parameters": (lambda value: isinstance(value, dict), "an object"),
    },
}  # fmt: skip
_NEEDED = {EMBED: {"inputs"}, RERANK: {"query", "texts"}, PREDICT: {"inputs"},
           SIMILARITY: {"inputs"}}  # fmt: skip


def read(path: str, document: Any) -> Request:
    """The request that a body of one of the API's routes makes.

    Raises:
        BadRequest: a key is unknown, or a value is none; all that is wrong is said.
    """
    known = _CHECKS[path]
    if not isinstance(document, dict):
        raise BadRequest(f"The body is no object with {', '.join(sorted(_NEEDED[path]))}.")
    asked = {name: value for name, value in document.items() if value is not None}
    if path == SIMILARITY and isinstance(asked.get("parameters"), dict):
        nested = {k: v for k, v in asked.pop("parameters").items() if v is not None}
        known = {**known, **_LENGTHS, "prompt_name": _CHECKS[EMBED]["prompt_name"]}
        asked |= nested
    wrong = options.faults(asked, known)
    if unknown := sorted(set(asked) - set(known)):
        wrong.append(f"{path} does not take {', '.join(unknown)}, but {', '.join(sorted(known))}")
    wrong += [f"there is no {name!r}" for name in sorted(_NEEDED[path] - set(asked))]
    if wrong:
        raise BadRequest(". ".join(wrong) + ".")
    parameters: dict[str, Any] = {}
    if asked.get("truncate") is False:
        parameters["truncation"] = False
    if "prompt_name" in asked:
        parameters["prompt_name"] = asked["prompt_name"]
    return _READERS[path](asked, parameters)


def _embed(asked: Mapping[str, Any], parameters: dict[str, Any]) -> Request:
    texts = asked["inputs"] if isinstance(asked["inputs"], list) else [asked["inputs"]]
    parameters["normalize"] = asked.get("normalize", True)

    def form(prediction: Answers, request: Request) -> Document:
        check_dimensions(prediction, asked.get("dimensions"))
        return _as_it_is(prediction, request)

    return Request(texts=texts, parameters=parameters, form=form)


def _rerank(asked: Mapping[str, Any], parameters: dict[str, Any]) -> Request:
    parameters["return_text"] = asked.get("return_text", False)
    if asked.get("raw_scores"):
        parameters["function_to_apply"] = "none"
    inputs = {"query": asked["query"], "texts": asked["texts"]}
    return Request(
        texts=[inputs], raw=inputs, single=True, parameters=parameters, form=_as_it_is,
    )  # fmt: skip


def _predict(asked: Mapping[str, Any], parameters: dict[str, Any]) -> Request:
    inputs = asked["inputs"]
    is_single = _is_sequence(inputs)
    sequences = [inputs] if is_single else inputs
    texts = [each[0] if isinstance(each, list) and len(each) == 1 else each for each in sequences]
    parameters["top_k"] = None
    if asked.get("raw_scores"):
        parameters["function_to_apply"] = "none"

    def form(prediction: Answers, request: Request) -> Document:
        entries = list(prediction)
        return Document(entries[0] if is_single else entries, prediction.truncated)

    return Request(texts=texts, parameters=parameters, form=form)


def _similarity(asked: Mapping[str, Any], parameters: dict[str, Any]) -> Request:
    inputs = asked["inputs"]
    return Request(
        texts=[inputs], raw=inputs, single=True, parameters=parameters, form=_as_it_is,
    )  # fmt: skip


def _as_it_is(prediction: Answers, request: Request) -> Document:
    return Document(list(prediction), prediction.truncated)


_READERS: Mapping[str, Callable[[Mapping[str, Any], dict[str, Any]], Request]] = {
    EMBED: _embed, RERANK: _rerank, PREDICT: _predict, SIMILARITY: _similarity,
}  # fmt: skip
