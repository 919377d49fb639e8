"""Which device computes, in which precision, with how many threads, and why."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from recipe.errors import DistributedError, HyperparameterError
from recipe.runtime import xla

_CPU_BF16_FLAGS = ("amx_bf16", "avx512_bf16")


@dataclass(frozen=True, kw_only=True)
class Device:
    """What this process computes on."""

    kind: str
    """`cpu`, `cuda`, or another accelerator's name in PyTorch."""
    bf16: bool
    reason: str
    """Why this precision, for the log."""
    processes: int
    """Processes of the job, on all hosts."""
    threads: int | None
    """CPU threads of this process; None leaves what OMP_NUM_THREADS says."""

    def describe(self) -> str:
        """One line for the start of the log."""
        precision = "bfloat16" if self.bf16 else "float32"
        threads = f", {self.threads} thread(s) each" if self.threads and self.kind == "cpu" else ""
        return (
            f"device: {self.kind}, {self.processes} process(es){threads}; "
            f"{precision}: {self.reason}"
        )


def choose(environ: Mapping[str, str], bf16: bool | None, use_cpu: bool, fp16: bool) -> Device:
    """The device of this process, without kernels on it that are known to be wrong.

    Args:
        environ: RANK, WORLD_SIZE and LOCAL_WORLD_SIZE as torchrun sets them.
        bf16: The hyperparameter; None lets the device decide.
        use_cpu: Whether the CPU was asked for in spite of an accelerator.
        fp16: Whether float16 was asked for, which excludes bfloat16.

    Raises:
        HyperparameterError: the CPU was asked for, but the Trainer would not use it.
    """
    if use_cpu and xla.in_use():
        raise HyperparameterError(
            "Hyperparameter use_cpu has value True, but the Trainer takes torch-xla's device "
            "wherever torch-xla is installed.",
            "Leave it out and set the environment variable USE_TORCH_XLA=0.",
        )
    kind = "cpu" if use_cpu else _accelerator()
    decided, reason = _precision(kind, bf16, fp16)
    # cuDNN's attention comes first on recent GPUs: with a mask its gradients may be no number
    # (pytorch#196678), and each new shape costs half a second. The others are as fast.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return Device(
        kind=kind,
        bf16=decided,
        reason=reason,
        processes=int(environ.get("WORLD_SIZE", "1")),
        threads=_threads(environ),
    )


def _accelerator() -> str:
    if xla.in_use():
        return "xla"
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None else "cpu"


def _precision(kind: str, asked: bool | None, fp16: bool) -> tuple[bool, str]:
    if fp16:
        return False, "fp16 was asked for"
    if asked is not None:
        return asked, f"bf16={asked} was asked for"
    return kind_of(kind).bf16()


def _of_cuda() -> tuple[bool, str]:
    has = torch.cuda.is_bf16_supported(including_emulation=False)
    return has, f"this GPU {'computes' if has else 'does not compute'} in bfloat16"


def _of_cpu() -> tuple[bool, str]:
    flag = next((flag for flag in _CPU_BF16_FLAGS if flag in cpu_flags()), None)
    return flag is not None, f"this CPU has {flag or 'no ' + ', no '.join(_CPU_BF16_FLAGS)}"


def _of_xla() -> tuple[bool, str]:
    computes_in = xla.device_type()
    return computes_in == "NEURON", f"PJRT_DEVICE is {computes_in}"


def _of_neuron() -> tuple[bool, str]:
    has = bool(torch.get_device_module("neuron").is_bf16_supported())
    return has, f"torch.neuron {'computes' if has else 'does not compute'} in bfloat16"


def _unknown(kind: str) -> tuple[bool, str]:
    return False, f"nothing is known of bfloat16 on {kind}: set bf16=True to use it"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of device: what training does differently on it. Others are taken as they come."""

    bf16: Callable[[], tuple[bool, str]]
    """Whether it computes in bfloat16, and what says so."""
    backend: str = "its own"
    """What sums over processes, for the log."""
    has_fused_optimizer: bool = False
    pins_memory: bool = True


KINDS: Mapping[str, Kind] = {
    "cuda": Kind(bf16=_of_cuda, backend="nccl", has_fused_optimizer=True),
    "cpu": Kind(bf16=_of_cpu, backend="gloo", has_fused_optimizer=True, pins_memory=False),
    "neuron": Kind(bf16=_of_neuron),
    "xla": Kind(bf16=_of_xla),
}


def kind_of(name: str) -> Kind:
    """The row of a kind, by its name in PyTorch; one of its own for a kind that has none."""
    return KINDS.get(name) or Kind(bf16=functools.partial(_unknown, name))


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """The instruction sets that Linux lists for the first CPU; empty elsewhere."""
    if not cpuinfo.is_file():
        return set()
    lines = cpuinfo.read_text().splitlines()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def _threads(environ: Mapping[str, str]) -> int | None:
    processes = int(environ.get("LOCAL_WORLD_SIZE", "1"))
    given = environ.get("OMP_NUM_THREADS")
    # torchrun itself sets 1 where nothing is set, which would leave cores idle.
    set_by_torchrun = given == "1" and "TORCHELASTIC_RUN_ID" in environ and processes > 1
    if given and not set_by_torchrun:
        return None
    return max(1, len(os.sched_getaffinity(0)) // processes)


def check_world(device: torch.device, expected: int) -> None:
    """See that a sum over all processes really has `expected` terms.

    Raises:
        DistributedError: the processes would train apart from each other.
    """
    if expected == 1:
        return
    total = torch.ones(1, device=device)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total)
    if int(total.item()) != expected:
        raise DistributedError(
            f"WORLD_SIZE is {expected}, but a sum over all processes has {int(total.item())} "
            "term(s).",
            "Start the script through torchrun, with the same arguments on every host.",
        )


def everyones(value: Any) -> list[Any]:
    """`value` of each process, by rank; over the hosts' network, not by the accelerators."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=_hosts())
    return values


@functools.cache
def _hosts() -> Any:
    return dist.new_group(backend="gloo")


def leave_world() -> None:
    """Wait for all processes, then take the process group down; nothing to do with one process."""
    if dist.is_available() and dist.is_initialized():
        everyones(None)  # the barrier of torch-xla's backend waits for nobody
        _hosts.cache_clear()
        dist.destroy_process_group()
