"""A folder of this user's own in the folder for temporary files, which others can write to."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def path() -> Path:
    """Where the folder is, or will be."""
    return Path(tempfile.gettempdir()) / f"amphora-{os.getuid()}"


def ensure() -> Path:
    """Make the folder, or check the one that is there, without following a link.

    Raises:
        OSError: It cannot be made; or PermissionError, it is a link or no folder, another user's,
            or others may write to it.
    """
    folder = path()
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        if not is_own or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(
                f"{folder} is not a folder that this user alone may write to"
            ) from None
    return folder
