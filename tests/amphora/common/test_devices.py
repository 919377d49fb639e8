"""Devices found by the tools that list them, and drivers. No device is here: stand-ins print what AWS's
neuron-ls guide (trn2, Neuron 2.28) and published outputs show; a libcuda.so.1 is compiled."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from amphora.common import cuda, devices, neuron_cores, probe
from amphora.common.errors import ConfigError
from amphora.contract.job import Paths, read_job
from amphora.contract.sm_variables import sm_variables
from amphora.training import launch
from amphora.training.entry_point import Program, ProgramKind
from tests.support.job_tree import Tree
from tests.support.neuron_devices import device, neuron_ls, printing, trn1

Host = Callable[..., dict[str, str]]


def tool(folder: Path, name: str, output: str = "", code: int = 0) -> dict[str, str]:
    """A program that prints; return the variables with which it is found."""
    (folder / name).write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\nexit {code}\n")
    (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_no_tool_or_one_that_fails_is_a_cpu(tmp_path: Path) -> None:
    detected = devices.detect({"PATH": str(tmp_path)})
    assert (detected.kind, detected.accelerators) == ("cpu", 0)
    assert detected.cpus == len(os.sched_getaffinity(0)) or detected.cpus >= 1
    assert "no nvidia-smi; no neuron-ls" in detected.reason
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


def trn2(count: int, lnc: int, kind: str) -> list[dict[str, Any]]:
    reported = {"instance_type": kind, "instance_id": "i-0", "logical_neuroncore_config": lnc}
    return [device(number, 8 // lnc, 103079215104, **reported) for number in range(count)]


@pytest.fixture(autouse=True)
def no_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /dev of this test's own."""
    monkeypatch.setattr(neuron_cores, "_DEV", tmp_path / "dev")
    monkeypatch.setattr(neuron_cores, "_NEURON_TOOLS", str(tmp_path / "opt"))
    (tmp_path / "dev").mkdir()
    return tmp_path / "dev"


@pytest.mark.parametrize(
    ("listing", "environ", "cores", "says"),
    [
        (trn1(1), {}, 2, "2 Neuron cores"),
        (trn1(16), {}, 32, "32 Neuron cores"),
        (trn1(1), {"NEURON_LOGICAL_NC_CONFIG": "1"}, 2, "2 Neuron cores"),
        (trn2(1, 2, "trn2.3xlarge"), {}, 4, "4 logical Neuron cores at LNC 2"),
        (trn2(16, 1, "trn2.48xlarge"), {"NEURON_LOGICAL_NC_CONFIG": "1"}, 128, "at LNC 1"),
        (trn2(16, 2, "trn2.48xlarge"), {"NEURON_LOGICAL_NC_CONFIG": "1"}, 128, "at LNC 1"),
        (trn2(1, 1, "trn2.3xlarge"), {}, 8, "8 logical Neuron cores at LNC 1"),
    ],
)  # fmt: skip
def test_cores_are_counted_as_the_runtime_counts_them(
    tmp_path: Path, listing: list[dict[str, Any]], environ: dict[str, str], cores: int, says: str
) -> None:
    detected = devices.detect(printing(tmp_path, listing) | environ)
    assert (detected.kind, detected.accelerators, detected.neuron_cores) == ("neuron", cores, cores)
    assert says in detected.reason


