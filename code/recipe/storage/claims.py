"""Folders that are being written, and the removal of those whose writers are gone.

A writer holds a lock on a file beside its folder, which ends with it, however it ends. On a disk of
several hosts a lock may say something to its own host only, or nothing: what another host began is
given up after an hour without a change.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_MARK = ".writer"
_SILENT_SECONDS = 3600.0
"""Nothing that is being written is without a change for so long: rows go to the disk by thousands,
some seconds of work each time."""
_WITHOUT_MARK = re.compile(r"[0-9a-f]{32}\.(\w{8}|\d+)|tmp\w{8}")
"""What `datasets`, and versions of this package that knew no marks, leave when they are killed."""


@contextlib.contextmanager
def claimed(parent: Path, name: str) -> Iterator[Path]:
    """A new folder in `parent`, this process's own until the block ends, and removed then unless
    it was renamed. What writers of any name left there that are gone is removed before.

    Raises:
        OSError: the disk is full, or `parent` cannot be written to.
    """
    sweep(parent)
    with contextlib.ExitStack() as held:
        folder = _locked_folder(parent, name, held)
        folder.mkdir()
        held.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


def sweep(parent: Path) -> None:
    """Remove what was being written in `parent` by processes that are gone."""
    for mark in parent.glob(f"*{_MARK}"):
        folder = mark.with_suffix("")
        # Another process may sweep here too, and the folder may be one that is only read from.
        with contextlib.suppress(OSError), mark.open("rb") as file:
            is_here = file.read().decode(errors="replace") == socket.gethostname()
            has_lock = _locked(file, waits=False)
            if has_lock is False or not ((has_lock and is_here) or _is_silent(folder, mark)):
                continue
            shutil.rmtree(folder, ignore_errors=True)
            mark.unlink()
    for left in parent.iterdir():
        is_marked = left.with_name(left.name + _MARK).exists()
        if _WITHOUT_MARK.fullmatch(left.name) and not is_marked and _is_silent(left):
            with contextlib.suppress(OSError):
                shutil.rmtree(left) if left.is_dir() else left.unlink()


def _locked_folder(parent: Path, name: str, held: contextlib.ExitStack) -> Path:
    """A folder that is not there yet, with a mark beside it that `held` keeps locked."""
    while True:
        number, path = tempfile.mkstemp(prefix=f"{name}.", suffix=_MARK, dir=parent)
        mark = Path(path)
        file = held.enter_context(os.fdopen(number, "wb", buffering=0))
        held.callback(mark.unlink, missing_ok=True)
        _locked(file, waits=True)
        # Before it was locked, another process may have taken it for one that was left.
        with contextlib.suppress(FileNotFoundError):
            if mark.stat().st_ino == os.fstat(number).st_ino:
                file.write(socket.gethostname().encode())
                return mark.with_suffix("")


def _locked(file: IO[bytes], *, waits: bool) -> bool | None:
    """Whether the lock of a file is this process's now; None where the disk has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_silent(*paths: Path) -> bool:
    """Whether nothing of some files and folders has changed for long, or is there."""
    inner = (each for path in paths if path.is_dir() for each in path.iterdir())
    changed = [0.0]
    for path in (*paths, *inner):
        with contextlib.suppress(FileNotFoundError):
            changed.append(path.stat().st_mtime)
    return time.time() - max(changed) > _SILENT_SECONDS
