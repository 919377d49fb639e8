"""Build the training data of rerankers: a list of texts for each query, from rows, lists or
triplets."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from recipe.data import relevance, values
from recipe.data.files.spool import spooled
from recipe.data.relevance import LISTS, PAIRS, QUERY, SCHEMA, SCORES, TEXTS
from recipe.errors import DataError

_AT_ONCE = 10_000


class Lists:
    """Makes lists from the rows of each split, with labels scaled by those of the training data."""

    def __init__(self, is_listwise: bool) -> None:
        self._is_listwise = is_listwise
        self._most: float | None = None

    def arrange(self, kind: str, rows: pa.Table, notes: list[str]) -> tuple[str, pa.Table]:
        """Return a row for each query, with all of its texts.

        Raises:
            DataError: labels are below 0, or there are no irrelevant texts.
        """
        if kind == PAIRS and pc.max(pc.list_value_length(rows[TEXTS])).as_py() == 1:
            raise DataError(
                "The data has relevant texts for its queries, but no irrelevant ones.",
                "Give negatives (a column called negative or negatives), or a number for each "
                "query and text (a column called label): 0 for irrelevant texts.",
            )
        lists = spooled(SCHEMA, _query_groups(rows))
        least, most = pc.min_max(pc.list_flatten(lists[SCORES])).as_py().values()
        if least < 0:
            raise DataError(
                f"A label is {least:g}, but labels are the relevance of texts, from 0.",
                "Give 0 for irrelevant texts.",
            )
        if self._most is None:
            if least == most:
                raise DataError(
                    f"Every label is {least:g}, from which nothing can be learned.",
                    "Give both relevant and irrelevant texts.",
                )
            self._most = 1.0 if self._is_listwise else max(1.0, most)
            if self._most > 1:
                notes.append(f"labels: divided by {self._most:g}, the highest, to lie from 0 to 1")
        if most > self._most and not self._is_listwise:
            raise DataError(
                f"A label of the evaluation data is {most:g}, and the highest of the "
                f"training data {self._most:g}.",
                "Label both in the same way.",
            )
        scaled = [
            pa.LargeListArray.from_arrays(chunk.offsets, pc.divide(chunk.values, self._most))
            for chunk in lists[SCORES].chunks
        ]
        column = pa.chunked_array(scaled, SCHEMA.field(SCORES).type)
        return LISTS, lists.set_column(SCHEMA.get_field_index(SCORES), SCORES, column)


def _query_groups(rows: pa.Table) -> Iterator[pa.Table]:
    """Yield the rows of some queries at a time, grouped by query in the order of the queries' first
    rows, each text once."""
    of_batches = [batch[QUERY] for batch in rows.select([QUERY]).to_batches(_AT_ONCE)]
    hashes = [pd.util.hash_array(queries.to_numpy(zero_copy_only=False)) for queries in of_batches]
    numbers, _ = pd.factorize(np.concatenate(hashes))  # in the order of first appearance
    order = np.argsort(numbers, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(numbers[order])) + 1, len(order))
    gathering, start = values.Gathering(rows), 0
    while start < len(order):
        # Chunks hold whole queries. Different queries with the same hash are in one chunk and are
        # separated here.
        end = int(ends[min(int(np.searchsorted(ends, start + _AT_ONCE)), len(ends) - 1)])
        some = gathering.select(order[start:end]).to_pydict()
        start = end
        lists: dict[str, dict[str, float]] = {}
        for query, texts, scores in zip(*some.values(), strict=True):
            known = lists.setdefault(query, {})
            for text, score in zip(texts, scores, strict=True):
                known[text] = max(score, known.get(text, score))
        yield relevance.table_of(
            [(query, list(texts), list(texts.values())) for query, texts in lists.items()]
        )
