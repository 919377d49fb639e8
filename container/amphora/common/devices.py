"""Detects the devices of a host: NVIDIA GPUs, Neuron cores or CPUs.

Devices are detected at run time and never derived from the instance type, since SageMaker may
choose one of several types for a job.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from amphora.common import cuda, neuron_cores
from amphora.common.probe import DetectedDevices

CUDA, NEURON, CPU = "cuda", "neuron", "cpu"
_DEV = Path("/dev")
# NVIDIA's without nvidia-smi, AMD's, and Habana's.
_OTHERS = ("nvidiactl", "kfd", "accel")


@dataclass(frozen=True, kw_only=True)
class Devices:
    kind: str = CPU
    """The name of a row of KINDS."""
    accelerators: int = 0
    """How many of that kind this job may use; 0 on a CPU host."""
    neuron_cores: int = 0
    """Logical Neuron cores of the host, also those that this job may not use."""
    cpus: int
    """CPUs this process may use: its affinity, limited by the container's quota."""
    efa: bool
    has_other: bool = False
    """Whether the host has an accelerator that is not counted, but that a script may use."""
    interfaces: tuple[str, ...] = ()
    """The host's network interfaces."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that every computing process needs."""
    reason: str
    """Why this kind was chosen, for the log."""


def detect(environ: Mapping[str, str]) -> Devices:
    """Use the first kind of accelerator that this host has, or the CPU.

    Raises ConfigError if there is one that this image cannot count or use.
    """
    reasons = []
    for kind in KINDS.values():
        detected = kind.count(environ)
        reasons.append(detected.reason)
        if detected.usable:
            reasons = [detected.reason]
            break
    return Devices(
        kind=kind.name, accelerators=detected.usable, neuron_cores=detected.listed,
        cpus=usable_cpus(), variables=detected.variables,
        interfaces=tuple(sorted(path.name for path in Path("/sys/class/net").glob("*"))),
        has_other=any((_DEV / name).exists() for name in _OTHERS),
        efa=any(Path("/dev/infiniband").glob("uverbs*")), reason="; ".join(reasons),
    )  # fmt: skip


def usable_cpus(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Count the CPUs of this process's affinity, limited by the cgroup quota (version 2 or 1)."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        # Without a limit the quota is `max`, or -1.
        with contextlib.suppress(OSError, ValueError):
            text = " ".join((groups / name).read_text() for name in names)
            quota, period = (int(number) for number in text.split())
            if quota > 0 and period > 0:
                cpus = max(1, min(cpus, round(quota / period)))
    return cpus


@dataclass(frozen=True)
class DeviceKind:
    """Holds what this package must know about one kind of device."""

    name: str
    count: Callable[[Mapping[str, str]], DetectedDevices]
    """Counts the accelerators of this kind; none for the CPU."""
    visible: str | None
    """The variable that restricts a process to some of them."""
    call_tokens: int
    """The fixed cost of calling a model, in tokens. Where it is small, as on a CPU, an additional
    call is cheaper than the padding that it saves (benchmarks/bench_serve.py)."""


_KINDS = (
    DeviceKind(CUDA, cuda.count, "CUDA_VISIBLE_DEVICES", 4096),
    DeviceKind(NEURON, neuron_cores.count, "NEURON_RT_VISIBLE_CORES", 4096),
    DeviceKind(CPU, lambda _: DetectedDevices(reason=f"{usable_cpus()} usable CPUs"), None, 24),
)
KINDS: Mapping[str, DeviceKind] = {kind.name: kind for kind in _KINDS}
"""The table of devices. A host is searched for them in this order, the CPU last."""
