"""Whether rows have room on this host, which is said before they are read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import datasets

from recipe.data.files import head
from recipe.errors import OutputError
from recipe.runtime import memory
from recipe.storage import atomic

_TIMES_BYTES, _TIMES_PARQUET = 16, 1_000
"""Files that take less than what is free, if each byte of them took so many, are not looked at;
those of Parquet have a value that comes often once."""
_TIMES_LESS = 4
"""Rows may take less than the first ones suggest: of columns that are filled there only."""
_LOOKED_AT = 8


def check(files: Iterable[Path], notes: list[str]) -> None:
    """See that the rows of some files have room on the disk of the cache, or else in memory, where
    each process of this host has its own.

    Args:
        notes: What is uncertain is added to it.

    Raises:
        OutputError: they take more than both together, even if the first rows are the longest by
            far.
    """
    sizes = {path: path.stat().st_size for path in files if path.is_file()}
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    folder = Path(datasets.config.HF_DATASETS_CACHE)
    disk, there = atomic.free_bytes(folder), memory.available()
    most = sum(
        size * (_TIMES_PARQUET if path.suffix == ".parquet" else _TIMES_BYTES)
        for path, size in sizes.items()
    )
    if there is None or most * processes < disk + there:
        return
    largest = sorted(sizes, key=lambda path: sizes[path], reverse=True)[:_LOOKED_AT]
    told = {path: rows for path in largest if (rows := head.bytes_of_rows(path)) is not None}
    if not told:
        return
    # Files are taken for alike; of those that cannot be told nothing is said.
    like = {path.suffix for path in told}
    whole = sum(size for path, size in sizes.items() if path.suffix in like)
    needed = int(sum(told.values()) / sum(sizes[path] for path in told) * whole) * processes
    if needed <= disk + there:
        return
    each = f", once for each of {processes} processes" if processes > 1 else ""
    what = (
        f"The rows of {len(sizes)} files ({whole / 1e9:.2f} GB) take some {needed / 1e9:.2f} GB"
        f"{each}, as their first rows suggest, where {folder} has {disk / 1e9:.2f} GB free and "
        f"memory {there / 1e9:.2f} GB"
    )
    remedy = (
        "Give the job a larger volume, or name a folder on another one in HF_DATASETS_CACHE. A "
        "script of your own can read larger data by datasets' IterableDataset."
    )
    if needed > _TIMES_LESS * (disk + there):
        raise OutputError(f"{what}.", remedy)
    notes.append(f"warning: {what}: it may end for want of room. {remedy}")
