"""The memory of this host that may still be used."""

from __future__ import annotations

import contextlib
from pathlib import Path

# The files with a container's limit and use, and the entry for page cache, which counts as used and
# is given back on demand: control groups of version 2, and of version 1.
_GROUPS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


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