@pytest.mark.parametrize(
    ("environ", "cores"),
    [
        ({"NEURON_RT_VISIBLE_CORES": "0-3"}, 4),
        ({"NEURON_RT_VISIBLE_CORES": "31"}, 1),
        ({"NEURON_RT_VISIBLE_CORES": "0,2, 8-9"}, 4),
        ({"NEURON_RT_NUM_CORES": "8"}, 8),
        ({"NEURON_RT_NUM_CORES": "0"}, 32),
        # The runtime's own rule: the list takes precedence over the number.
        ({"NEURON_RT_VISIBLE_CORES": "4-5", "NEURON_RT_NUM_CORES": "8"}, 2),
    ],
)
def test_the_users_choice_of_cores_is_honoured(
    tmp_path: Path, tree: Tree, environ: dict[str, str], cores: int
) -> None:
    detected = devices.detect(printing(tmp_path, trn1(16)) | environ)
    assert detected.accelerators == cores
    # As in SageMaker's toolkit: all cores, also those that the job may not use.
    job = read_job({"SAGEMAKER_BASE_DIR": str(tree.configure().base)})
    assert sm_variables(job, detected, {})["SM_NUM_NEURONS"] == "32"
    assert next(iter(environ)) in detected.reason or cores == 32


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NEURON_RT_VISIBLE_CORES", "3-0"),
        ("NEURON_RT_VISIBLE_CORES", "0,0"),
        ("NEURON_RT_VISIBLE_CORES", "0-"),
        ("NEURON_RT_VISIBLE_CORES", "all"),
        ("NEURON_RT_VISIBLE_CORES", "0-99999999999"),
        ("NEURON_RT_VISIBLE_CORES", "30-32"),
        ("NEURON_RT_NUM_CORES", "33"),
        ("NEURON_RT_NUM_CORES", "-1"),
        ("NEURON_RT_NUM_CORES", "two"),
    ],
)
def test_a_choice_that_cannot_be_is_named(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is '?{value}'?"):
        devices.detect(printing(tmp_path, trn1(16)) | {name: value})


def test_logical_cores_are_counted_by_the_tool_where_aws_puts_it(tmp_path: Path) -> None:
    listing = printing(tmp_path, trn2(1, 2, "trn2.3xlarge"))
    assert devices.detect(listing | {"NEURON_RT_VISIBLE_CORES": "0-3"}).accelerators == 4
    with pytest.raises(ConfigError, match="NEURON_RT_VISIBLE_CORES is '4'"):
        devices.detect(listing | {"NEURON_RT_VISIBLE_CORES": "4"})
    (tmp_path / "opt").mkdir()
    printing(tmp_path, trn1(1))
    (tmp_path / "neuron-ls").rename(tmp_path / "opt" / "neuron-ls")
    assert devices.detect({"PATH": "/usr/bin:/bin"}).neuron_cores == 2


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (None, "no neuron-ls"),
        ("echo 'error: no neuron device found' >&2; exit 1", "no neuron device found"),
        ("exit 3", "exit code 3"),
        ("exec sleep 60", "does not answer"),
        # Neuron 2.34 ends this option; the format in its place was not documented yet.
        ("echo 'unknown flag: -j' >&2; exit 2", "unknown flag: -j"),
    ],
)
def test_a_tool_that_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_devices: Path, script: str | None, says: str
) -> None:
    # Only the one that says nothing is to be given up.
    monkeypatch.setattr(probe, "PROBE_SECONDS", 0.3 if says == "does not answer" else 60)
    environ = {"PATH": "/usr/bin:/bin"} if script is None else neuron_ls(tmp_path, script)
    detected = devices.detect(environ)
    assert detected.kind == "cpu" and says in detected.reason
    given = devices.detect(environ | {"SM_NUM_NEURONS": "2", "NEURON_RT_NUM_CORES": "1"})
    assert (given.kind, given.accelerators) == ("neuron", 1) and says in given.reason
    (no_devices / "neuron0").touch()
    with pytest.raises(ConfigError, match=rf"neuron0\), but .*{says}.*set SM_NUM_NEURONS"):
        devices.detect(environ)


@pytest.mark.parametrize(
    "printed", ["no json", "{}", '{"a": 1}', "[1]", '[{"nc_count": "x"}]', "[{}]", "null", ""]
)
def test_garbage_is_an_error_that_names_the_tool(tmp_path: Path, printed: str) -> None:
    (tmp_path / "listing").write_text(printed)
    with pytest.raises(
        ConfigError, match=r"neuron-ls -j` printed something .* driver and tools fit"
    ):
        devices.detect(neuron_ls(tmp_path, f"cat {tmp_path}/listing"))


def library(folder: Path, version: int, init: int = 0, name: str = "libcuda.so.1") -> None:
    """Compile a driver library as CUDA's: it tells its version, and counts as CUDA_VISIBLE_DEVICES says."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cuda.c").write_text("""
