"""Date what a step of an image build has made, so that building again gives the same layers.

    PYTHONHASHSEED=0 python3 dated.py BEGAN

BEGAN is a file that was made before the step. Modules are compiled once they are dated, one after
the other: a compiled file names its source's time, and the processes that make several at a time
would write them differently. So pip leaves them uncompiled.
"""

import os
import py_compile
import stat
import sys

SECONDS = 946684800  # 2000: before that, some tools refuse a time
NOT_IN_LAYERS = ("/dev", "/proc", "/sys")


def changed(began: str) -> dict[str, int]:
    """Return the modes of the paths in the root's file system that have changed since a file was
    made, sorted by path."""
    since, root = os.lstat(began).st_ctime_ns, os.lstat("/").st_dev
    modes: dict[str, int] = {}
    folders = ["/"]
    for folder in folders:  # which grows
        for entry in os.scandir(folder):
            status = entry.stat(follow_symlinks=False)
            if entry.path in NOT_IN_LAYERS or status.st_dev != root:
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            if status.st_ctime_ns >= since:
                modes[entry.path] = status.st_mode
    return dict(sorted(modes.items()))


def main() -> None:
    """Date the modules that the step has made, compile them, and date everything."""
    began = sys.argv[1]
    modules = [
        path for path, mode in changed(began).items() if stat.S_ISREG(mode) and path[-3:] == ".py"
    ]
    for path in modules:
        os.utime(path, (SECONDS, SECONDS))
        py_compile.compile(path, quiet=2)  # some are for other versions of Python
    paths = [*changed(began)]
    for path in paths:
        os.utime(path, (SECONDS, SECONDS), follow_symlinks=False)
    print(f"{len(paths)} paths are dated, {len(modules)} modules compiled.")


if __name__ == "__main__":
    main()
