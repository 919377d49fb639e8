"""The rows of one file, and how a text file is opened."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data.files.spool import spool_tables
from recipe.errors import DataError

_CHUNK_ROWS, _CHUNK_BYTES = 10_000, 1 << 24
TAG = re.compile(r"O|[BIESLUMW]-\S+")
"""A tag of a word in named entity data: `B-PER`, `I-ORG`, `O`."""
OUTSIDE = "O"
DATE = re.compile(
    r"(\d{4}[-/]\d{1,2}[-/]\d{1,2}([ T]\d{1,2}:\d{2}.{,20})?|\d{1,2}/\d{1,2}/\d{2,4}.{,20}"
    r"|\d{1,2}:\d{2}(:\d{2})?( ?[APap]\.?[Mm]\.?)?"
    # Of mails and feeds, and Twitter's.
    r"|[A-Z][a-z]{2}, \d{1,2} [A-Z][a-z]{2} \d{4}.{,20}"
    r"|[A-Z][a-z]{2} [A-Z][a-z]{2} \d{1,2} [\d: +]{,20})"
)
_LONGEST_INTEGER = 18
"""Digits that each fit into 64 bits."""
UNTAGGED = -100
"""Replaces tags that are neither learned nor scored."""


HeaderHint = bool | frozenset[str]
"""Whether the first row of delimited text names the columns; or names of columns, one of which in
that row makes it the header."""


class UnclearHeader(DataError):
    """The first row of delimited text may name its columns or be one of its rows."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        super().__init__(
            f"The first row of {path} may name its columns or be one of its rows: "
            f"{', '.join(names)[:80]!r}.",
            "Give header=true if it names them, or header=false.",
        )
        self.path = path


class RowGatherer:
    """Gathers rows of a table by their numbers, in any order, chunk by chunk.

    Arrow's own `take` would concatenate the chunks in memory first.
    """

    def __init__(self, table: pa.Table) -> None:
        self._pieces = table.to_batches()
        self._ends = np.cumsum([piece.num_rows for piece in self._pieces], dtype=np.int64)

    def select(self, numbers: Any) -> pa.Table:
        """Return the rows with some numbers, int64 [rows], at least one."""
        order = np.argsort(numbers, kind="stable")
        ascending = numbers[order]
        owners = np.searchsorted(self._ends, ascending, side="right")
        cuts = np.flatnonzero(np.diff(owners)) + 1
        taken = []
        for piece_rows, owner in zip(
            np.split(ascending, cuts), owners[np.append(0, cuts)], strict=True
        ):
            piece = self._pieces[owner]
            taken.append(piece.take(pa.array(piece_rows - (self._ends[owner] - piece.num_rows))))
        table = pa.Table.from_batches(taken)
        is_ascending = bool((order[1:] > order[:-1]).all())
        return table if is_ascending else table.take(pa.array(np.argsort(order)))


_NUMBER_BITS = 40


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file of a job, and how its rows are numbered."""

    path: Path
    name: str
    """Its channel and its path in the channel's folder: `train/reviews.csv`."""
    unit: str = "line "
    """What a number counts, with a space: `line ` from 1, `row ` from 0; "" for `names`."""
    names: Sequence[str] = ()
    """The files of a folder whose rows are files."""

    def where(self, number: int) -> str:
        """Return the location of a row, for messages: `/data/train.csv line 7`."""
        is_named = not self.unit  # rows are files of a folder
        return (
            f"{self.path}/{self.names[number]}" if is_named else f"{self.path} {self.unit}{number}"
        )

    def entry(self, number: int) -> dict[str, Any]:
        """Return the location of a row by keys: `{"file": "train/reviews.csv", "line": 7}`."""
        if self.unit:
            return {"file": self.name, self.unit.strip(): number}
        return {"file": f"{self.name}/{self.names[number]}"}


def split_address(address: Any) -> tuple[Any, Any]:
    """Return the positions of the files of one or more addresses among those of the job, and the
    numbers of the rows."""
    return address >> _NUMBER_BITS, address & ((1 << _NUMBER_BITS) - 1)


def shift_addresses(addresses: npt.NDArray[np.int64], files: int) -> npt.NDArray[np.int64]:
    """Return the addresses of rows whose files come after `files` others."""
    return addresses + (files << _NUMBER_BITS)


