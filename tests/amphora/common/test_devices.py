"""Devices found by the tools that list them; stand-ins for the tools, since none are here."""

import os
from pathlib import Path

import pytest

from amphora.common import devices


def tool(folder: Path, name: str, output: str = "", code: int = 0) -> dict[str, str]:
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\nexit {code}\n")
    path.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_no_tools_is_a_cpu(tmp_path: Path) -> None:
    detected = devices.detect({"PATH": str(tmp_path)})
    assert (detected.kind, detected.accelerators) == ("cpu", 0)
    assert detected.cpus == len(os.sched_getaffinity(0)) or detected.cpus >= 1
    assert "no nvidia-smi; no neuron-ls" in detected.reason


def test_a_driver_that_fails_is_no_gpu(tmp_path: Path) -> None:
    assert devices.detect(tool(tmp_path, "nvidia-smi", "failed", 9)).kind == "cpu"


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "20000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "", "cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_a_quota_limits_the_cpus(tmp_path: Path, files: dict[str, str], limit: int | None) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    local = len(os.sched_getaffinity(0))
    assert devices.usable_cpus(tmp_path) == (min(local, limit) if limit else local)
