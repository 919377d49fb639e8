"""Keep the tokens of a data set in files, written once per host and mapped by its processes.

Rows are read, tokenised and written in chunks, so that a process never holds all texts or tokens in
memory. A restarted job finds the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]
from transformers import PreTrainedTokenizerBase

from recipe.data import values
from recipe.data.files.spool import room
from recipe.storage import number_files
from recipe.tokenization.encoding import flat as flat
from recipe.tokenization.encoding import lengths_of as lengths_of

Column = npt.NDArray[Any]
Make = Callable[[Mapping[str, list[Any]], range], Mapping[str, Column]]
LENGTHS, STARTS = "lengths", "starts"
_AT_ONCE = 10_000
_BYTES_AT_ONCE = 1 << 20
"""Bytes of rows that are tokenised together. With offsets, the tokenizer's output is more than a
hundred times as large."""
_HASHED_AT_ONCE = 1_000
_FORMAT = "number files 2"


def tokens_of(
    split: datasets.Dataset, key: str, make: Make, processes: int = 1
) -> dict[str, Column]:
    """Return the columns that `make` makes of the rows of a data set, mapped from files.

    Args:
        split: At least one row.
        key: The name of the files: see `key`.
        make: Takes the columns of some rows and their numbers, and returns the same columns each
            time: `lengths` [samples], the tokens of each sample, and others with a value for each
            token [tokens] or sample [samples, ...].
        processes: In how many processes `make` is called; for tokenizers in Python.

    Returns:
        The columns; instead of `lengths`, `starts` int64 [samples + 1]: where the tokens of each
        sample begin, and where the last ones end.

    Raises:
        DataError: The files are damaged.
        OutputError: The disk has no room for the tokens.
    """
    folder = tokens_folder() / key
    if not folder.is_dir():
        with room(f"The tokens of {len(split)} rows"):
            number_files.write(folder, _parts(split, make, processes))
    return number_files.read(folder)


def _parts(split: datasets.Dataset, make: Make, processes: int) -> Iterator[dict[str, Column]]:
    end = 0
    yield {STARTS: np.zeros(1, np.int64)}
    with contextlib.ExitStack() as stack:
        made: Iterator[dict[str, Column]]
        if processes > 1:
            # Forked processes need no pickle of `make`.
            context = multiprocessing.get_context("fork")
            pool = stack.enter_context(context.Pool(processes, _inherited.append, (make,)))
            made = pool.imap(_call_inherited, _batches(split))
        else:
            made = (dict(make(batch, rows)) for batch, rows in _batches(split))
        for columns in made:
            ends = end + np.cumsum(columns.pop(LENGTHS), dtype=np.int64)
            yield {**columns, STARTS: ends}
            end = int(ends[-1]) if len(ends) else end


_inherited: list[Make] = []
"""What a forked process calls."""


def _call_inherited(batch_and_rows: tuple[dict[str, list[Any]], range]) -> Any:
    return dict(_inherited[-1](*batch_and_rows))


def _batches(split: datasets.Dataset) -> Iterator[tuple[dict[str, list[Any]], range]]:
    row = 0
    for table in tables(split):
        yield table.to_pydict(), range(row, row + table.num_rows)
        row += table.num_rows


def tables(split: datasets.Dataset) -> Iterator[pa.Table]:
    """Yield the rows of a data set in chunks of limited rows and bytes; at least one row each."""
    bytes_of_row = split.data.nbytes / max(1, split.data.num_rows)
    at_once = int(min(_AT_ONCE, max(1, _BYTES_AT_ONCE // max(1, bytes_of_row))))
    for gathered in values.tables(split, at_once):
        table = gathered.combine_chunks()
        parts = min(table.num_rows, -(-table.nbytes // (2 * _BYTES_AT_ONCE)))
        rows = -(-table.num_rows // max(1, parts))
        yield from (table.slice(first, rows) for first in range(0, table.num_rows, rows))


def tokens_folder() -> Path:
    """Return the folder of the tokens of all data sets."""
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "tokens"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def key(
    split: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int, *how: str
) -> str:
    """Return a digest of the texts, labels, tokenizer, length and ways of tokenising."""
    ways = (*how, _FORMAT)
    digest = hashlib.sha256(f"{datasets.__version__} {max_length} {tokenizer} {ways}".encode())
    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else "{}"
    known_by = hashlib.sha256(f"{type(tokenizer)} {tokenizer} {rules}".encode()).hexdigest()
    if known_by not in _identities or not tokenizer.is_fast:
        parts = json.loads(rules)
        # The options of the last call do not identify a tokenizer.
        parts |= {"truncation": None, "padding": None, "all": tokenizer.get_vocab()}
        _identities.clear()
        _identities[known_by] = json.dumps(parts, sort_keys=True).encode()
    digest.update(_identities[known_by])
    # Equal rows give equal batches, however they are split into files.
    for table in values.tables(split, _HASHED_AT_ONCE):
        # Written by Arrow, a batch no longer depends on its chunks and slices.
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema.remove_metadata()) as stream:
            stream.write_table(table.replace_schema_metadata().combine_chunks())
        digest.update(sink.getvalue())
    return digest.hexdigest()[:32]


_identities: dict[str, bytes] = {}
"""A cache of the rules and vocabulary of the last tokenizer, which every data set of a job needs.
For a vocabulary of 250,000 tokens, computing them takes some seconds."""
