"""Collect tables that are read piece by piece; large ones in a mapped file without a name."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import datasets
import pyarrow as pa  # type: ignore[import-untyped]

from recipe.errors import OutputError

_IN_MEMORY, _FEWER = 1 << 26, 1 << 20
"""Bytes up to which a table stays in memory; the limit is lower once all tables together are
large."""
_MANY = 1 << 28
_SPARE = 1 << 30
_CHUNK_ROWS = 2_000


@contextlib.contextmanager
def convert_disk_errors(what: str) -> Iterator[None]:
    """Convert errors of writing to the cache of data sets into one with a remedy.

    Raises:
        OutputError: the disk is full.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{what} cannot be kept in {datasets.config.HF_DATASETS_CACHE}: {error}.",
            "Give the job a larger volume, or name a folder on another one in HF_DATASETS_CACHE.",
        ) from error


class Spool:
    """Collects rows into one table; a context in which they are added.

    The kernel reclaims mapped pages if memory is short. If the disk of the datasets cache has
    little room left, all rows stay in memory.
    """

    def __init__(self) -> None:
        self._held: list[pa.Table] = []
        self._bytes = 0
        self._file: IO[bytes] | None = None
        self._writer: pa.ipc.RecordBatchFileWriter | None = None

    def add(self, table: pa.Table) -> None:
        """Add rows with the same columns as those before.

        Raises:
            OutputError: the disk is full.
        """
        if self._writer is None:
            self._held.append(table)
            self._bytes += table.nbytes
            # There may be many small files. Mapped tables do not count here.
            most = _IN_MEMORY if pa.total_allocated_bytes() < _MANY else _FEWER
            if self._bytes < most:
                return
            folder = Path(datasets.config.HF_DATASETS_CACHE)
            folder.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(folder).free <= 4 * self._bytes + _SPARE:
                return
            with convert_disk_errors("The rows of the data"):
                # It is deleted however this process ends.
                self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
                self._writer = pa.ipc.new_file(self._path(), table.schema)
            tables, self._held = self._held, []
        else:
            tables = [table]
        with convert_disk_errors("The rows of the data"):
            for rows in tables:
                self._writer.write_table(rows)

    def table(self) -> pa.Table:
        """Return all rows, of at least one table.

        Raises:
            OutputError: the disk is full.
        """
        if self._writer is None:
            return pa.concat_tables(self._held)
        with convert_disk_errors("The rows of the data"):
            self._writer.close()  # what is still held back is written
            # The mapping keeps what has no name.
            whole = pa.ipc.open_file(pa.memory_map(self._path())).read_all()
        self.close()
        return whole

    def close(self) -> None:
        """Forget rows that are not needed, and delete their file."""
        self._held = []
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _path(self) -> str:
        """Return the file's path, for functions that open one by its path."""
        assert self._file is not None
        return f"/proc/{os.getpid()}/fd/{self._file.fileno()}"


def spooled_column(kind: pa.DataType, cells: Iterable[Any]) -> pa.ChunkedArray:
    """Return a column of cells that come some at a time, as lists or arrays.

    Raises:
        OutputError: the disk is full.
    """
    schema = pa.schema([("cells", kind)])
    arrays = (some if isinstance(some, pa.Array) else pa.array(some, kind) for some in cells)
    return spool_tables(schema, (pa.table([array], schema=schema) for array in arrays))["cells"]


def spool_tables(schema: pa.Schema, tables: Iterable[pa.Table]) -> pa.Table:
    """Return tables of one schema as one.

    Raises:
        OutputError: the disk is full.
    """
    with Spool() as rows:
        rows.add(schema.empty_table())
        for table in tables:
            rows.add(table)
        return rows.table()


def spooled_rows(schema: pa.Schema, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Return rows as a table.

    Raises:
        OutputError: the disk is full.
    """
    remaining = iter(rows)
    chunks = iter(lambda: list(itertools.islice(remaining, _CHUNK_ROWS)), [])
    return spool_tables(schema, (pa.Table.from_pylist(chunk, schema=schema) for chunk in chunks))
