"""Convert JSON records to Arrow tables, some at a time, with column types that fit all of them.

Arrow's own JSON reader parses strings that look like times as times, and infers a column's type
from the rows read so far. So records are parsed in Python, but never all at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data.files.spool import Spool, spool_tables

Record = Mapping[str, Any]
Blocks = Callable[[], Iterator[Sequence[Record]]]
"""Each call reads all records from the first one on."""
_NO_TYPE = (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError)


def concat_blocks(blocks: Blocks) -> tuple[pa.Table, Mapping[str, int]]:
    """Return all records as one table, with the types that `pyarrow.array` gives all values of a
    column. Values without a common type become texts: strings unchanged, others as JSON.

    Returns:
        The table; and its columns in which only some values are lists or records, written as JSON,
        with the first such row.

    Raises:
        UnicodeEncodeError: a text holds half of a surrogate pair.
    """
    seen, schema, is_alike, whole = _ColumnTypes(), None, True, pa.table({})
    with Spool() as rows:
        for block in blocks():
            table = seen.add(block)
            if not is_alike:
                continue
            if table is not None:
                schema = table.schema if schema is None else schema
                kinds = zip(table.schema.types, schema.types, strict=False)
                if table.column_names == schema.names and all(
                    pa.types.is_null(kind) or kind == first for kind, first in kinds
                ):
                    columns = [
                        pa.nulls(len(block), kind) if pa.types.is_null(column.type) else column
                        for column, kind in zip(table.columns, schema.types, strict=True)
                    ]
                    rows.add(pa.table(columns, schema=schema))
                    continue
            is_alike = False
            rows.close()
        if is_alike and schema is not None:
            whole = rows.table()
    kinds_of_columns = seen.kinds()
    while not is_alike:
        fields = [
            (n, pa.string() if kind is None else kind) for n, kind in kinds_of_columns.items()
        ]
        try:
            tables = (_typed(block, kinds_of_columns) for block in blocks())
            whole, is_alike = spool_tables(pa.schema(fields), tables), True
        except _Unfit as unfit:
            kinds_of_columns[unfit.args[0]] = None
    strings = {field.name for field in whole.schema if pa.types.is_string(field.type)}
    return whole, {name: row for name, row in seen.containers.items() if name in strings}


class _ColumnTypes:
    """The columns and their types."""

    def __init__(self) -> None:
        self._kinds: dict[str, dict[pa.DataType, None] | None] = {}
        """The types of each column, in the order of the rows; None for a column without a type."""
        self.containers: dict[str, int] = {}
        """The first row of each column that holds a list or a record."""
        self._rows = 0

    def add(self, block: Sequence[Record]) -> pa.Table | None:
        """Return further records as a table; None if a column is without a type."""
        for record in block:
            for name in record:
                self._kinds.setdefault(name, {})
        arrays: dict[str, pa.Array] | None = {}
        for name, kinds in self._kinds.items():
            values = [record.get(name) for record in block]
            if name not in self.containers:
                are_containers = [isinstance(value, (list, dict)) for value in values]
                if True in are_containers:
                    self.containers[name] = self._rows + are_containers.index(True)
            if kinds is None:
                continue
            try:
                try:
                    array = pa.array(values)
                    kinds[array.type] = None
                    if arrays is not None:
                        arrays[name] = array
                except UnicodeEncodeError:  # harmless if others turn the column into text
                    kinds[pa.infer_type(values)] = None
                    arrays = None
            except _NO_TYPE:
                self._kinds[name] = arrays = None
        self._rows += len(block)
        return None if None in self._kinds.values() or arrays is None else pa.table(arrays)

    def kinds(self) -> dict[str, pa.DataType | None]:
        """Return the type of each column; None for a column without one."""
        merged: dict[str, pa.DataType | None] = {}
        for name, kinds in self._kinds.items():
            try:
                merged[name] = None if kinds is None else pa.infer_type(list(map(_example, kinds)))
            except _NO_TYPE:
                merged[name] = None
        return merged


def _example(kind: pa.DataType) -> Any:
    """Return a value of this type."""
    if pa.types.is_struct(kind):
        return {field.name: _example(field.type) for field in kind}
    if pa.types.is_list(kind):
        return [_example(kind.value_type)]
    if pa.types.is_null(kind):
        return None
    if pa.types.is_uint64(kind):
        return 2**64 - 1
    return {pa.int64(): 0, pa.float64(): 0.5, pa.bool_(): False, pa.string(): ""}[kind]


class _Unfit(Exception):
    """A value does not fit the type of the column with this name."""


def _typed(block: Sequence[Record], kinds: Mapping[str, pa.DataType | None]) -> pa.Table:
    arrays = {}
    for name, kind in kinds.items():
        values = [record.get(name) for record in block]
        if kind is None:
            # Values of several types, such as 1 and "1": as text, they still compare.
            values = [
                value if value is None or isinstance(value, str) else json.dumps(value)
                for value in values
            ]
        try:
            arrays[name] = pa.array(values, pa.string() if kind is None else kind)
        except _NO_TYPE as error:
            if kind is None:
                raise
            raise _Unfit(name) from error
    return pa.table(arrays)
