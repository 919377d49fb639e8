"""What a host computes with: NVIDIA GPUs, Neuron cores or CPUs. Found at run time, never from the
instance type, since SageMaker may choose one of several types for a job."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from amphora.errors import ConfigError

_PROBE_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices of one host."""

    gpus: int
    neuron_cores: int
    cpus: int
    """CPUs this process may use: its affinity, and the container's quota."""
    efa: bool
    interfaces: tuple[str, ...] = ()
    """The host's network interfaces."""
    reason: str
    """Why this kind was chosen, for the log."""

    @property
    def kind(self) -> str:
        """'cuda', 'neuron' or 'cpu'."""
        return "cuda" if self.gpus else "neuron" if self.neuron_cores else "cpu"

    @property
    def accelerators(self) -> int:
        """GPUs or Neuron cores; 0 on a CPU host."""
        return self.gpus or self.neuron_cores


def detect(environ: Mapping[str, str], instance_type: str = "local") -> Devices:
    """Look at this host. Raises ConfigError where a device's own tool is there but broken."""
    gpus, gpu_reason = _count_gpus(environ)
    cores, neuron_reason = (0, "") if gpus else _count_neuron_cores(environ, instance_type)
    cpus = usable_cpus()
    reason = (
        gpu_reason
        if gpus
        else neuron_reason
        if cores
        else (f"{'; '.join(filter(None, (gpu_reason, neuron_reason)))}; {cpus} usable CPUs")
    )
    return Devices(
        gpus=gpus,
        neuron_cores=cores,
        cpus=cpus,
        interfaces=tuple(sorted(path.name for path in Path("/sys/class/net").glob("*"))),
        efa=any(Path("/dev/infiniband").glob("uverbs*")),
        reason=reason,
    )


def usable_cpus() -> int:
    """CPUs by affinity, limited by the cgroup's quota (`docker run --cpus`)."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cpus, _cgroup_quota() or cpus))


def _cgroup_quota() -> int | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else max(1, round(int(quota) / int(period)))


def _count_gpus(environ: Mapping[str, str]) -> tuple[int, str]:
    if shutil.which("nvidia-smi", path=environ.get("PATH")) is None:
        return 0, "no nvidia-smi"
    result = _probe(["nvidia-smi", "--list-gpus"], environ)
    if result is None or result.returncode != 0:
        return 0, "nvidia-smi finds no GPU"
    count = sum(line.startswith("GPU ") for line in result.stdout.splitlines())
    return count, f"nvidia-smi lists {count} GPU{'s' * (count != 1)}"


def _count_neuron_cores(environ: Mapping[str, str], instance_type: str) -> tuple[int, str]:
    if shutil.which("neuron-ls", path=environ.get("PATH")) is None:
        return 0, "no neuron-ls"
    result = _probe(["neuron-ls", "-j"], environ)
    if result is None or result.returncode != 0:
        return 0, "neuron-ls finds no device"
    try:
        count = sum(int(device.get("nc_count", 0)) for device in json.loads(result.stdout))
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"`neuron-ls -j` printed what is not a list of devices ({error}).",
            "Run it on this host to see, and check that the Neuron driver and tools fit.",
        ) from error
    if "trn2.48xlarge" in instance_type:
        # neuron-ls counts as if each logical core were one physical core; two make one by default.
        lnc = int(environ.get("NEURON_LOGICAL_NC_CONFIG", "2"))
        count, note = 128 // lnc, f" (trn2.48xlarge at {lnc} physical cores a logical one)"
    else:
        note = ""
    return count, f"neuron-ls lists {count} Neuron cores{note}"


def _probe(argv: list[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            argv,
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
