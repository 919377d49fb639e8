"""Requests that compare texts with one other text: `{"query", "texts"}` and
`{"source_sentence", "sentences"}`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from recipe.backend.requests.payloads import Answers, BadRequest, Request, a_text

QUERY, SIMILARITY = frozenset({"query", "texts"}), frozenset({"source_sentence", "sentences"})


@dataclass(frozen=True)
class Ranking:
    """A request that compares each of its texts with one other text."""

    texts: Sequence[str]
    ranked: bool
    """Whether the answer is ordered by score; otherwise it has the order of the texts."""

    def answers(self, scores: Sequence[float], request: Request) -> Answers:
        """Return `[{"index", "score"}, ...]` with the best first, or the scores alone."""
        if not self.ranked:
            return Answers(scores, request.truncated)
        order = sorted(range(len(scores)), key=lambda place: -scores[place])
        texts = request.parameters.get("return_text")
        return Answers(
            [
                {"index": place, "score": scores[place]}
                | ({"text": self.texts[place]} if texts else {})
                for place in order
            ],
            request.truncated,
        )


def parts(value: Any) -> tuple[str, list[str], bool] | None:
    """Return the query of a ranking request, its texts, and whether to order them by score; None
    for other requests.

    Raises:
        BadRequest: A part is not a text.
    """
    if not isinstance(value, dict) or set(value) not in (QUERY, SIMILARITY):
        return None
    ranked = set(value) == QUERY
    first, others = ("query", "texts") if ranked else ("source_sentence", "sentences")
    texts = value[others] if isinstance(value[others], list) else [value[others]]
    if not texts:
        raise BadRequest(f"{others!r} is empty. Give the texts to compare with {first!r}.")
    return a_text(value[first]), [a_text(text) for text in texts], ranked


def expand(
    request: Request, reader: Callable[[Any], Any], columns: Sequence[str], labels: int
) -> None:
    """Read the inputs of a classifier. A ranking becomes a pair for each of its texts.

    Args:
        request: The request, which is changed.
        reader: Reads the inputs of requests that are not rankings.
        columns: Text columns that the model was trained on (see `Request.read`).
        labels: The number of labels of the model.

    Raises:
        BadRequest: An input is invalid, or a ranking was sent to a model of several labels.
    """
    query_and_texts = parts(request.texts[0]) if request.single and not request.is_read else None
    if query_and_texts is None:
        if "return_text" in request.parameters and not isinstance(request.raw, Ranking):
            raise BadRequest('return_text goes with {"query": ..., "texts": [...]} only.')
        request.read(reader, columns)
        return
    if labels != 1:
        raise BadRequest(
            f"The model has {labels} labels, so it cannot rank texts. Use a cross-encoder with one "
            "label, or a model of sentence embeddings."
        )
    query, texts, ranked = query_and_texts
    request.texts, request.is_read = [(query, text) for text in texts], True
    request.raw = Ranking(texts, ranked)
