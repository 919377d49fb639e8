"""Mark folders that are being written, and remove those whose writers have died.

A writer locks a file next to its folder; the lock ends with the process. On a disk shared by hosts,
locks may be visible on one host only or not at all, so folders of other hosts are removed after an
hour without a change.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_MARK = ".writer"
_SILENT_SECONDS = 3600.0
"""Longest time without a change for a folder that is being written: rows are flushed every few
seconds."""


@contextlib.contextmanager
def claimed(parent: Path, name: str) -> Iterator[Path]:
    """Yield a new folder in `parent`, which is removed at the end unless the block renames it.

    Folders of writers that have died are removed first.

    Raises:
        OSError: The disk is full, or `parent` cannot be written to.
    """
    sweep(parent)
    with contextlib.ExitStack() as held:
        is_locked = False
        while not is_locked:
            number, path = tempfile.mkstemp(prefix=f"{name}.", suffix=_MARK, dir=parent)
            mark = Path(path)
            file = held.enter_context(os.fdopen(number, "wb", buffering=0))
            held.callback(mark.unlink, missing_ok=True)
            _locked(file, waits=True)
            # Another process may have removed the mark before it was locked.
            with contextlib.suppress(FileNotFoundError):
                is_locked = mark.stat().st_ino == os.fstat(number).st_ino
        file.write(socket.gethostname().encode())
        folder = mark.with_suffix("")
        folder.mkdir()
        held.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


def sweep(parent: Path) -> None:
    """Remove unfinished folders in `parent` whose writers have died."""
    for mark in parent.glob(f"*{_MARK}"):
        folder = mark.with_suffix("")
        # Another process may sweep at the same time, or the folder may be read-only.
        with contextlib.suppress(OSError), mark.open("rb") as file:
            is_here = file.read().decode(errors="replace") == socket.gethostname()
            has_lock = _locked(file, waits=False)
            if has_lock is False or not ((has_lock and is_here) or _is_silent(folder, mark)):
                continue
            shutil.rmtree(folder, ignore_errors=True)
            mark.unlink()


def _locked(file: IO[bytes], *, waits: bool) -> bool | None:
    """Return whether this process got the lock; None if the disk has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_silent(*paths: Path) -> bool:
    """Return whether none of the paths has changed within `_SILENT_SECONDS`."""
    inner = (entry for path in paths if path.is_dir() for entry in path.iterdir())
    changed = [0.0]
    for path in (*paths, *inner):
        with contextlib.suppress(FileNotFoundError):
            changed.append(path.stat().st_mtime)
    return time.time() - max(changed) > _SILENT_SECONDS
