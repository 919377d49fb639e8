"""Columns of numbers in a folder of files: written bit by bit, whole or not at all, and mapped."""

from __future__ import annotations

import contextlib
import errno
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from recipe.errors import DataError
from recipe.storage import claims

Column = npt.NDArray[Any]
_CONTENTS = "contents.json"
"""The file that says of what kind, and how many, the numbers of each other file are."""


def write(folder: Path, parts: Iterable[Mapping[str, Column]]) -> None:
    """Write columns into `folder`, which is there afterwards and was not before, or was written by
    another process in the meantime.

    Args:
        parts: Rows of columns [rows, ...], which go behind those before. A column has one kind.

    Raises:
        OSError: the disk is full; nothing stays of `folder`.
    """
    contents: dict[str, tuple[str, list[int]]] = {}
    with claims.claimed(folder.parent, folder.name) as aside:
        with contextlib.ExitStack() as stack:
            files: dict[str, IO[bytes]] = {}
            for part in parts:
                for name, column in part.items():
                    if name not in files:
                        files[name] = stack.enter_context((aside / name).open("wb"))
                        contents[name] = column.dtype.str, [0, *column.shape[1:]]
                    kind, shape = contents[name]
                    if (column.dtype.str, [*column.shape[1:]]) != (kind, shape[1:]):
                        raise TypeError(f"{name}: {column.dtype} {column.shape} after {kind}")
                    # Not `tofile`, whose error does not say that the disk is full.
                    files[name].write(np.ascontiguousarray(column).reshape(-1).view(np.uint8).data)
                    shape[0] += len(column)
        (aside / _CONTENTS).write_text(json.dumps(contents))
        try:
            aside.replace(folder)
        except OSError as error:
            # Another process on this host was quicker.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise


def read(folder: Path) -> dict[str, Column]:
    """The columns in `folder`, mapped: processes share them, and the system takes back their
    memory where it is short.

    Raises:
        DataError: a file is missing, or not as long as it was.
    """
    columns: dict[str, Column] = {}
    try:
        contents = json.loads((folder / _CONTENTS).read_text())
        for name, (kind, shape) in contents.items():
            path, dtype = folder / name, np.dtype(kind)
            if path.stat().st_size != math.prod(shape) * dtype.itemsize:
                raise ValueError(name)
            if not math.prod(shape):  # which cannot be mapped
                columns[name] = np.empty(shape, dtype)
                continue
            # A plain array: NumPy's own class of maps is slow to slice.
            columns[name] = np.asarray(np.memmap(path, dtype, "r", shape=tuple(shape)))
    except (OSError, ValueError) as error:
        raise DataError(
            f"The numbers kept in {folder} are not whole: {error}.", "Remove that folder."
        ) from error
    return columns
