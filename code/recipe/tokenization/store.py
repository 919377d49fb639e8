"""Keep the tokens of a data set in files, written once per host and mapped by its processes.

Rows are read, tokenised and written in chunks, so that a process never holds all texts or tokens in
memory. A restarted job finds the files.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import multiprocessing
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]
from transformers import PreTrainedTokenizerBase

from recipe.console import say
from recipe.data import values
from recipe.errors import OutputError
from recipe.storage import number_files

Column = npt.NDArray[Any]
Make = Callable[[Mapping[str, list[Any]], range], Mapping[str, Column]]
LENGTHS, STARTS = "lengths", "starts"
_AT_ONCE = 10_000
_BYTES_AT_ONCE = 1 << 20
"""Bytes of rows that are tokenised together. With offsets, the tokenizer's output is more than a
hundred times as large."""
_HASHED_AT_ONCE = 1_000
_FORMAT = "number files 2"
_LOOKED_AT, _DOUBT = 1 << 24, 3
"""Bytes of tokens after which free space is first checked, and again after each doubling; and the
initial uncertainty of the estimated remaining bytes."""


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
        with room(folder.parent, len(split)):
            number_files.write(folder, _parts(split, make, processes))
    return number_files.read(folder)


def _parts(split: datasets.Dataset, make: Make, processes: int) -> Iterator[dict[str, Column]]:
    end = written = 0
    looked_at = _LOOKED_AT
    yield {STARTS: np.zeros(1, np.int64)}
    with contextlib.ExitStack() as stack:
        made: Iterator[tuple[int, dict[str, Column]]]
        if processes > 1:
            # Forked processes need no pickle of `make`.
            context = multiprocessing.get_context("fork")
            pool = stack.enter_context(context.Pool(processes, _inherited.append, (make,)))
            made = pool.imap(_call_inherited, _batches(split))
        else:
            made = ((rows.stop, dict(make(batch, rows))) for batch, rows in _batches(split))
        for row, columns in made:
            ends = end + np.cumsum(columns.pop(LENGTHS), dtype=np.int64)
            yield {**columns, STARTS: ends}
            written += ends.nbytes + sum(column.nbytes for column in columns.values())
            if written >= looked_at:
                looked_at = 2 * written
                # Later rows may be shorter; the more rows have been read, the less likely that is.
                left = 1 - row / len(split)
                check_room(written / row * left * len(split), len(split), 1 + _DOUBT * left)
            end = int(ends[-1]) if len(ends) else end


_inherited: list[Make] = []
"""What a forked process calls."""


def _call_inherited(batch_and_rows: tuple[dict[str, list[Any]], range]) -> Any:
    batch, rows = batch_and_rows
    return rows.stop, dict(_inherited[-1](batch, rows))


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


def flat(rows: Sequence[Sequence[Any]], kind: Any) -> Column:
    """Return the concatenated items of lists."""
    return np.fromiter(itertools.chain.from_iterable(rows), kind, sum(map(len, rows)))


def lengths_of(rows: Sequence[Sequence[Any]]) -> Column:
    """Return the lengths of lists."""
    return np.fromiter(map(len, rows), np.int64, len(rows))


def tokens_folder() -> Path:
    """Return the folder of the tokens of all data sets."""
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "tokens"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def check_room(needed: float, rows: int, doubt: float) -> None:
    """Check that the disk has room for the remaining tokens.

    Args:
        needed: Their bytes, estimated from the tokens written so far.
        rows: All rows, for the message.
        doubt: The factor by which the estimate may be too high; within it, only a warning is
            logged.

    Raises:
        OutputError: They do not fit even if the estimate is too high.
    """
    folder = tokens_folder()
    free = shutil.disk_usage(folder).free
    if needed <= free:
        return
    what = (
        f"The tokens of {rows} rows take some {needed / 1e9:.2f} GB more in {folder}, where "
        f"{free / 1e9:.2f} GB are free"
    )
    remedy = "Give the job a larger volume, or name a folder on another one in HF_DATASETS_CACHE."
    if needed > doubt * free:
        raise OutputError(f"{what}.", remedy)
    say(f"warning: {what}, as those before them suggest. {remedy}")


@contextlib.contextmanager
def room(folder: Path, rows: int) -> Iterator[None]:
    """Raise OutputError with a remedy if the disk is full when the tokens are written."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(folder).free / 1e9
        raise OutputError(
            f"The tokens of {rows} rows cannot be kept in {folder}, where {free:.1f} GB are "
            f"free: {error}.",
            "Give the job a larger volume, or name a folder on another one in HF_DATASETS_CACHE.",
        ) from error


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
