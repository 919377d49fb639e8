"""The API of TEI (text-embeddings-inference): embed, rerank, predict and similarity; and reranking
as in Jina's API, scores as in vLLM's."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from recipe.backend import bounds
from recipe.backend.requests import routes
from recipe.backend.requests.parameters import (
    FLAG,
    OBJECT,
    SIDE,
    TEXT,
    TEXT_OR_TEXTS,
    Rule,
    are_texts,
    whole,
)
from recipe.backend.requests.payloads import (
    Answers,
    BadRequest,
    Document,
    Inputs,
    Prepared,
    Request,
    checked_body,
    texts_or_ids,
)
from recipe.inference.apis.openai import served_name

_LENGTHS: Mapping[str, Rule] = {"truncate": FLAG, "truncation_direction": SIDE}


def is_sequence(value: Any) -> bool:
    """Return whether a JSON value is one input of /predict: a text, or a list of one or two."""
    return isinstance(value, str) or (are_texts(value) and len(value) <= 2)


def _text(document: Any) -> Any:
    """Return the text of a document, which is a text or `{"text": ...}`."""
    is_object = isinstance(document, dict) and set(document) == {"text"}
    return document["text"] if is_object else document


_REMARKS = {"model": TEXT, "user": TEXT}
_RULES: Mapping[str, Mapping[str, Rule]] = {
    routes.EMBED: {
        "inputs": TEXT_OR_TEXTS,
        "prompt_name": TEXT,
        "normalize": FLAG,
        "dimensions": whole(1),
        **_LENGTHS,
    },
    routes.TOKENIZE: {"inputs": TEXT_OR_TEXTS, "add_special_tokens": FLAG},
    routes.RERANK: {
        "query": TEXT,
        "texts": Rule(are_texts, "a list of texts"),
        "raw_scores": FLAG,
        "return_text": FLAG,
        **_LENGTHS,
    },
    routes.RERANK_1: {
        "query": TEXT,
        "documents": Rule(
            lambda value: isinstance(value, list) and are_texts([_text(part) for part in value]),
            'a list of texts or of {"text": "a text"}',
        ),
        "top_n": whole(1),
        "return_documents": FLAG,
        **_REMARKS,
        **_LENGTHS,
    },
    routes.SCORE: {
        "text_1": TEXT_OR_TEXTS,
        "text_2": TEXT_OR_TEXTS,
        **_REMARKS,
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
    routes.SIMILARITY: {
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
_NEEDED: Mapping[str, set[str]] = {
    routes.RERANK: {"query", "texts"},
    routes.RERANK_1: {"query", "documents"},
    routes.SCORE: {"text_1", "text_2"},
}
"""The keys that a body must have, where these are not `inputs`."""
_KEPT = ("prompt_name", "truncation_direction", "dimensions")
"""Keys that are parameters of the same name."""


def read(path: str, document: Any) -> Request:
    """Read a body of one of the API's routes. Raise BadRequest with all keys that are unknown or
    have invalid values."""
    has_documents = isinstance(document, dict) and "documents" in document
    if path == routes.RERANK_2 or (path == routes.RERANK and has_documents):
        path = routes.RERANK_1
    if path == routes.SCORE_1:
        path = routes.SCORE
    rules = _RULES[path]
    nested = document.get("parameters") if isinstance(document, dict) else None
    if path == routes.SIMILARITY and isinstance(nested, dict):
        rules = {**rules, **_LENGTHS, "prompt_name": TEXT}
        document = {**{k: v for k, v in document.items() if k != "parameters"}, **nested}
    body = checked_body(path, document, rules, _NEEDED.get(path, {"inputs"}))
    parameters = {name: body[name] for name in _KEPT if name in body}
    if body.get("truncate") is False:
        parameters["truncation"] = False
    if body.get("raw_scores"):
        parameters["function_to_apply"] = "none"
    if path == routes.SCORE:
        return _score(body, parameters)
    if path == routes.RERANK_1:
        documents = [_text(part) for part in body["documents"]]

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
    if path == routes.TOKENIZE:
        parameters["add_special_tokens"] = body.get("add_special_tokens", True)
        return Request(inputs=texts_or_ids(body["inputs"]), parameters=parameters)
    if path == routes.RERANK:
        parameters["return_text"] = body.get("return_text", False)
        return _compare({"query": body["query"], "texts": body["texts"]}, parameters, as_document)
    if path == routes.SIMILARITY:
        return _compare(body["inputs"], parameters, as_document)
    if path == routes.EMBED:
        parameters["normalize"] = body.get("normalize", True)
    return Request(inputs=texts_or_ids(body["inputs"]), parameters=parameters, form=as_document)


def _compare(
    inputs: dict[str, Any],
    parameters: dict[str, Any],
    form: Callable[[Answers, Prepared], Document],
) -> Request:
    """Return a request that compares texts with one other text."""
    return Request(inputs=[inputs], single=True, parameters=parameters, form=form)


def _score(body: Mapping[str, Any], parameters: dict[str, Any]) -> Request:
    """Read pairs as vLLM does: one text with each of several, or two lists of one length."""
    one, other = (
        [body[name]] if isinstance(body[name], str) else body[name] for name in ("text_1", "text_2")
    )
    if len(one) not in (1, len(other)):
        raise BadRequest(
            f"There are {len(one)} texts in text_1 and {len(other)} in text_2.", "text_1"
        )
    pairs = list(zip(one * len(other) if len(one) == 1 else one, other, strict=True))

    def form(prediction: Answers, prepared: Prepared) -> Document:
        scores = [
            {"index": index, "object": "score", "score": entry["score"]}
            for index, entry in enumerate(prediction)
        ]
        usage = {"prompt_tokens": prepared.tokens, "total_tokens": prepared.tokens}
        head = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
        body = {**head, "model": served_name(), "data": scores, "usage": usage}
        return Document(body, prediction.truncated)

    return Request(inputs=pairs, parameters=parameters, form=form)


def prepare(request: Request) -> Prepared:
    """Return a request of /tokenize, measured by the characters of its texts."""
    sizes = [len(text) for text in request.inputs]
    return Prepared(request=request, inputs=Inputs(request.inputs), sizes=sizes)


def tokenized(prepared: Prepared, tokenizer: Any) -> Document:
    """Return the tokens of each text, as TEI's /tokenize; special tokens have no offsets. Raise
    TooCostly for texts that are too long."""
    texts = prepared.inputs.values
    bounds.hold(bounds.Bound.ROWS, len(texts))
    tokens = []
    for text in texts:
        bounds.hold_text(text)
        encoded = tokenizer(
            text, add_special_tokens=prepared.parameters["add_special_tokens"], verbose=False,
            return_offsets_mapping=True, return_special_tokens_mask=True,
        )  # fmt: skip
        names = tokenizer.convert_ids_to_tokens(encoded["input_ids"])
        columns = (encoded["input_ids"], names, encoded["offset_mapping"])
        rows = zip(*columns, encoded["special_tokens_mask"], strict=True)
        tokens.append(
            [
                {
                    "id": number,
                    "text": name if special else text[start:stop],
                    "special": bool(special),
                    "start": None if special else start,
                    "stop": None if special else stop,
                }
                for number, name, (start, stop), special in rows
            ]
        )
        bounds.hold(bounds.Bound.ANSWER, 5 * sum(map(len, tokens)))
    return Document(tokens)


def as_document(prediction: Answers, prepared: Prepared) -> Document:
    """Return the answers as a JSON list."""
    return Document(list(prediction), prediction.truncated)
