"""Writing a folder so that it is never seen half-written."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_ARRIVING = ".arriving-"


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A new folder to write to, whose entries become those of `target` when the block ends well.

    An entry of the same name is replaced, others stay. After an error, `target` has nothing of
    the new folder. `target` may be a mount point, as /opt/ml/model is in a mounted container.
    """
    target.mkdir(parents=True, exist_ok=True)
    # What a killed process left would be packed with the model.
    for left in (*target.glob(f"{_ARRIVING}*"), *target.parent.glob(f".{target.name}-*")):
        shutil.rmtree(left)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield aside
        _move_entries(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _move_entries(source: Path, target: Path) -> None:
    # Beside its final place first: across file systems a move is a copy, which may fail half-way.
    arriving = Path(tempfile.mkdtemp(prefix=_ARRIVING, dir=target))
    try:
        for entry in sorted(source.iterdir()):
            shutil.move(entry, arriving / entry.name)
        for entry in sorted(arriving.iterdir()):
            _replace(entry, target / entry.name)
    finally:
        shutil.rmtree(arriving, ignore_errors=True)


def _replace(entry: Path, place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    entry.replace(place)
