"""Memory that may be used, below a container's limit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.runtime import memory
from tests.support.paths import CODE

GB = 1000**3


def host(folder: Path) -> Path:
    file = folder / "meminfo"
    file.write_text(f"MemTotal: {64 * GB // 1024} kB\nMemAvailable: {32 * GB // 1024} kB\n")
    return file


def test_without_a_limit_the_host_decides(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available(host(tmp_path), tmp_path) == 32 * GB


def test_a_containers_limit_counts_its_cache_as_free(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{8 * GB}\n")
    (tmp_path / "memory.current").write_text(f"{5 * GB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {3 * GB}\ninactive_file {2 * GB}\n")
    assert memory.available(host(tmp_path), tmp_path) == 5 * GB


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(f"{4 * GB}\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text(f"{1 * GB}\n")
    (tmp_path / "memory" / "memory.stat").write_text("total_inactive_file 0\n")
    assert memory.available(host(tmp_path), tmp_path) == 3 * GB


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
@pytest.mark.parametrize("is_shared", [True, False])
def test_threads_share_one_arena_of_freed_memory(is_shared: bool) -> None:
    code = f"""
import ctypes, threading
from recipe.runtime import memory
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
"""
    environ = {**os.environ, "PYTHONPATH": str(CODE)}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert (run.stdout.count("<heap nr=") == 1) == is_shared


def test_nothing_to_read(tmp_path: Path) -> None:
    assert memory.available(tmp_path / "none", tmp_path) is None


@pytest.mark.parametrize(
    ("count", "shown"), [(12, "12 B"), (4_200, "4.2 kB"), (85_000_000, "85 MB"), (1.5e10, "15 GB")]
)
def test_a_size_is_never_zero_of_a_large_unit(count: float, shown: str) -> None:
    assert memory.size(count) == shown
