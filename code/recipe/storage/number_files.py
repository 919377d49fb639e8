"""Write columns of numbers to files, completely or not at all, and memory-map them.

They are written into a folder of another name, which is renamed at the end. The folders of killed
writers are removed after an hour.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import shutil
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from recipe.errors import DataError

Column = npt.NDArray[Any]
_CONTENTS = "contents.json"
"""The file with the dtype and shape of each column."""
_UNFINISHED = ".unfinished"
_SILENT_SECONDS = 3600.0
"""Longest time without a change for a folder that is being written: rows are flushed every few
seconds."""


def write(folder: Path, parts: Iterable[Mapping[str, Column]]) -> None:
    """Write columns into the new folder `folder`.

    If another process created it in the meantime, that one is kept.

    Args:
        parts: Consecutive rows of the columns [rows, ...]. The dtype of a column is constant.

    Raises:
        OSError: The disk is full; `folder` does not exist.
    """
    contents: dict[str, tuple[str, list[int]]] = {}
    for left in folder.parent.glob(f"*{_UNFINISHED}"):
        # Another process may remove it at the same time, or it may be read-only.
        with contextlib.suppress(OSError):
            changed = max(path.stat().st_mtime for path in (left, *left.iterdir()))
            if time.time() - changed > _SILENT_SECONDS:
                shutil.rmtree(left)
    aside = folder.parent / f"{folder.name}.{uuid.uuid4().hex}{_UNFINISHED}"
    aside.mkdir()
    try:
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
                    # `tofile` raises an error without errno.
                    files[name].write(np.ascontiguousarray(column).reshape(-1).view(np.uint8).data)
                    shape[0] += len(column)
        (aside / _CONTENTS).write_text(json.dumps(contents))
        aside.replace(folder)
    except OSError as error:
        # Another process on this host was faster.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def read(folder: Path) -> dict[str, Column]:
    """Return the columns in `folder`, memory-mapped and shared by processes.

    Raises:
        DataError: A file is missing or has another size.
    """
    columns: dict[str, Column] = {}
    try:
        contents = json.loads((folder / _CONTENTS).read_text())
        for name, (kind, shape) in contents.items():
            path, dtype = folder / name, np.dtype(kind)
            if path.stat().st_size != math.prod(shape) * dtype.itemsize:
                raise ValueError(name)
            if not math.prod(shape):  # empty files cannot be mapped
                columns[name] = np.empty(shape, dtype)
                continue
            # A plain array: np.memmap objects are slow to slice.
            columns[name] = np.asarray(np.memmap(path, dtype, "r", shape=tuple(shape)))
    except (OSError, ValueError) as error:
        raise DataError(
            f"The number files in {folder} are incomplete: {error}.", "Remove that folder."
        ) from error
    return columns
