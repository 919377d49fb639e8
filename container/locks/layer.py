"""Runs one step of an image's build so that equal inputs make an equal layer.

    python3 layer.py 'COMMANDS OF sh'

A layer holds each file with the time at which it was written, and Python's compiled modules hold
the time of their source. So pip leaves compiling to this program, which gives all that the commands
wrote, and the folders of it, one date, and then compiles what came to Python's packages. What a
step reads stands under /dev, which is in no layer: elsewhere a mount point stays behind, with the
time of the build.

A file of the base that a step removes is beyond this program: the mark that stands for it in the
layer has the time of the removal. Runs in image builds: Python's standard library only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

DATE = 315619200
"""1980-01-02: a day above what a zip archive can hold at least, for clocks west of Greenwich."""
SETTINGS = {
    "CFLAGS": "-g0",  # debugging symbols name the folder of the build
    "PIP_CACHE_DIR": "/dev/pip",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_COMPILE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "SOURCE_DATE_EPOCH": str(DATE),
}
CLOCK_REALTIME_COARSE = 5
"""The clock of Linux by which file systems date."""
COMPILE = """
import py_compile, sys
by_date = py_compile.PycInvalidationMode.TIMESTAMP
for path in sys.stdin.read().split("\\0"):
    try:
        py_compile.compile(path, doraise=True, invalidation_mode=by_date)
    except (py_compile.PyCompileError, ValueError, RecursionError):
        pass  # a template, or a bad example of a package's tests
"""


def run(command: str, root: str = "/", packages: Iterable[str] = ()) -> int:
    """Run a step, and make even what it wrote.

    Args:
        command: For `sh`; it ends with the first command that fails.
        root: The folder in which it may write.
        packages: Folders whose modules are compiled; if empty, those of this Python.

    Returns:
        The exit status of the command.
    """
    since = time.clock_gettime_ns(CLOCK_REALTIME_COARSE)
    step = subprocess.run(["sh", "-euc", command], env={**os.environ, **SETTINGS}, check=False)
    if step.returncode:
        return step.returncode
    files = list(written(root, since))
    date(files)
    folders = tuple(f"{os.path.realpath(path)}/" for path in packages or _packages())
    _compile(path for path in files if path.endswith(".py") and path.startswith(folders))
    date(written(root, since))
    return 0


def written(root: str, since: int) -> Iterator[str]:
    """What lies below `root` and was written then or later (ns), sorted; no mount.

    By the time of the change, which no program sets, as pip and cp do set that of the content.
    """
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    apart = {line.split()[4] for line in mounts} - {root}
    folders, paths = [root], [root]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.path not in apart:
                    paths.append(entry.path)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
    return (path for path in sorted(paths) if os.lstat(path).st_ctime_ns >= since)


def date(paths: Iterable[str]) -> None:
    for path in paths:
        os.utime(path, (DATE, DATE), follow_symlinks=False)


def _compile(paths: Iterable[str]) -> None:
    """Compile modules in one process and in this order: what it compiled before shows in the bytes.

    By the date of the source and not by its hash alone, so that a module which somebody edits in a
    container is read anew.
    """
    names = "\0".join(paths)
    if names:
        command = [sys.executable, "-S", "-W", "ignore", "-c", COMPILE]
        settings = {**os.environ, "PYTHONHASHSEED": "0"}
        subprocess.run(command, input=names, text=True, env=settings, check=True)


def _packages() -> set[str]:
    return {sysconfig.get_path(name) for name in ("purelib", "platlib")}


if __name__ == "__main__":
    sys.exit(run(sys.argv[1]))
