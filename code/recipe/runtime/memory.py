"""Measure and limit the memory of this host."""

from __future__ import annotations

import contextlib
import ctypes
import resource
from collections.abc import Iterator
from pathlib import Path

from recipe.errors import DataError

# Files with the limit and the use of a container, and the entry for the page cache, which counts as
# used but is reclaimed on demand: control groups of version 2 and of version 1.
_GROUPS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8

_SHARE, _RESERVED = 0.9, 1 << 29
"""Share of the free memory that one file may take; and bytes that threads and allocators reserve
without using them, which the kernel counts."""


def size(count: float) -> str:
    """Format a number of bytes with a suitable unit."""
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if count >= 10**power:
            return f"{count / 10**power:.3g} {unit}"
    return f"{count:.0f} B"


def share_freed() -> None:
    """Let future threads share one arena of glibc, so that they reuse memory freed by any thread.

    By default, glibc has up to eight arenas for each core.
    """
    _set_malloc((_M_ARENA_MAX, 1))


def keep_freed() -> None:
    """Let glibc keep freed memory for the next step.

    By default it maps and unmaps each gradient of an embedding again, 4 kB at a time, which costs a
    fifth of a step of packed tweets (docs/LAB.md).
    """
    _set_malloc((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, (1 << 31) - 1))


def _set_malloc(*parameters: tuple[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    if mallopt is not None:
        for parameter in parameters:
            mallopt(*parameter)


def available(
    host: Path = Path("/proc/meminfo"), groups: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return the bytes available on this host, or within the container's limit if that is less;
    None if neither can be read."""
    bounds: list[int] = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = dict(line.split(":", 1) for line in host.read_text().splitlines())
        bounds.append(int(lines["MemAvailable"].split()[0]) * 1024)
    for limit, used, cache in _GROUPS:
        # If the file is missing or contains "max", there is no limit.
        with contextlib.suppress(OSError, ValueError):
            most = int((groups / limit).read_text())
            stat = (groups / limit).with_name("memory.stat").read_text()
            cached = int(dict(line.split() for line in stat.splitlines()).get(cache, 0))
            bounds.append(most - int((groups / used).read_text()) + cached)
    return max(0, min(bounds)) if bounds else None


@contextlib.contextmanager
def bounded(path: Path) -> Iterator[None]:
    """Limit the memory of the block, so that reading a file raises DataError before the process is
    killed.

    A small file may expand to far more than its size: compressed text, or one value for many rows.
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
            "Check its contents. Split it into several files, or use an instance with more memory.",
        ) from error
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
