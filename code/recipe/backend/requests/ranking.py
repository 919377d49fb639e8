"""Requests that compare texts with one other text: `{"query", "texts"}` and
`{"source_sentence", "sentences"}`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recipe.backend.requests.payloads import BadRequest, Request, Text, a_text

QUERY, SIMILARITY = frozenset({"query", "texts"}), frozenset({"source_sentence", "sentences"})


class Ranking(list[Text]):
    """What is read for a request that compares each of its texts with one other text."""

    def __init__(self, values: Sequence[Text], *, texts: Sequence[str], ranked: bool) -> None:
        super().__init__(values)
        self.texts = texts
        self.ranked = ranked
        """Whether the answer is ordered by score; otherwise it has the order of the texts."""

    def answer(
        self, scores: Sequence[float], ranks: Sequence[float], prepared: Request
    ) -> dict[str, Any]:
        """Return `[{"index", "score"}, ...]`, the text of the highest rank first, or the scores
        alone."""
        if not self.ranked:
            return prepared.answer(scores)
        entries: list[dict[str, Any]] = []
        for index in sorted(range(len(scores)), key=lambda index: -ranks[index]):
            entries.append({"index": index, "score": scores[index]})
            if prepared.parameters.get("return_text"):
                entries[-1]["text"] = self.texts[index]
        return prepared.answer(entries)


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


def pairs(request: Request, labels: int) -> Ranking | None:
    """Return a pair of the query and each text of a ranking request; None for other requests.
    Raise BadRequest if a part is not a text, or the model has several labels."""
    query_and_texts = parts(request)
    if query_and_texts is None:
        if "return_text" in request.parameters:
            raise BadRequest('return_text goes with {"query": ..., "texts": [...]} only.')
        return None
    if labels != 1:
        raise BadRequest(
            f"The model has {labels} labels, so it cannot rank texts. Use a cross-encoder with one "
            "label, or a model of sentence embeddings."
        )
    query, texts, ranked = query_and_texts
    return Ranking([(query, text) for text in texts], texts=texts, ranked=ranked)
