"""Read the first rows of a file of any format."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from recipe.data.files import formats
from recipe.data.files.part import HeaderHint, Part, open_bytes
from recipe.errors import DataError
from recipe.runtime import memory

ROWS = 1_000
_BYTES = 1 << 20
_PLAIN = (".txt", ".text", "")


def read(path: Path, header: HeaderHint = frozenset()) -> Part | None:
    """Return at most `ROWS` rows; None if it is plain text or cannot be read.

    Of text formats it reads the first MB; a JSON document is read whole.
    """
    try:
        with memory.bounded(path):
            part = _part(path, header)
        if part is None or part.table.num_rows == 0:
            return None
        return part.select(range(min(ROWS, part.table.num_rows)))
    except (DataError, OSError, EOFError, ValueError):
        return None  # reading the whole file reports the error


def _part(path: Path, header: HeaderHint) -> Part | None:
    file_format = formats.format_of(path)
    if file_format.name == "Parquet":
        batch = next(pq.ParquetFile(path).iter_batches(batch_size=ROWS), None)
        return None if batch is None else formats.parquet_part(path, pa.table(batch))
    if path.is_dir() or file_format.name == "Arrow":
        return formats.read(path, header=header)
    is_plain = file_format.name == "CSV" and Path(path.name.removesuffix(".gz")).suffix in _PLAIN
    if is_plain and not formats.is_structured(path):
        return None
    with open_bytes(path) as stream:
        start = stream.read(_BYTES)
        is_whole = not stream.read(1)
    if file_format.name.startswith("JSON"):
        line, _, rest = start.partition(b"\n")
        try:
            is_whole = is_whole or not (rest and isinstance(json.loads(line), dict))
        except (ValueError, RecursionError):
            is_whole = True
    if is_whole:
        return formats.read(path, header=header)
    with tempfile.TemporaryDirectory() as folder:
        beginning = Path(folder) / path.name.removesuffix(".gz")
        beginning.write_bytes(start[: start.rindex(b"\n") + 1])
        # Its name in messages and class names is that of the file.
        return dataclasses.replace(formats.read(beginning, header=header), path=path)
