"""Build one table for each split from texts (or tokens) and their labels."""

from __future__ import annotations

import dataclasses
import json
import math
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
from recipe.data.files.part import Part, is_number, is_string
from recipe.data.files.spool import spooled
from recipe.data.held_out import data_set
from recipe.data.labels import Labels, LabelShape
from recipe.errors import DataError, listed

Array = npt.NDArray[Any]
KINDS = {
    labels.SINGLE: pa.int64(),
    labels.SEVERAL: pa.list_(pa.float32()),
    labels.NUMBER: pa.float32(),
}
"""What the labels of each problem are in a table."""
_FEW_NUMBERS = 1_000


@dataclass(frozen=True, kw_only=True)
class LabelledPart:
    """The rows of a file, and the columns of texts (or token ids) and labels in it."""

    part: Part
    texts: tuple[str, ...]
    """One, or the two of a pair in their order."""
    label: str


def build(
    split: str, parts: Sequence[LabelledPart], shape: LabelShape, known: Labels
) -> datasets.Dataset:
    """Return the rows of a split with their inputs and encoded labels."""
    tables = []
    for read in parts:
        table = read.part.table
        if read.texts == (TOKEN_IDS,):
            has_types = TYPE_IDS in table.column_names
            names = (TOKEN_IDS, TYPE_IDS)[: 1 + has_types]
            inputs = {name: token_ids(read.part, name) for name in names}
        else:
            texts = [table[column] for column in read.texts]
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
        tables.append(pa.table({**inputs, LABEL: encoded(split, read, shape, known)}))
    if len({tuple(table.column_names) for table in tables}) > 1:
        raise DataError(
            f"Some files of the {split} data hold texts and others {TOKEN_IDS}: "
            f"{', '.join(str(read.part.path) for read in parts)}.",
            "Give one kind.",
        )
    return data_set(tables)


def token_ids(part: Part, name: str = TOKEN_IDS) -> pa.ChunkedArray:
    """Return the column `input_ids` (or `token_type_ids`) without padding, by `attention_mask`."""
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


def encoded(split: str, read: LabelledPart, shape: LabelShape, known: Labels) -> pa.ChunkedArray:
    """Return the labels of all rows, encoded some rows at a time to keep few Python objects."""
    part, column = read.part, read.label
    kind = KINDS[known.problem]

    def tables() -> Iterator[pa.Table]:
        for first, piece in part.pieces(column):
            rows, codes = np.arange(piece.table.num_rows), None
            if not pa.types.is_nested(piece.table[column].type):
                rows, codes = firsts(piece.table[column])
            try:
                spelled = shape.spell(piece.select(rows), column)
            except DataError:
                shape.spell(part, column)  # which knows how many rows are affected
                raise
            strange = next(
                (index for index, label in enumerate(spelled) if known.unknown(label)), None
            )
            if strange is not None:
                raise DataError(
                    f"{part.where(first + int(rows[strange]))} has the label "
                    f"{known.unknown(spelled[strange])!r}, which is in the {split} data but not in "
                    f"the training data ({listed(known.names)}).",
                    "Give training rows of that label, remove it, or list it in missing_labels to "
                    "leave its rows out.",
                )
            labels_of_rows = pa.array([known.encode(label) for label in spelled], kind)
            if codes is not None:
                labels_of_rows = labels_of_rows.take(pa.array(codes))
            yield pa.table({LABEL: labels_of_rows})

    return spooled(pa.schema([(LABEL, kind)]), tables())[LABEL]


def distinct(part: Part, column: str, has_codes: bool) -> Part:
    """Return the first row of each label, without other columns.

    Numbers with fractions that cannot be classes are reduced to a few.

    Args:
        has_codes: Whether numbers with fractions may be classes, or a string several labels.
    """
    rows: list[int] = []
    known: set[Any] = set()
    has_fraction = False
    for first, piece in part.pieces(column):
        values_ = piece.table[column]
        if pa.types.is_nested(values_.type):
            cells = [json.dumps(row, default=str) for row in values_.to_pylist()]
            new = np.arange(len(cells))
        else:
            new = firsts(values_)[0]
            cells = values_.take(pa.array(new)).to_pylist()
        for index, cell in zip(new.tolist(), cells, strict=True):
            if cell in known:
                continue
            if (
                has_fraction
                and len(rows) >= _FEW_NUMBERS
                and is_number(str(cell))
                and math.isfinite(float(cell))
            ):
                continue
            known.add(cell)
            rows.append(first + index)
            has_fraction = has_fraction or (not has_codes and labels.is_fraction(str(cell)))
    only = dataclasses.replace(part, table=part.table.select([column]))
    return only.select(rows)


def firsts(column: pa.ChunkedArray) -> tuple[Array, Array]:
    """Return the first row of each value, in the order of the rows, and each row's value by its
    position among these."""
    if pa.types.is_null(column.type):
        return np.arange(min(1, len(column))), np.zeros(len(column), dtype=np.int64)
    encoded = column.combine_chunks().dictionary_encode(null_encoding="encode")
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    # Values are numbered in the order in which they come.
    return np.unique(codes, return_index=True)[1], codes