@dataclass(frozen=True, kw_only=True)
class Part:
    """The rows of one file, Arrow folder, or folder of texts."""

    path: Path
    format: str
    """The detected format, as shown to the user: `csv (semicolon)`, `parquet` ..."""
    table: pa.Table
    lines: Sequence[int] | npt.NDArray[Any] | None = None
    """Line of each row in the file, from 1, or what `unit` says. None: its number, from 0."""
    unit: str = "line "
    """See `SourceFile`."""
    names: Sequence[str] = ()
    """See `SourceFile`."""
    position: int = 0
    """The position among the files of the job."""
    class_names: Mapping[str, list[str]] = field(default_factory=dict)
    """Names of the classes of each column of ClassLabels, or of lists of them."""

    mixed: Mapping[str, str] = field(default_factory=dict)
    """Columns in which only some values are lists or records, with the location of the first: these
    are written as JSON."""
    note: str = ""
    """How the file was read, for the log."""

    def where(self, row: int) -> str:
        """Return the location of row `row` (from 0), for messages: `train.csv line 7`."""
        return self.source().where(row if self.lines is None else int(self.lines[row]))

    def source(self, channels: Mapping[str, Path] | None = None) -> SourceFile:
        """Return the file, named by its channel, and how its rows are numbered."""
        names = [
            f"{channel}/{self.path.relative_to(folder).as_posix()}"
            for channel, folder in (channels or {}).items()
            if self.path.is_relative_to(folder)
        ]
        name = min(names, key=len, default=self.path.name)
        unit = "row " if self.lines is None else self.unit
        return SourceFile(path=self.path, name=name, unit=unit, names=self.names)

    def addresses(self) -> pa.Array:
        """Return int64 [rows]: the position of the file, and the number of each row in it."""
        lines = np.arange(self.table.num_rows) if self.lines is None else self.lines
        return pa.array(shift_addresses(np.asarray(lines, np.int64), self.position))

    def address(self, row: int) -> int:
        """Return one of `addresses`."""
        number = row if self.lines is None else int(self.lines[row])
        return (self.position << _NUMBER_BITS) | number

    def with_column(self, name: str, values: pa.Array) -> Part:
        """Return the part with a column replaced, or added as the last one."""
        index = self.table.schema.get_field_index(name)
        new = index < 0
        table = self.table
        table = table.append_column(name, values) if new else table.set_column(index, name, values)
        return dataclasses.replace(self, table=table)

    def named(self, column: str, names: Sequence[str]) -> Part:
        """Return the part with names for the classes of a column, whose integers are positions."""
        return dataclasses.replace(self, class_names={**self.class_names, column: list(names)})

    def batches(self, names: Sequence[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield some columns of some rows at a time, with the number of the first row."""
        chosen, first = self.table.select(list(names)), 0
        row_bytes = chosen.nbytes / max(1, chosen.num_rows)
        batch_rows = min(_CHUNK_ROWS, _CHUNK_BYTES // max(1, row_bytes))
        for batch in chosen.to_batches(max(1, int(batch_rows))):
            yield first, batch
            first += batch.num_rows

    def select(self, rows: Sequence[int] | npt.NDArray[Any]) -> Part:
        """Return some of the rows, ascending; many of them in a mapped file."""
        numbers, gathering = np.asarray(rows, np.int64), RowGatherer(self.table)
        starts = range(0, len(numbers), _CHUNK_ROWS)
        chosen = (gathering.select(numbers[start : start + _CHUNK_ROWS]) for start in starts)
        table = spool_tables(self.table.schema, chosen)
        if self.lines is None:
            return dataclasses.replace(self, table=table, lines=numbers, unit="row ")
        return dataclasses.replace(self, table=table, lines=np.asarray(self.lines)[numbers])

    def distinct(self, column: str, most: int) -> list[Any] | None:
        """Return the distinct values of a column in their order; None if there are more than
        `most`."""
        values: dict[Any, None] = {}
        for _, batch in self.batches([column]):
            values.update(dict.fromkeys(batch[column].unique().to_pylist()))
            if len(values) > most:
                return None
        return list(values)


def token_data(where: str, what: str) -> DataError:
    """Return the error for data that labels words, not texts."""
    return DataError(
        f"{where} is data of token classification (named entities, parts of speech): {what}.",
        "Give task=token-classification to train a tagger, or one label for each text.",
    )


def is_string(kind: pa.DataType) -> bool:
    """Return whether a column's values are strings."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_binary(kind: pa.DataType) -> bool:
    """Return whether a column's values are bytes."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def usual_types(path: Path, table: pa.Table) -> pa.Table:
    """Return `table` with types that the datasets library knows.

    Categories and views become strings, maps lists, and extension types what they store.

    Raises:
        DataError: Two columns have one name, or the library knows no type for a column.
    """
    if twice := [name for name, count in Counter(table.column_names).items() if count > 1]:
        raise DataError(f"{path} has two columns called {twice[0]!r}.", "Rename one.")
    for index, of_column in enumerate(table.schema):
        kind = _usual(of_column.type)
        if kind == of_column.type:
            continue
        column = table.column(index)
        try:
            if isinstance(of_column.type, pa.BaseExtensionType):
                storage = [chunk.storage for chunk in column.chunks]
                column = pa.chunked_array(storage, of_column.type.storage_type)
            column = column.cast(kind)
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
            raise DataError(
                f"Column {of_column.name!r} of {path} is of type {of_column.type}, which is not "
                f"read: {error}.",
                "Write it as strings, numbers, or lists or structs of these; or leave it out.",
            ) from error
        table = table.set_column(index, of_column.with_type(kind), column)
    return table


def _usual(kind: pa.DataType) -> pa.DataType:
    if isinstance(kind, pa.BaseExtensionType):
        return pa.bool_() if isinstance(kind, pa.Bool8Type) else _usual(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _usual(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_map(kind):
        entry = pa.struct([("key", _usual(kind.key_type)), ("value", _usual(kind.item_type))])
        return pa.list_(entry)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_usual(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_usual(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_usual(kind.value_type)))
    if pa.types.is_decimal(kind):
        is_whole = kind.scale == 0 and kind.precision <= _LONGEST_INTEGER
        return pa.int64() if is_whole else pa.float64()
    is_list_view = pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind)
    is_coded = pa.types.is_union(kind) or pa.types.is_run_end_encoded(kind)
    if is_list_view or is_coded or kind == pa.month_day_nano_interval():
        return pa.string()  # to which it has no cast
    return kind


def is_list(kind: pa.DataType) -> bool:
    """Return whether the values of a column are lists."""
    tests = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(test(kind) for test in tests)


def is_number(cell: str) -> bool:
    """Return whether a cell of a text file is a number."""
    try:
        float(cell)
    except ValueError:
        return False
    return True


def keep_rows(part: Part, is_kept: Sequence[bool], why: str, notes: list[str]) -> Part:
    """Return some rows of a part; add a note with the number of rows left out, and the reason."""
    if all(is_kept):
        return part
    rows = np.flatnonzero(is_kept)
    notes.append(f"{len(is_kept) - len(rows)} rows of {part.path} {why} and are not used.")
    return part.select(rows)
