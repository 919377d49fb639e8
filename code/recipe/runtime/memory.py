"""The memory of this host that may still be used."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from recipe.console import say
from recipe.errors import DataError

# The files with a container's limit and use, and the entry for page cache, which counts as used and
# is given back on demand: control groups of version 2, and of version 1.
_GROUPS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)

_M_ARENA_MAX = -8

_SHARE, _RESERVED = 0.9, 1 << 29
"""Of the free memory, what one file may take; and bytes that threads and allocators reserve without
using them, which the kernel counts too."""


def size(count: float) -> str:
    """Write a number of bytes in the largest unit that leaves a digit before the point."""
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if count >= 10**power:
            return f"{count / 10**power:.3g} {unit}"
    return f"{count:.0f} B"


def share_freed() -> None:
    """Let threads that begin from now on take what any thread has freed, where the C library is
    glibc: it else keeps freed memory apart for up to eight threads a core."""
    if sys.platform.startswith("linux"):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_ARENA_MAX, 1)


def available(
    host: Path = Path("/proc/meminfo"), groups: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Bytes that the host has left, or the container's limit, if that leaves less.

    Args:
        host: The kernel's table.
        groups: The folder of the control groups.

    Returns:
        None if neither can be read.
    """
    bounds: list[int] = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = dict(line.split(":", 1) for line in host.read_text().splitlines())
        bounds.append(int(lines["MemAvailable"].split()[0]) * 1024)
    for limit, used, cache in _GROUPS:
        # A file that is not there, or says "max", is not a limit.
        with contextlib.suppress(OSError, ValueError):
            most = int((groups / limit).read_text())
            stat = (groups / limit).with_name("memory.stat").read_text()
            cached = int(dict(line.split() for line in stat.splitlines()).get(cache, 0))
            bounds.append(most - int((groups / used).read_text()) + cached)
    return max(0, min(bounds)) if bounds else None


def tell_if_short(what: str, needed: int, remedy: str, free: int | None = None) -> None:
    """Say so before more memory is spent than there is: who is killed for that says nothing.

    Args:
        what: What takes it, in words that begin a sentence.
        needed: Bytes that it takes, about.
        remedy: What else can be done than to give more memory.
        free: Bytes that there are, if not those that there are now.
    """
    free = available() if free is None else free
    if free is not None and needed > free:
        say(
            f"warning: {what} takes some {needed / 1e9:.1f} GB of memory, where {free / 1e9:.1f} "
            f"GB are free: if the job is killed now, give it an instance with more, or {remedy}."
        )


@contextlib.contextmanager
def bounded(path: Path) -> Iterator[None]:
    """Let reading a file fail where memory ends, before the system kills the process.

    A small file may hold far more than its size: a compressed one, one value for many rows.

    Raises:
        DataError: The file takes more memory than is free.
    """
    free = available()
    if free is None:
        yield
        return
    before = soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    most = used + int(_SHARE * free) + _RESERVED
    most = min([most, *(limit for limit in before if limit != resource.RLIM_INFINITY)])
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        yield
    except MemoryError as error:
        raise DataError(
            f"{path} ({size(path.stat().st_size)}) takes more memory than the {size(free)} that "
            "are free.",
            "Check what it holds. Split it into several files, or give the job more memory.",
        ) from error
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
