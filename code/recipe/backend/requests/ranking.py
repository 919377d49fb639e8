"""Requests for how well texts go with another: `{"query", "texts"}` and
`{"source_sentence", "sentences"}`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from recipe.backend.requests.payloads import Answers, BadRequest, Request, a_text

QUERY, SIMILARITY = frozenset({"query", "texts"}), frozenset({"source_sentence", "sentences"})


@dataclass(frozen=True)
class Ranking:
    """A request whose texts are each to be compared with the same one."""

    texts: Sequence[str]
    ranked: bool
    """Whether the best is answered first; else scores stand as the texts were sent."""

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
    """Return the query of a ranking request, its texts, and whether to rank them; None if `value`
    is another request.

    Raises:
        BadRequest: Its parts are not texts.
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
    """Read a cross-encoder's request: a ranking becomes a pair for each of its texts.

    Args:
        request: It is changed.
        reader: What reads the inputs of another request.
        columns: Columns of texts that the model was trained on (see `Request.read`).
        labels: How many the model has.

    Raises:
        BadRequest: An input cannot be read, or the model does not have one score for a pair.
    """
    query_and_texts = parts(request.texts[0]) if request.single and not request.is_read else None
    if query_and_texts is None:
        if "return_text" in request.parameters and not isinstance(request.raw, Ranking):
            raise BadRequest('return_text goes with {"query": ..., "texts": [...]} only.')
        request.read(reader, columns)
        return
    if labels != 1:
        raise BadRequest(
            f"The model has {labels} labels, so that it cannot rank texts: that takes a "
            "cross-encoder of one label, or a model of sentence vectors."
        )
    query, texts, ranked = query_and_texts
    request.texts, request.is_read = [(query, text) for text in texts], True
    request.raw = Ranking(texts, ranked)