#include <stdlib.h>
#include <string.h>
int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
static int shown(void) {
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    if (!text) return 2;
    return *text == 0 || *text == '-' ? 0 : strchr(text, ',') ? 2 : 1;
}
int cuInit(unsigned flags) { return INIT ? INIT : shown() ? 0 : 100; }
int cuDeviceGetCount(int *count) { *count = shown(); return 0; }
""")
    values = ["-shared", "-fPIC", f"-DVERSION={version}", f"-DINIT={init}"]
    subprocess.run(["cc", *values, "-o", folder / name, folder / "cuda.c"], check=True)


def bring(tmp_path: Path, version: int, init: int = 0) -> None:
    """The compatibility libraries of driver 580.65.06, linked as NVIDIA's package links them."""
    library(tmp_path / "compat", version, init, "libcuda.so.580.65.06")
    (tmp_path / "compat" / "libcuda.so.1").symlink_to("libcuda.so.580.65.06")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """host(driver, torch): the variables of a host with such a driver, and of an image's torch."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    monkeypatch.setattr(cuda, "COMPAT", tmp_path / "compat")
    monkeypatch.setattr(cuda, "_DEV", tmp_path / "dev")

    def environ(driver: str = "535.161.08", torch: str = "'13.0'") -> dict[str, str]:
        path = tool(tmp_path, "nvidia-smi", f"{driver}\n{driver}", 0 if driver else 9)["PATH"]
        package = tmp_path / "packages" / "torch"
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text("raise AssertionError('torch must not be imported')")
        (package / "version.py").write_text(f"cuda: str | None = {torch}\nhip = None\n")
        libraries = {"PYTHONPATH": str(package.parent), "LD_LIBRARY_PATH": str(tmp_path / "driver")}
        return {"PATH": path, **libraries}

    return environ


def test_a_driver_that_is_new_enough_takes_no_compatibility_libraries(
    host: Host, tmp_path: Path
) -> None:
    library(tmp_path / "driver", 13000)
    detected = devices.detect(host("580.65.06"))
    assert (detected.kind, detected.accelerators, dict(detected.variables)) == ("cuda", 2, {})
    assert "lists 2 GPUs with driver 580.65.06" in detected.reason
    library(tmp_path / "driver", 13010)
    bring(tmp_path, 13000, init=803)
    assert not devices.detect(host("590.1.2")).variables


def test_an_older_driver_takes_the_compatibility_libraries(
    host: Host, tmp_path: Path, tree: Tree
) -> None:
    library(tmp_path / "driver", 12020)
    bring(tmp_path, 13000)
    environ = host()
    detected = devices.detect(environ)
    first = f"{tmp_path / 'compat'}:{tmp_path / 'driver'}"
    assert (detected.accelerators, detected.variables["LD_LIBRARY_PATH"]) == (2, first)
    assert "compatibility libraries of 580.65.06" in detected.reason
    # They reach the script's processes.
    tree.configure({"sagemaker_program": "s.py"}).script("", "s.py")
    job = read_job({"SAGEMAKER_BASE_DIR": str(tree.base)})
    source = Program(root=Paths(tree.base).code, kind=ProgramKind.SCRIPT, name="s.py")
    plan = launch.plan(job, detected, source, tree.base, environ)
    assert plan.environ["LD_LIBRARY_PATH"] == first


@pytest.mark.parametrize(
    ("version", "init", "says"),
    [
        (12020, 0, "torch needs CUDA 13.0, and the driver has 12.2 only"),
        (13000, 804, "CUDA cannot be started (cuInit gives 804)"),
        (None, 0, "CUDA cannot be started: libcuda.so.1"),
        pytest.param(12020, "compat", "cuInit gives 804", id="compatibility libraries of no help"),
        pytest.param(13000, "None", "torch is built without CUDA in this image", id="torch"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_an_error(
    host: Host, tmp_path: Path, version: int | None, init: int | str, says: str
) -> None:
    if version is not None:
        library(tmp_path / "driver", version, init if isinstance(init, int) else 0)
    if init == "compat":
        bring(tmp_path, 13000, init=804)
    environ = host(torch="None" if init == "None" else "'13.0'")
    with pytest.raises(ConfigError) as caught:
        devices.detect({**environ, "CUDA_VISIBLE_DEVICES": "0"})
    for part in (says, "driver 535.161.08", "inference_ami_version", "CUDA_VISIBLE_DEVICES"):
        assert part in str(caught.value)


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), ("0", 1), ("0,1", 2)])
def test_the_gpus_that_are_shown(host: Host, tmp_path: Path, visible: str, count: int) -> None:
    library(tmp_path / "driver", 13000)
    # To hide all GPUs is the remedy for those whose image cannot use them.
    torch = "'13.0'" if count else "None"
    detected = devices.detect({**host(torch=torch), "CUDA_VISIBLE_DEVICES": visible})
    assert detected.accelerators == count and (
        count == 2 or "CUDA_VISIBLE_DEVICES" in detected.reason
    )
    assert detected.kind == ("cuda" if count else "cpu")


def test_devices_whose_tool_fails_are_an_error(host: Host, tmp_path: Path) -> None:
    (tmp_path / "dev" / "nvidia0").touch()
    with pytest.raises(ConfigError, match="nvidia-smi fails"):
        devices.detect(host(driver=""))
