"""What a host computes with: NVIDIA GPUs, Neuron cores or CPUs. Found at run time, never from the
instance type, since SageMaker may choose one of several types for a job."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from amphora.common import cuda, neuron_cores

CUDA, NEURON, CPU = "cuda", "neuron", "cpu"
_DEV = Path("/dev")
# Devices of NVIDIA without nvidia-smi, of AMD, and of Habana.
_OTHERS = ("nvidiactl", "kfd", "accel")


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices of one host."""

    gpus: int
    neuron_cores: int
    """Logical Neuron cores that this job may use."""
    cpus: int
    """CPUs this process may use: its affinity, and the container's quota."""
    efa: bool
    more: Mapping[str, int] = field(default_factory=dict)
    """Accelerators of other kinds than these, by the name of their row."""
    has_other: bool = False
    """Whether there is an accelerator that is not counted here, which a script may know."""
    interfaces: tuple[str, ...] = ()
    """The host's network interfaces."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """What the environment of every process that computes must have."""
    reason: str
    """Why this kind was chosen, for the log."""

    @property
    def kind(self) -> str:
        """The name of its row: CUDA, NEURON, CPU ..."""
        return next((name for name, count in self._counts.items() if count), CPU)

    @property
    def accelerators(self) -> int:
        """Of that kind; 0 on a CPU host."""
        return self._counts.get(self.kind, 0)

    @property
    def _counts(self) -> dict[str, int]:
        return {CUDA: self.gpus, NEURON: self.neuron_cores, **self.more}


def detect(environ: Mapping[str, str]) -> Devices:
    """Look at this host, for each kind of accelerator in turn.

    Raises:
        ConfigError: A device's own tool is there but broken, or there are GPUs that this image
            cannot use.
    """
    counts: dict[str, int] = {}
    variables: dict[str, str] = {}
    reasons: list[str] = []
    for kind in ACCELERATORS:
        counts[kind.name], reason, variables = kind.count(environ)
        if counts[kind.name]:
            reasons = [reason]
            break
        reasons.append(reason)
    cpus = usable_cpus()
    if not any(counts.values()):
        reasons = [*filter(None, reasons), f"{cpus} usable CPUs"]
    return Devices(
        gpus=counts.pop(CUDA, 0),
        neuron_cores=counts.pop(NEURON, 0),
        more=counts,
        cpus=cpus,
        variables=variables,
        interfaces=tuple(sorted(path.name for path in Path("/sys/class/net").glob("*"))),
        has_other=any((_DEV / name).exists() for name in _OTHERS),
        efa=any(Path("/dev/infiniband").glob("uverbs*")),
        reason="; ".join(reasons),
    )


def usable_cpus(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """CPUs by affinity, limited by the cgroup's quota (`docker run --cpus`).

    Args:
        groups: The folder of the control groups, of version 2 or 1.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        # Without a limit the quota is `max`, or -1.
        with contextlib.suppress(OSError, ValueError):
            text = " ".join((groups / name).read_text() for name in names)
            quota, period = (int(number) for number in text.split())
            if quota > 0 and period > 0:
                cpus = max(1, min(cpus, round(quota / period)))
    return cpus


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of device: all that differs from kind to kind, as far as this package is asked."""

    name: str
    count: Callable[[Mapping[str, str]], tuple[int, str, dict[str, str]]]
    """How many this job may use, why as many, and the variables that its processes need."""
    visible: str | None
    """The variable that shows a process only some of them."""
    call_tokens: int
    """What a call of a model costs beside its tokens, in tokens: where that is little, as on a CPU,
    another call is cheaper than the padding that it saves (benchmarks/bench_serve.py)."""


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            name=CUDA,
            count=cuda.count,
            visible="CUDA_VISIBLE_DEVICES",
            call_tokens=4096,
        ),
        Kind(
            name=NEURON,
            count=lambda environ: (*neuron_cores.count(environ), {}),
            visible="NEURON_RT_VISIBLE_CORES",
            call_tokens=4096,
        ),
        Kind(name=CPU, count=lambda _: (usable_cpus(), "", {}), visible=None, call_tokens=24),
    )
}
"""The table of devices; of accelerators the first that a host has is used."""
ACCELERATORS = [kind for kind in KINDS.values() if kind.name != CPU]
