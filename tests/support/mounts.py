"""File systems of a few kilobytes, really mounted, to fill a disk."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

Mount = Callable[..., Path]


def mounted(*command: str) -> bool:
    """Whether a command of mount or umount succeeds."""
    return subprocess.run(command, capture_output=True).returncode == 0


@contextmanager
def mounting(base: Path) -> Iterator[Mount]:
    """Yield a function that mounts a file system of so many kilobytes in a folder below `base`."""
    with ExitStack() as stack:

        def mount(name: str, kilobytes: int, options: str = "rw") -> Path:
            folder = base / name
            folder.mkdir(parents=True)
            size = f"size={kilobytes}k,{options}"
            if not mounted("mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)):
                pytest.skip("file systems cannot be mounted here: that takes root's rights")
            # Lazily: a writer that failed may have its file open yet.
            stack.callback(mounted, "umount", "--lazy", str(folder))
            return folder

        yield mount
