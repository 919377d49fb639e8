"""Counts the NVIDIA GPUs that a process may use, and makes them usable with this host's driver.

If the driver is older than the image's CUDA, /usr/local/cuda/compat must come first on
LD_LIBRARY_PATH, as the start script of AWS's base images sets it, which these images do not run. If
that does not help either, it is an error, since torch would silently use the CPU.

Source: "Upgrade the NVIDIA driver" of SageMaker's developer guide (inference-gpu-drivers), CUDA's
forward compatibility.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amphora.common.errors import ConfigError
from amphora.common.probe import DetectedDevices, probe

COMPAT = Path("/usr/local/cuda/compat")
_DEV = Path("/dev")
_LIBRARY_PATH = "LD_LIBRARY_PATH"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# In a new process, since a library path takes effect only when a process starts.
_ASK = """
import ctypes, importlib.util, json, pathlib, re
answer = {"torch": "", "init": -1, "count": 0, "driver": 0, "error": ""}
spec = importlib.util.find_spec("torch")
if spec is not None and spec.origin:
    text = (pathlib.Path(spec.origin).parent / "version.py").read_text()
    built = re.search(r"^cuda[^=\\n]*= *(None|['\\"][\\d.]+)", text, re.M)
    answer["torch"] = built[1].strip("'\\"") if built else ""
try:
    library = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    answer["error"] = str(error)
else:
    answer["init"] = library.cuInit(0)
    number = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(number))
    answer["driver"] = number.value
    if answer["init"] == 0 and library.cuDeviceGetCount(ctypes.byref(number)) == 0:
        answer["count"] = number.value
print(json.dumps(answer))
"""


def count(environ: Mapping[str, str]) -> DetectedDevices:
    """Count the usable GPUs. Raises ConfigError if CUDA, or the image's torch, cannot use them."""
    if shutil.which("nvidia-smi", path=environ.get("PATH")) is None:
        return DetectedDevices(reason="no nvidia-smi")
    result = probe(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], environ)
    lines = [line.strip() for line in result.stdout.splitlines()] if result else []
    versions = [line for line in lines if re.fullmatch(r"[\d.]+", line)]
    if result is None or result.returncode != 0 or not versions:
        present = sorted(path.name for path in _DEV.glob("nvidia[0-9]*"))
        if not present:
            return DetectedDevices(reason="nvidia-smi finds no GPU")
        # The host shows GPUs that the driver's own tool cannot see.
        message = " ".join((result.stdout + result.stderr).split()) if result else ""
        raise ConfigError(
            f"This host has GPUs ({_DEV / present[0]}), but nvidia-smi fails:"
            f" {message[-300:] or 'it prints nothing'}.",
            "Run nvidia-smi in the container to see why. If the driver of a running host was"
            " updated, start a new instance.",
        )
    driver = versions[0]
    listed = f"nvidia-smi lists {len(versions)} GPU{'s' * (len(versions) != 1)}"
    described = f"{listed} with driver {driver}"
    variables: dict[str, str] = {}
    target = (COMPAT / "libcuda.so.1").resolve()
    brought = target.name.removeprefix("libcuda.so.") if target.is_file() else ""
    if re.fullmatch(r"[\d.]+", brought) and _numbers(driver) < _numbers(brought):
        rest = environ.get(_LIBRARY_PATH, "")
        variables[_LIBRARY_PATH] = f"{COMPAT}:{rest}" if rest else str(COMPAT)
        described += f", with the compatibility libraries of {brought} in {COMPAT}"
    query = probe([sys.executable, "-c", _ASK], {**environ, **variables})
    lines = query.stderr.strip().splitlines()[-1:] if query else ["no answer in time"]
    error = "".join(lines)
    answer: dict[str, Any] = {"torch": "", "init": -1, "count": 0, "driver": 0, "error": error}
    with contextlib.suppress(ValueError):
        answer |= json.loads(query.stdout) if query else {}
    visible = environ.get(_VISIBLE)  # 100 is CUDA_ERROR_NO_DEVICE.
    if visible is not None and (visible.strip()[:1] in ("", "-") or answer["init"] == 100):
        return DetectedDevices(reason=f"{_VISIBLE}={visible} leaves none: {listed}")
    built, (major, minor) = answer["torch"], divmod(answer["driver"], 1000)
    why = ""
    if built == "None":
        why = "torch is built without CUDA in this image"
    elif answer["error"]:
        why = f"CUDA cannot be started: {answer['error']}"
    elif built and _numbers(built)[0] > major:
        # Within a major version CUDA runs on older drivers.
        why = f"torch needs CUDA {built}, and the driver has {major}.{minor // 10} only"
    elif answer["init"] != 0 or not answer["count"]:
        why = f"CUDA cannot be started (cuInit gives {answer['init']})"
    if why:
        raise ConfigError(
            f"{described}, but {why}.",
            "On an endpoint set inference_ami_version to one with a newer driver; for training take"
            " a newer instance type; or build the image on a base with an older CUDA. To compute on"
            f" the CPU all the same, set {_VISIBLE} to an empty value.",
        )
    usable = answer["count"]
    left = f", {_VISIBLE} leaves {usable}" if usable != len(versions) else ""
    return DetectedDevices(usable=usable, reason=f"{described}{left}", variables=variables)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part]
