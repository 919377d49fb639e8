"""The tokens of a data set in files, made once for a host, which its processes map.

Rows are read, tokenised and written some at a time, so that neither their texts nor their tokens
are ever all in a process's own memory. A job that is started again finds the files.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
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
LENGTHS, STARTS = "lengths", "starts"
_AT_ONCE = 10_000
_BYTES_AT_ONCE = 1 << 20
"""Of the rows that are tokenised together; the answers of the tokenizer take a hundred times that
and more, where they say which characters each token is of."""
_HASHED_AT_ONCE = 1_000
_FORMAT = "number files 2"
_LOOKED_AT, _DOUBT = 1 << 24, 3
"""Bytes of tokens after which it is asked whether the others have room, and again after twice as
many; and how many times less than these suggest the others may take, and one."""


def tokens_of(
    split: datasets.Dataset,
    key: str,
    make: Callable[[Mapping[str, list[Any]], range], Mapping[str, Column]],
) -> dict[str, Column]:
    """Return what `make` makes of the rows of a data set, a row at least, mapped; and `starts`.

    Args:
        key: What the result is kept by: see `key`.
        make: Gives, for the columns of some rows and the numbers of these, the same columns each
            time: `lengths` [samples], how many tokens each of its samples has; of other columns,
            values for the tokens [tokens] or for the samples [samples, ...].

    Returns:
        The columns; in place of `lengths`, `starts` int64 [samples + 1]: where the tokens of each
        sample begin, and the last ones end.

    Raises:
        DataError: what was kept is not whole any more.
        OutputError: there is no room for the tokens.
    """
    folder = tokens_folder() / key
    if not folder.is_dir():
        with room(folder.parent, len(split)):
            number_files.write(folder, _parts(split, make))
    return number_files.read(folder)


def _parts(
    split: datasets.Dataset,
    make: Callable[[Mapping[str, list[Any]], range], Mapping[str, Column]],
) -> Iterator[dict[str, Column]]:
    row = end = written = 0
    looked_at = _LOOKED_AT
    yield {STARTS: np.zeros(1, np.int64)}
    for table in tables(split):
        columns = dict(make(table.to_pydict(), range(row, row + table.num_rows)))
        ends = end + np.cumsum(columns.pop(LENGTHS), dtype=np.int64)
        yield {**columns, STARTS: ends}
        row += table.num_rows
        written += ends.nbytes + sum(column.nbytes for column in columns.values())
        if written >= looked_at:
            looked_at = 2 * written
            # Those that come may be shorter, the less likely so the more there were.
            left = 1 - row / len(split)
            check_room(written / row * left * len(split), len(split), 1 + _DOUBT * left)
        end = int(ends[-1]) if len(ends) else end


def tables(split: datasets.Dataset) -> Iterator[pa.Table]:
    """Yield the rows of a data set, at most some thousands and some megabytes at a time; of a
    longer row, that row."""
    bytes_of_row = split.data.nbytes / max(1, split.data.num_rows)
    at_once = int(min(_AT_ONCE, max(1, _BYTES_AT_ONCE // max(1, bytes_of_row))))
    for gathered in values.tables(split, at_once):
        table = gathered.combine_chunks()
        parts = min(table.num_rows, -(-table.nbytes // (2 * _BYTES_AT_ONCE)))
        rows = -(-table.num_rows // max(1, parts))
        yield from (table.slice(first, rows) for first in range(0, table.num_rows, rows))


def flat(rows: Sequence[Sequence[Any]], kind: Any) -> Column:
    """Return the items of lists, one list after the other."""
    return np.fromiter(itertools.chain.from_iterable(rows), kind, sum(map(len, rows)))


def lengths_of(rows: Sequence[Sequence[Any]]) -> Column:
    """Return how many items each of some lists has."""
    return np.fromiter(map(len, rows), np.int64, len(rows))


def tokens_folder() -> Path:
    """Return the folder that tokens are kept in."""
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "tokens"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def check_room(needed: float, rows: int, doubt: float) -> None:
    """See that the tokens that are still to be kept have room.

    Args:
        needed: Bytes that they take, as those before them suggest.
        rows: Of the data, for the message.
        doubt: How many times less they may take; a line says what is uncertain.

    Raises:
        OutputError: there is no room for them even so.
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
    before = set(folder.iterdir())
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(folder).free / 1e9
        for half in set(folder.glob("tmp*")) - before:  # which `datasets` leaves there
            half.unlink()
        raise OutputError(
            f"The tokens of {rows} rows cannot be kept in {folder}, where {free:.1f} GB are "
            f"free: {error}.",
            "Give the job a larger volume, or name a folder on another one in HF_DATASETS_CACHE.",
        ) from error


def key(
    split: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int, *how: str
) -> str:
    """Return the same for the same texts, labels, tokenizer, length and ways only."""
    ways = (*how, _FORMAT)
    digest = hashlib.sha256(f"{datasets.__version__} {max_length} {tokenizer} {ways}".encode())
    digest.update(_identity(tokenizer))
    # The same rows are of the same batches, however they lie in files.
    for table in values.tables(split, _HASHED_AT_ONCE):
        # A batch may be of several chunks, and a slice of one: as Arrow writes it, it is neither.
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema.remove_metadata()) as stream:
            stream.write_table(table.replace_schema_metadata().combine_chunks())
        digest.update(sink.getvalue())
    return digest.hexdigest()[:32]


_identities: dict[str, bytes] = {}
"""The last answer of `_identity`, which each data set of a job asks for: of a vocabulary of 250,000
it is some seconds of work."""


def _identity(tokenizer: PreTrainedTokenizerBase) -> bytes:
    """Return what tells the rules and the vocabulary of a tokenizer apart from those of others."""
    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else "{}"
    known_by = hashlib.sha256(f"{type(tokenizer)} {tokenizer} {rules}".encode()).hexdigest()
    if known_by not in _identities or not tokenizer.is_fast:
        parts = json.loads(rules)
        # How it was called last, not what it is.
        parts |= {"truncation": None, "padding": None, "all": tokenizer.get_vocab()}
        _identities.clear()
        _identities[known_by] = json.dumps(parts, sort_keys=True).encode()
    return _identities[known_by]
