"""What rerankers learn from: lists of texts for each query, of rows, lists or triplets."""

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
    """Makes lists of the rows of each split, by the labels of the training data."""

    def __init__(self, is_listwise: bool) -> None:
        self._is_listwise = is_listwise
        self._most: float | None = None

    def arrange(self, kind: str, rows: pa.Table, notes: list[str]) -> tuple[str, pa.Table]:
        """A row for each query, with all of its texts.

        Raises:
            DataError: labels are below 0, or nothing says which texts do not belong to a query.
        """
        if kind == PAIRS and pc.max(pc.list_value_length(rows[TEXTS])).as_py() == 1:
            raise DataError(
                "The data has texts that belong to queries, and none that do not.",
                "Give negatives (a column called negative or negatives), or a number for each "
                "query and text (a column called label): 0 for those that do not belong.",
            )
        lists = spooled(SCHEMA, _query_groups(rows))
        least, most = pc.min_max(pc.list_flatten(lists[SCORES])).as_py().values()
        if least < 0:
            raise DataError(
                f"A label is {least:g}, and labels say how relevant texts are, from 0.",
                "Give 0 for texts that do not belong to the query.",
            )
        if self._most is None:
            if least == most:
                raise DataError(
                    f"Every label is {least:g}, from which nothing can be learned.",
                    "Give texts that belong to their queries, and others that do not.",
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
    """The rows of each query together, in the order of the queries' first rows, each text once;
    some queries at a time."""
    of_batches = [batch[QUERY] for batch in rows.select([QUERY]).to_batches(_AT_ONCE)]
    hashes = [pd.util.hash_array(queries.to_numpy(zero_copy_only=False)) for queries in of_batches]
    _, firsts, numbers = np.unique(np.concatenate(hashes), return_index=True, return_inverse=True)
    order = np.argsort(firsts[numbers], kind="stable")
    ends = np.append(np.flatnonzero(np.diff(numbers[order])) + 1, len(order))
    gathering, start = values.Gathering(rows), 0
    while start < len(order):
        # Whole queries. Others of the same hash, if there ever are, come together and are told
        # apart here.
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
