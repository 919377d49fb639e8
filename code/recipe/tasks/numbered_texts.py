"""Numbers of queries and their texts: counts, scores, and an index of distinct texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from recipe.data import values
from recipe.data.column_names import LABEL, TEXT
from recipe.data.files.spool import spool_tables
from recipe.data.held_out import data_set
from recipe.data.relevance import QUERY, SCORES, TEXTS

_OTHER_KEY = "numbers of texts"
"""The key of a second hash, which must have 16 characters."""
Array = npt.NDArray[Any]


def counts(split: datasets.Dataset) -> Array:
    """Return how many texts each row has [rows]."""
    columns = [pc.list_value_length(some[TEXTS]) for some in values.tables(split)]
    return np.concatenate([np.empty(0, np.int64), *(column.to_numpy() for column in columns)])


def scores(split: datasets.Dataset) -> Array:
    """Return the scores of all texts of all rows, float32 [texts]."""
    columns = [pc.list_flatten(some[SCORES]) for some in values.tables(split)]
    flat = np.concatenate([np.empty(0), *(column.to_numpy() for column in columns)])
    return flat.astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class Numbered:
    """The distinct texts of a data set, queries included, and their numbers."""

    texts: datasets.Dataset
    """Distinct texts with their prompts, in order of first appearance; `label` is one number."""
    members: Array
    """[rows, most]: the texts of each row, its query first; -1 for none."""
    identities: Array
    """[texts]: a number from 1, equal for texts that are equal without their prompts."""


def numbered(split: datasets.Dataset, prompts: tuple[str, str], label: int) -> Numbered:
    """Return the distinct texts of a data set, compared by 128-bit hashes to save memory.

    Args:
        prompts: The prompt of each query, and that of each other text.
    """
    widths = counts(split) + 1
    ends = np.cumsum(widths)
    is_query = np.zeros(int(ends[-1]), bool)
    is_query[ends - widths] = True
    hashes = []
    for texts in _text_chunks(split):
        objects = texts.to_numpy(zero_copy_only=False)
        halves = [pd.util.hash_array(objects, categorize=False),
                  pd.util.hash_array(objects, hash_key=_OTHER_KEY, categorize=False)]  # fmt: skip
        hashes.append(np.stack(halves, axis=1))
    firsts, identities = _distinct_keys(np.concatenate(hashes))
    numbers = identities
    if prompts[0] != prompts[1]:
        firsts, numbers = _distinct_keys(np.stack([identities, is_query], axis=1))
    members = np.full((len(widths), int(widths.max())), -1)
    members[np.arange(members.shape[1]) < widths[:, None]] = numbers
    schema = pa.schema([(TEXT, pa.large_string()), (LABEL, pa.int64())])

    def distinct() -> Iterator[pa.Table]:
        start = 0
        for texts in _text_chunks(split):
            firsts_here = firsts[slice(*np.searchsorted(firsts, [start, start + len(texts)]))]
            chosen = texts.take(pa.array(firsts_here - start))
            prompt = pa.array(prompts, pa.large_string()).take(pa.array(1 - is_query[firsts_here]))
            whole = pc.binary_join_element_wise(prompt, chosen, pa.scalar("", pa.large_string()))
            yield pa.table([whole, pa.array(np.full(len(firsts_here), label))], schema=schema)
            start += len(texts)

    texts = data_set([spool_tables(schema, distinct())])
    return Numbered(texts=texts, members=members, identities=identities[firsts] + 1)


def _text_chunks(split: datasets.Dataset) -> Iterator[pa.Array]:
    """Yield the texts in chunks of rows, each query before its texts."""
    for some in values.tables(split):
        queries, texts = (some[name].combine_chunks() for name in (QUERY, TEXTS))
        widths = pc.list_value_length(texts).to_numpy() + 1
        order = np.empty(int(widths.sum()), np.int64)
        is_query = np.zeros(len(order), bool)
        is_query[np.cumsum(widths) - widths] = True
        order[is_query] = np.arange(len(queries))
        order[~is_query] = np.arange(len(queries), len(order))
        yield pa.concat_arrays([queries, pc.list_flatten(texts)]).take(pa.array(order))


def _distinct_keys(keys: Array) -> tuple[Array, Array]:
    """Return the first row of each distinct key of [rows, 2], ascending, and the position of each
    row's key among these."""
    one, other = (pd.factorize(column)[0].astype(np.int64) for column in keys.T)
    # Numbered in the order of first appearance.
    numbers, _ = pd.factorize(one * (other.max(initial=0) + 1) + other)
    return np.unique(numbers, return_index=True)[1], numbers
