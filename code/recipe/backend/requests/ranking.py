"""Requests that compare texts with one other text: `{"query", "texts"}` and
`{"source_sentence", "sentences"}`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recipe.backend.requests.payloads import BadRequest, Request, Text, a_text

QUERY, SIMILARITY = frozenset({"query", "texts"}), frozenset({"source_sentence", "sentences"})


def parts(request: Request) -> tuple[str, list[str], bool] | None:
    """Return the query of a ranking request, its texts, and whether to order them by score; None
    for other requests. Raise BadRequest if a part is not a text."""
    value = request.inputs[0] if request.single else None
    if not isinstance(value, dict) or set(value) not in (QUERY, SIMILARITY):
        return None
    ranked = set(value) == QUERY
    first, others = ("query", "texts") if ranked else ("source_sentence", "sentences")
    texts = value[others] if isinstance(value[others], list) else [value[others]]
    if not texts:
        raise BadRequest(f"{others!r} is empty. Give the texts to compare with {first!r}.")
    return a_text(value[first]), [a_text(text) for text in texts], ranked


def pairs(request: Request, labels: int) -> list[Text] | None:
    """Return a pair of the query and each text of a ranking request; None for other requests.
    Raise BadRequest if a part is not a text, or the model has several labels."""
    compared = parts(request)
    if compared is None:
        if "return_text" in request.parameters:
            raise BadRequest('return_text goes with {"query": ..., "texts": [...]} only.')
        return None
    if labels != 1:
        raise BadRequest(
            f"The model has {labels} labels, so it cannot rank texts. Use a cross-encoder with one "
            "label, or a model of sentence embeddings."
        )
    query, texts, _ = compared
    return [(query, text) for text in texts]


def answer(prepared: Request, scores: Sequence[float], ranks: Sequence[float]) -> dict[str, Any]:
    """Return the prediction for a ranking request: of a query `[{"index", "score"}, ...]`, the text
    of the highest rank first; of a source sentence the scores."""
    compared = parts(prepared)
    assert compared is not None
    _, texts, ranked = compared
    if not ranked:
        return prepared.answer(scores)
    best = sorted(range(len(scores)), key=lambda index: -ranks[index])
    entries: list[dict[str, Any]] = [{"index": index, "score": scores[index]} for index in best]
    if prepared.parameters.get("return_text"):
        entries = [{**entry, "text": texts[entry["index"]]} for entry in entries]
    return prepared.answer(entries)
