"""Data sets of texts to data sets of token ids."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from transformers import PreTrainedTokenizerBase

from recipe.batching.samples import Samples, column
from recipe.data.column_names import LABEL, PAIR, TEXT, TOKEN_IDS, TYPE_IDS
from recipe.errors import DataError, OutputError
from recipe.tokenization.encoding import Encoder, encode, encode_pairs

_WORTH_PROCESSES = 10_000
_AT_ONCE = 10_000
_STARTS = "starts"
_KINDS: Mapping[str, Any] = {TOKEN_IDS: np.int32, _STARTS: np.int64, TYPE_IDS: np.int8}
"""The files of a store, each of numbers one after the other, and their kinds."""


def samples(
    split: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> Samples:
    """The samples of a data set of `text` and `label`, or of pairs, as `tokenise` makes them.

    Where the tokenizer is one in Rust, tokens go from it into a folder of the cache of data sets,
    some rows at a time, and are read from there: all processes of a host map one file, and a job
    that is started again finds it. Tables of Python lists never hold them.

    Raises:
        DataError: data that came tokenised was made for another tokenizer.
        OutputError: there is no room for the tokens.
    """
    if not len(split) or TEXT not in split.column_names or not tokenizer.is_fast:
        return Samples.of(tokenise(split, tokenizer, max_length))
    kept = _tokens() / key(split, tokenizer, max_length, "store")
    if not kept.is_dir():
        with _room(kept.parent, len(split)):
            _write(kept, split, Encoder(tokenizer, max_length))
    arrays = {name: _mapped(kept / name, kind) for name, kind in _KINDS.items()}
    token_ids, starts = arrays[TOKEN_IDS], arrays[_STARTS]
    types = arrays[TYPE_IDS]
    if (
        token_ids is None
        or starts is None
        or len(starts) != len(split) + 1
        or int(starts[-1]) != len(token_ids)
        or (types is not None and len(types) != len(token_ids))
    ):
        raise DataError(f"The tokens in {kept} are not whole.", "Remove that folder.")
    return Samples(token_ids, starts, column(split, LABEL), types=types)


def _write(folder: Path, split: datasets.Dataset, encoder: Encoder) -> None:
    """Write the store of a data set, whole or not at all."""
    names = [name for name in (TEXT, PAIR) if name in split.column_names]
    aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        with contextlib.ExitStack() as stack:
            files = {name: stack.enter_context((aside / name).open("wb")) for name in _KINDS}
            end = 0
            np.zeros(1, np.int64).tofile(files[_STARTS])
            for table in split.select_columns(names).with_format("arrow").iter(_AT_ONCE):
                ids, types, lengths = encoder.encode(*(table[name].to_pylist() for name in names))
                ids.tofile(files[TOKEN_IDS])
                if types is not None:
                    types.tofile(files[TYPE_IDS])
                ends = end + np.cumsum(lengths)
                ends.tofile(files[_STARTS])
                end = int(ends[-1])
        if not (aside / TYPE_IDS).stat().st_size:
            (aside / TYPE_IDS).unlink()
        try:
            aside.replace(folder)
        except OSError as error:
            # Another process on this host was quicker.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _mapped(path: Path, kind: Any) -> Any:
    """The numbers of a file; None where there is none."""
    if not path.exists():
        return None
    if not path.stat().st_size:  # which cannot be mapped
        return np.empty(0, dtype=kind)
    # A plain array: NumPy's own class of maps is slow to slice.
    return np.asarray(np.memmap(path, dtype=kind, mode="r"))


def tokenise(
    split: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> datasets.Dataset:
    """A data set of `input_ids` (not padded) and `label` from one of `text` and `label`.

    From one of pairs (`text` and `text_pair`) with `token_type_ids`, where the tokenizer has them.

    Kept in the cache of data sets (HF_DATASETS_CACHE), so that of several processes on a host the
    first one tokenises and the others read; so does a job that is started again. A tokenizer in
    Rust uses every core by itself, one in Python gets a process for each. Data that came tokenised
    is only cut.

    Raises:
        DataError: data that came tokenised was made for another tokenizer.
        OutputError: there is no room for the tokens.
    """
    if not len(split):  # the rows of this host of several
        return split
    if TEXT not in split.column_names:
        return _cut(split, tokenizer, max_length)
    in_python = not tokenizer.is_fast and len(split) > _WORTH_PROCESSES
    texts = [name for name in (TEXT, PAIR) if name in split.column_names]

    def make(batch: Mapping[str, Any]) -> dict[str, Any]:
        if len(texts) == 1:
            return {TOKEN_IDS: encode(tokenizer, batch[TEXT], max_length)}
        ids, types = encode_pairs(tokenizer, batch[TEXT], batch[PAIR], max_length)
        return {TOKEN_IDS: ids} if types is None else {TOKEN_IDS: ids, TYPE_IDS: types}

    return cached(
        split,
        key(split, tokenizer, max_length),
        make,
        num_proc=len(os.sched_getaffinity(0)) if in_python else None,
        remove_columns=texts,
    )


def cached(
    split: datasets.Dataset, key: str, make: Callable[..., Mapping[str, Any]], **options: Any
) -> datasets.Dataset:
    """What `make` makes of the batches of `split`, read from the cache where it is there.

    Args:
        key: What the result is kept by.
        options: Further arguments of Dataset.map.
    """
    folder = _tokens()
    with _room(folder, len(split)):
        return split.map(
            make,
            batched=True,
            new_fingerprint=key,
            cache_file_name=str(folder / f"{key}.arrow"),
            load_from_cache_file=True,
            **options,
        )


def _tokens() -> Path:
    """The folder that tokens are kept in."""
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "tokens"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def _room(folder: Path, rows: int) -> Iterator[None]:
    """Says what to do where writing the tokens of so many rows finds the disk full."""
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
    """The same for the same texts, labels, tokenizer, length and ways only."""
    digest = hashlib.sha256(f"{datasets.__version__} {max_length} {tokenizer} {how}".encode())
    parts = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {}
    # How it was called last, not what it is.
    parts |= {"truncation": None, "padding": None, "all": tokenizer.get_vocab()}
    digest.update(json.dumps(parts, sort_keys=True).encode())
    for table in split.with_format("arrow").iter(_AT_ONCE):
        # A batch may be of several chunks, and a slice of one: as Arrow writes it, it is neither.
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema.remove_metadata()) as stream:
            stream.write_table(table.replace_schema_metadata().combine_chunks())
        digest.update(sink.getvalue())
    return digest.hexdigest()[:32]


def _cut(
    split: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> datasets.Dataset:
    rows = split[TOKEN_IDS][:]
    check_ids(rows, tokenizer)
    for name in (TOKEN_IDS, TYPE_IDS):
        if name in split.column_names:
            cell_rows = split[name][:]
            if list(map(len, cell_rows)) != list(map(len, rows)):
                raise DataError(f"In some rows {name} and {TOKEN_IDS} are not of one length.")
            # The last token is the closing special token, which the model was trained to see.
            cut = [
                row if len(row) <= max_length else [*row[: max_length - 1], row[-1]]
                for row in cell_rows
            ]
            split = split.remove_columns(name).add_column(name, cut)
    return split


def check_ids(rows: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase) -> None:
    """See that data that came tokenised can be `tokenizer`'s.

    Raises:
        DataError: a row has no tokens, or one that the tokenizer has not.
    """
    empty = next((number for number, row in enumerate(rows) if not len(row)), None)
    if empty is not None:
        raise DataError(f"Row {empty} of the data that came tokenised has no tokens.", "Remove it.")
    largest = max(max(row) for row in rows)
    if largest >= len(tokenizer):
        raise DataError(
            f"The data came tokenised and has the token id {largest}, but the model's tokenizer "
            f"has {len(tokenizer)} tokens.",
            "Tokenise it with the model's own tokenizer, or give the texts.",
        )
