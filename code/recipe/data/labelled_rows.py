"""Texts with labels, or tokens with them, as one table for each split."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from recipe.data import labels
from recipe.data.column_names import LABEL, PAIR, TEXT, TOKEN_IDS, TYPE_IDS
from recipe.data.columns import Columns
from recipe.data.files.part import Part, is_string
from recipe.data.files.spool import spooled
from recipe.data.labels import Labels, LabelShape
from recipe.errors import DataError, listed

Array = npt.NDArray[Any]
KINDS = {
    labels.SINGLE: pa.int64(),
    labels.SEVERAL: pa.list_(pa.float32()),
    labels.NUMBER: pa.float32(),
}
"""What the labels of each problem are in a table."""


@dataclass(frozen=True, kw_only=True)
class Read:
    """One part and the columns chosen in it."""

    part: Part
    columns: Columns


def build(split: str, parts: Sequence[Read], shape: LabelShape, known: Labels) -> datasets.Dataset:
    tables = []
    for each in parts:
        table = each.part.table
        if each.columns.text == TOKEN_IDS:
            has_types = TYPE_IDS in table.column_names
            names = (TOKEN_IDS, TYPE_IDS)[: 1 + has_types]
            inputs = {name: token_ids(each.part, name) for name in names}
        else:
            texts = [table[column] for column in each.columns.read]
            strings = [
                column
                if is_string(column.type)
                else pa.chunked_array(
                    [[None if value is None else str(value) for value in column.to_pylist()]],
                    pa.large_string(),
                )
                for column in texts
            ]
            inputs = {
                name: pc.fill_null(pc.cast(column, pa.large_string()), "")
                for name, column in zip((TEXT, PAIR), strings, strict=False)
            }
        tables.append(pa.table({**inputs, LABEL: _encoded(split, each, shape, known)}))
    if len({tuple(table.column_names) for table in tables}) > 1:
        raise DataError(
            f"Some files of the {split} data hold texts and others {TOKEN_IDS}: "
            f"{', '.join(str(each.part.path) for each in parts)}.",
            "Give one kind.",
        )
    # A name instead of a hash of all rows, which nothing here caches by.
    return datasets.Dataset(pa.concat_tables(tables), fingerprint=uuid.uuid4().hex)


def token_ids(part: Part, name: str = TOKEN_IDS) -> pa.ChunkedArray:
    """The column `input_ids` (or `token_type_ids`) without what its `attention_mask` says is
    padding."""
    kind = pa.large_list(pa.int64())
    columns_ = [name, "attention_mask"] if "attention_mask" in part.table.column_names else [name]

    def kept() -> Iterator[pa.Table]:
        for _, batch in part.batches(columns_):
            rows = batch[name].to_pylist()
            if len(columns_) > 1:
                masks = batch["attention_mask"].to_pylist()
                rows = [
                    [token for token, real in zip(ids, mask, strict=True) if real]
                    for ids, mask in zip(rows, masks, strict=True)
                ]
            yield pa.table({name: pa.array(rows, kind)})

    return spooled(pa.schema([(name, kind)]), kept())[name]


def _encoded(split: str, read: Read, shape: LabelShape, known: Labels) -> pa.Array:
    part, column = read.part, read.columns.label
    rows, codes = np.arange(part.table.num_rows), None
    if not pa.types.is_nested(part.table[column].type):
        rows, codes = firsts(part.table[column])
    try:
        spelled = shape.spell(part.select(rows.tolist()), column)
    except DataError:
        shape.spell(part, column)  # which knows how many rows are so
        raise
    strange = next((at for at, label in enumerate(spelled) if known.unknown(label)), None)
    if strange is not None:
        raise DataError(
            f"{part.where(int(rows[strange]))} has the label {known.unknown(spelled[strange])!r}, "
            f"which is in the {split} data but not in the training data ({listed(known.names)}).",
            "Give training rows of that label, or remove it.",
        )
    encoded = pa.array([known.encode(label) for label in spelled], KINDS[known.problem])
    return encoded if codes is None else encoded.take(pa.array(codes))


def firsts(column: pa.ChunkedArray) -> tuple[Array, Array]:
    """The first row of each value of a column, in the order of the rows; and for each row the
    position of its value among these."""
    if pa.types.is_null(column.type):
        return np.arange(min(1, len(column))), np.zeros(len(column), dtype=np.int64)
    encoded = column.combine_chunks().dictionary_encode(null_encoding="encode")
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    # Values are numbered as they come.
    return np.unique(codes, return_index=True)[1], codes
