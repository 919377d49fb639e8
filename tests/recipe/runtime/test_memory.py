"""Memory that may be used, below a container's limit; and what glibc is told."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.runtime import memory
from tests.support.paths import CODE

GB = 1000**3


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "max\n"}, 32),
        (
            {"memory.max": f"{8 * GB}\n", "memory.current": f"{5 * GB}\n",
             "memory.stat": f"anon {3 * GB}\ninactive_file {2 * GB}\n"},
            5,
        ),
        (
            {"memory/memory.limit_in_bytes": f"{4 * GB}\n", "memory/memory.stat": "total_inactive_file 0\n",
             "memory/memory.usage_in_bytes": f"{1 * GB}\n"},
            3,
        ),
    ],
    ids=["no limit", "its cache is free", "control groups of version 1"],
)  # fmt: skip
def test_a_containers_limit_counts(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    host = tmp_path / "meminfo"
    host.write_text(f"MemTotal: {64 * GB // 1024} kB\nMemAvailable: {32 * GB // 1024} kB\n")
    (tmp_path / "memory").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert memory.available(host, tmp_path) == expected * GB
    assert memory.available(tmp_path / "none", tmp_path / "none") is None


def output_of(code: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(CODE)}
    command = [sys.executable, "-c", f"from recipe.runtime import memory\n{code}"]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
@pytest.mark.parametrize("is_shared", [True, False])
def test_threads_share_one_arena_of_freed_memory(is_shared: bool) -> None:
    output = output_of(f"""
import ctypes, threading
if {is_shared}:
    memory.share_freed()
together = threading.Barrier(8)
def allocate():
    kept = bytearray(10_000)
    together.wait(60)
threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
library = ctypes.CDLL(None)
library.malloc_info(0, ctypes.c_void_p.in_dll(library, "stdout"))
""")
    assert (output.count("<heap nr=") == 1) == is_shared


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_memory_that_is_kept_is_not_mapped_again() -> None:
    faults = [
        int(
            output_of(f"""
import resource
if {keeps}:
    memory.keep_freed()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    memoryview(bytearray(40_000_000))[::4096].tolist()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
""")
        )
        for keeps in (True, False)
    ]
    # The heap grows a few times until such a block fits between what else lies on it.
    assert faults[0] < faults[1] / 3


@pytest.mark.parametrize(("count", "shown"), [(12, "12 B"), (4_200, "4.2 kB"), (1.5e10, "15 GB")])
def test_a_size_is_never_zero_of_a_large_unit(count: float, shown: str) -> None:
    assert memory.size(count) == shown
