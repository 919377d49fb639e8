"""What rerankers learn from: lists of texts for each query, of rows, lists or triplets."""

from __future__ import annotations

from recipe.data import relevance
from recipe.data.evidence import Evidence, Recognised
from recipe.data.relevance import LISTS, PAIRS, Row
from recipe.errors import DataError


def recognise(evidence: Evidence) -> Recognised | None:
    """Whether the first rows are for a reranker; certain for lists and triplets, if the model has
    the head of a classifier."""
    chosen = relevance.columns_of(evidence)
    if chosen is None or (chosen.kind == PAIRS and not chosen.negatives):
        return None
    is_head = any("ForSequenceClassification" in name for name in evidence.architectures)
    if chosen.kind == LISTS:
        reason = f"column {chosen.text} holds lists of texts, and {chosen.score} a label for each"
        return Recognised(reason=reason, certain=is_head)
    if chosen.kind == PAIRS:
        reason = (
            f"columns {chosen.query}, {chosen.text} and {chosen.negatives[0]}, for a classifier"
        )
        return Recognised(reason=reason) if is_head else None
    try:
        what = "numbers"
        for value in evidence.values(str(chosen.score)):
            float(value)
    except (TypeError, ValueError):
        what = "labels"
    reason = f"columns {chosen.query} and {chosen.text} with {what} in {chosen.score}"
    return Recognised(reason=reason, certain=False)


class Lists:
    """Makes lists of the rows of each split, by the labels of the training data."""

    def __init__(self, is_listwise: bool) -> None:
        self._is_listwise = is_listwise
        self._most: float | None = None

    def arrange(self, kind: str, rows: list[Row], notes: list[str]) -> tuple[str, list[Row]]:
        """A row for each query, with all of its texts.

        Raises:
            DataError: labels are below 0, or nothing says which texts do not belong to a query.
        """
        if kind == PAIRS and all(len(texts) == 1 for _, texts, _ in rows):
            raise DataError(
                "The data has texts that belong to queries, and none that do not.",
                "Give negatives (a column called negative or negatives), or a number for each "
                "query and text (a column called label): 0 for those that do not belong.",
            )
        lists: dict[str, dict[str, float]] = {}
        for query, texts, scores in rows:
            known = lists.setdefault(query, {})
            for text, score in zip(texts, scores, strict=True):
                known[text] = max(score, known.get(text, score))
        labels = [score for texts in lists.values() for score in texts.values()]
        if min(labels) < 0:
            raise DataError(
                f"A label is {min(labels):g}, and labels say how relevant texts are, from 0.",
                "Give 0 for texts that do not belong to the query.",
            )
        if self._most is None:
            if len(set(labels)) == 1:
                raise DataError(
                    f"Every label is {labels[0]:g}, from which nothing can be learned.",
                    "Give texts that belong to their queries, and others that do not.",
                )
            self._most = 1.0 if self._is_listwise else max(1.0, *labels)
            if self._most > 1:
                notes.append(f"labels: divided by {self._most:g}, the highest, to lie from 0 to 1")
        if max(labels) > self._most and not self._is_listwise:
            raise DataError(
                f"A label of the evaluation data is {max(labels):g}, and the highest of the "
                f"training data {self._most:g}.",
                "Label both in the same way.",
            )
        most = self._most
        return LISTS, [
            (query, list(texts), [score / most for score in texts.values()])
            for query, texts in lists.items()
        ]
