"""Keep the tokens of a data set in files, written once per host and mapped by its processes.

Rows are read, tokenized and written in chunks, so that a process never holds all texts or tokens in
memory. A restarted job finds the files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]
from transformers import PreTrainedTokenizerBase

from recipe.console import Progress
from recipe.data import values
from recipe.data.files.spool import convert_disk_errors
from recipe.storage import number_files
from recipe.tokenization.encoding import flat as flat
from recipe.tokenization.encoding import lengths_of as lengths_of

Column = npt.NDArray[Any]
Make = Callable[[Mapping[str, list[Any]], range], Mapping[str, Column]]
LENGTHS, STARTS = "lengths", "starts"
_CHUNK_BYTES = 1 << 20
"""Bytes of rows that are tokenized together. With offsets, the tokenizer's output is more than a
hundred times as large."""
_HASHED_ROWS = 1_000
_FORMAT = "number files 2"


def tokens_of(split: datasets.Dataset, key: str, make: Make) -> dict[str, Column]:
    """Return the columns that `make` makes of the rows of a data set, mapped from files.

    Args:
        split: At least one row.
        key: The name of the files: see `key`.
        make: Takes the columns of some rows and their numbers, and returns the same columns each
            time: `lengths` [samples], the tokens of each sample, and others with a value for each
            token [tokens] or sample [samples, ...].

    Returns:
        The columns; instead of `lengths`, `starts` int64 [samples + 1]: where the tokens of each
        sample begin, and where the last ones end.

    Raises:
        DataError: The files are damaged.
        OutputError: The disk has no room for the tokens.
    """

    def parts(progress: Progress) -> Iterator[dict[str, Column]]:
        row = end = 0
        yield {STARTS: np.zeros(1, np.int64)}
        for table in tables(split):
            columns = dict(make(table.to_pydict(), range(row, row + table.num_rows)))
            progress.done = row = row + table.num_rows
            ends = end + np.cumsum(columns.pop(LENGTHS), dtype=np.int64)
            yield {**columns, STARTS: ends}
            end = int(ends[-1]) if len(ends) else end

    folder = Path(datasets.config.HF_DATASETS_CACHE) / "tokens" / key
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not folder.is_dir():
        what = f"The tokens of {len(split)} rows"
        with convert_disk_errors(what), Progress("tokenizing", len(split)) as progress:
            number_files.write(folder, parts(progress))
    return number_files.read(folder)


def tables(split: datasets.Dataset) -> Iterator[pa.Table]:
    """Yield the rows of a data set in chunks of limited rows and bytes; at least one row each."""
    row_bytes = split.data.nbytes / max(1, split.data.num_rows)
    count = int(min(values.CHUNK_ROWS, max(1, _CHUNK_BYTES // max(1, row_bytes))))
    for gathered in values.tables(split, count):
        table = gathered.combine_chunks()
        parts = min(table.num_rows, -(-table.nbytes // (2 * _CHUNK_BYTES)))
        rows = -(-table.num_rows // max(1, parts))
        yield from (table.slice(first, rows) for first in range(0, table.num_rows, rows))


def key(
    split: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int, *how: str
) -> str:
    """Return a digest of the texts, labels, tokenizer, length and ways of tokenizing."""
    ways = (*how, _FORMAT)
    digest = hashlib.sha256(f"{datasets.__version__} {max_length} {tokenizer} {ways}".encode())
    if tokenizer.is_fast:
        # The options of the last call do not identify a tokenizer.
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
        digest.update(tokenizer.backend_tokenizer.to_str().encode())
    else:
        digest.update(json.dumps(tokenizer.get_vocab(), sort_keys=True).encode())
    # Equal rows give equal batches, however they are split into files.
    for table in values.tables(split, _HASHED_ROWS):
        # Written by Arrow, a batch no longer depends on its chunks and slices.
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema.remove_metadata()) as stream:
            stream.write_table(table.replace_schema_metadata().combine_chunks())
        digest.update(sink.getvalue())
    return digest.hexdigest()[:32]
