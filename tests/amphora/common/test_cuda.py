"""GPUs and drivers, on a stand-in for nvidia-smi and a libcuda.so.1 compiled here."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from amphora.common import cuda, devices
from amphora.common.errors import ConfigError
from amphora.contract.job import Paths, read_job
from amphora.training import launch
from amphora.training.entry_point import ProgramKind, Source
from tests.support.job_tree import Tree

# A driver library as CUDA's: it tells its version, and counts as CUDA_VISIBLE_DEVICES says.
LIBRARY = """
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
"""


def library(folder: Path, version: int, init: int = 0, name: str = "libcuda.so.1") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "cuda.c"
    source.write_text(LIBRARY)
    values = [f"-DVERSION={version}", f"-DINIT={init}"]
    compiler = shutil.which("cc")
    assert compiler is not None
    subprocess.run(
        [compiler, "-shared", "-fPIC", *values, "-o", str(folder / name), str(source)], check=True
    )
    return folder


@dataclass
class Host:
    """A host's tools and libraries, and the image's torch."""

    folder: Path

    def environ(self, driver: str = "535.161.08", torch: str = "'13.0'") -> dict[str, str]:
        tools = self.folder / "tools"
        tools.mkdir(exist_ok=True)
        script = (
            f"#!/bin/sh\nprintf '{driver}\\n{driver}\\n'\n" if driver else "#!/bin/sh\nexit 9\n"
        )
        (tools / "nvidia-smi").write_text(script)
        (tools / "nvidia-smi").chmod(0o755)
        package = self.folder / "packages" / "torch"
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text("raise AssertionError('torch must not be imported')")
        (package / "version.py").write_text(f"cuda: str | None = {torch}\nhip = None\n")
        return {
            "PATH": f"{tools}:/usr/bin:/bin",
            "PYTHONPATH": str(package.parent),
            "LD_LIBRARY_PATH": str(self.folder / "driver"),
        }


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    monkeypatch.setattr(cuda, "COMPAT", tmp_path / "compat")
    monkeypatch.setattr(cuda, "_DEV", tmp_path / "dev")
    return Host(tmp_path)


def test_a_driver_that_is_new_enough(host: Host) -> None:
    library(host.folder / "driver", 13000)
    detected = devices.detect(host.environ("580.65.06"))
    assert (detected.kind, detected.accelerators, dict(detected.variables)) == ("cuda", 2, {})
    assert "lists 2 GPUs with driver 580.65.06" in detected.reason


def brought(host: Host, version: int, init: int = 0) -> None:
    """The compatibility libraries of driver 580.65.06, linked as NVIDIA's package links them."""
    library(host.folder / "compat", version, init, "libcuda.so.580.65.06")
    (host.folder / "compat" / "libcuda.so.1").symlink_to("libcuda.so.580.65.06")


def test_an_older_driver_takes_the_compatibility_libraries(host: Host, tree: Tree) -> None:
    library(host.folder / "driver", 12020)
    brought(host, 13000)
    environ = host.environ()
    detected = devices.detect(environ)
    first = f"{host.folder / 'compat'}:{host.folder / 'driver'}"
    assert (detected.accelerators, detected.variables["LD_LIBRARY_PATH"]) == (2, first)
    assert "compatibility libraries of 580.65.06" in detected.reason
    # They reach the script's processes.
    tree.configure({"sagemaker_program": "s.py"}).script("", "s.py")
    job = read_job({"SAGEMAKER_BASE_DIR": str(tree.base)})
    source = Source(root=Paths(tree.base).code, kind=ProgramKind.SCRIPT, name="s.py")
    plan = launch.plan(job, detected, source, tree.base, environ)
    assert plan.environ["LD_LIBRARY_PATH"] == first


def test_a_newer_driver_does_not_take_them(host: Host) -> None:
    library(host.folder / "driver", 13010)
    brought(host, 13000, init=803)
    assert not devices.detect(host.environ("590.1.2")).variables


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
    host: Host, version: int | None, init: int | str, says: str
) -> None:
    if version is not None:
        library(host.folder / "driver", version, init if isinstance(init, int) else 0)
    if init == "compat":
        brought(host, 13000, init=804)
    environ = host.environ(torch="None" if init == "None" else "'13.0'")
    with pytest.raises(ConfigError) as caught:
        devices.detect({**environ, "CUDA_VISIBLE_DEVICES": "0"})
    for part in (says, "driver 535.161.08", "inference_ami_version", "CUDA_VISIBLE_DEVICES"):
        assert part in str(caught.value)


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), ("0", 1), ("0,1", 2)])
def test_the_gpus_that_are_shown(host: Host, visible: str, count: int) -> None:
    library(host.folder / "driver", 13000)
    # To hide all GPUs is the remedy for those whose image cannot use them.
    torch = "'13.0'" if count else "None"
    detected = devices.detect({**host.environ(torch=torch), "CUDA_VISIBLE_DEVICES": visible})
    assert detected.accelerators == count and (
        count == 2 or "CUDA_VISIBLE_DEVICES" in detected.reason
    )
    assert detected.kind == ("cuda" if count else "cpu")


def test_devices_whose_tool_fails_are_an_error(host: Host) -> None:
    (host.folder / "dev").mkdir()
    (host.folder / "dev" / "nvidia0").touch()
    with pytest.raises(ConfigError, match="nvidia-smi fails"):
        devices.detect(host.environ(driver=""))
