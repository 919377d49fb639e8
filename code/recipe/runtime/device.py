"""Choose the device, its precision and the number of threads, with the reasons.

`KINDS` is the one place of the recipe that knows kinds of devices.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from recipe.errors import DeviceError, DistributedError, HyperparameterError
from recipe.runtime import memory, xla

_CPU_BF16_FLAGS = ("amx_bf16", "avx512_bf16")
_OF_CPU = ("vendor_id", "flags")
_HIDES_AMX = {"GenuineIntel", "avx512_fp16"}
"""Of a CPU without amx_bf16: a Xeon since Sapphire Rapids, whose host hides AMX. Training in
bfloat16 by avx512_bf16 alone takes 1.4 times as long as in float32 there (docs/LAB.md)."""


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
    fp16: bool = False

    @property
    def precision(self) -> str:
        """Return the name of the precision of the training's products."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "float32"

    def describe(self) -> str:
        """Return the kind, and how many processes and threads use it."""
        processes = "1 process" if self.processes == 1 else f"{self.processes} processes"
        threads = ""
        if self.threads and self.kind == "cpu":
            threads = f", {self.threads} thread{'s' * (self.threads > 1)} each"
        return f"{self.kind}, {processes}{threads}"


def choose(environ: Mapping[str, str], bf16: bool | None, use_cpu: bool, fp16: bool) -> Device:
    """Choose the device of this process.

    Args:
        environ: RANK, WORLD_SIZE and LOCAL_WORLD_SIZE as torchrun sets them, SM_NUM_GPUS,
            CUDA_VISIBLE_DEVICES, SM_NUM_NEURONS and NEURON_RT_VISIBLE_CORES.
        bf16: The hyperparameter; None lets the device decide.
        use_cpu: Whether to use the CPU even if there is an accelerator.
        fp16: Whether to use float16, which excludes bfloat16.

    Raises:
        HyperparameterError: use_cpu is set, but the Trainer would not use the CPU.
        DeviceError: The host has accelerators that this torch cannot use.
    """
    if use_cpu and xla.is_used():
        raise HyperparameterError(
            "Hyperparameter use_cpu has value True, but the Trainer takes torch-xla's device "
            "wherever torch-xla is installed.",
            "Set the environment variable USE_TORCH_XLA=0, too.",
        )
    kind = "xla" if xla.is_used() else "cpu"
    if kind == "cpu" and not use_cpu:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        kind = "cpu" if accelerator is None else accelerator.type
        _check_accelerators(kind, environ)
    if fp16:
        decided, reason = False, "fp16=True is set"
    elif bf16 is not None:
        decided, reason = bf16, f"bf16={bf16} is set"
    else:
        decided, reason = kind_of(kind).bf16()
    on_this_host = int(environ.get("LOCAL_WORLD_SIZE", "1"))
    threads: int | None = max(1, len(os.sched_getaffinity(0)) // on_this_host)
    environment_threads = environ.get("OMP_NUM_THREADS")
    # torchrun itself sets 1 where nothing is set, which would leave cores idle.
    set_by_torchrun = (
        environment_threads == "1" and "TORCHELASTIC_RUN_ID" in environ and on_this_host > 1
    )
    if environment_threads and not set_by_torchrun:
        threads = None
    return Device(
        kind=kind,
        bf16=decided,
        fp16=fp16,
        reason=reason,
        processes=int(environ.get("WORLD_SIZE", "1")),
        threads=threads,
    )


def set_up(chosen: Device) -> None:
    """Set the threads, the allocator and the kernels of this process, as a training needs them."""
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    if chosen.kind == "cpu":
        memory.keep_freed()
    avoid_wrong_kernels()


def avoid_wrong_kernels() -> None:
    """Turn off cuDNN's attention, which recent GPUs would use: with a mask its gradients may be NaN
    (pytorch#196678), and each new shape costs half a second. The others are as fast."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def is_on(environ: Mapping[str, str], name: str, one: str, zero: str, usual: str = "1") -> bool:
    """Return whether an environment variable, or else its default `usual`, is 1 and not 0. Raise
    ValueError, with what `one` and `zero` select, if it is neither."""
    setting = environ.get(name) or usual
    if setting not in ("0", "1"):
        raise ValueError(f"{name} is {setting!r}. Set 1 ({one}) or 0 ({zero}).")
    return setting == "1"


def _check_accelerators(kind: str, environ: Mapping[str, str]) -> None:
    """Check that torch uses the host's accelerators."""
    cores = environ.get("SM_NUM_NEURONS", "").strip("0")
    names_cores = bool(cores or environ.get("NEURON_RT_VISIBLE_CORES"))
    if kind == "cpu" and names_cores and not xla.is_turned_off():
        raise DeviceError(
            f"This host has Neuron cores, but torch {torch.__version__} has no Neuron device: it "
            "would use the CPU.",
            "Check that torch-neuronx can be imported in this image, and that no requirements.txt "
            "has replaced its torch. To train on the CPU, set use_cpu=True.",
        )
    counted, visible = environ.get("SM_NUM_GPUS", ""), environ.get("CUDA_VISIBLE_DEVICES", " ")
    is_hidden = not visible or visible.startswith("-")
    if kind == "cpu" and counted.isdecimal() and int(counted) and not is_hidden:
        why = "is built without CUDA" if torch.version.cuda is None else "cannot use them"
        raise DeviceError(
            f"SM_NUM_GPUS is {counted}, but torch {torch.__version__} {why}: it would train on "
            "the CPU.",
            "Check whether a requirements.txt has replaced the image's torch, or whether the "
            "host's driver is too old for it. To train on the CPU, set use_cpu=True.",
        )


def join(kind: str, environ: Mapping[str, str]) -> None:
    """Start the process group of torchrun's processes, on devices that need it first.

    Nothing may use such a device before: TorchNeuron assigns cores to processes here, and
    accelerate starts no group of torch-xla's.
    """
    is_alone = int(environ.get("WORLD_SIZE", "1")) == 1
    if is_alone or not kind_of(kind).needs_group_first or dist.is_initialized():
        return
    if kind == "xla":
        xla.register_backend()
    dist.init_process_group(kind)


def settle_on_gpu(device: torch.device, environ: MutableMapping[str, str]) -> None:
    """Make DDP use this process's GPU: `environ` gets a variable of accelerate if the GPU does not
    have the process's number, which accelerate takes for it otherwise."""
    is_apart = environ.get("LOCAL_RANK", "0") != str(device.index or 0)
    if device.type == "cuda" and dist.is_initialized() and is_apart:
        environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"


class DeviceTraits:
    """The properties of a kind of device on which the recipe depends."""

    backend = "its own"
    """The backend of torch.distributed, for the log."""
    has_fused_optimizer = False
    pins_memory = True
    has_fast_float16 = False
    """Whether float16 is far faster than float32."""
    compiles_each_shape = False
    """Whether each new shape of a model's input is a program to compile, for minutes."""
    needs_group_first = False
    """Whether the process group must be started before anything uses the device."""
    shards = True
    """Whether FSDP2 runs on it."""
    compiler: str | None = "inductor"
    """The backend of torch.compile; None if it compiles without torch.compile."""
    compiles_shards = True
    """Whether torch.compile and FSDP2 go together."""

    def __init__(self, name: str) -> None:
        self._name = name

    def bf16(self) -> tuple[bool, str]:
        """Return whether it computes in bfloat16, and the evidence for that."""
        return False, f"bfloat16 is not known to work on {self._name}: set bf16=True to use it"


class _Cuda(DeviceTraits):
    backend = "nccl"
    has_fused_optimizer = True
    has_fast_float16 = True

    def bf16(self) -> tuple[bool, str]:
        has = torch.cuda.is_bf16_supported(including_emulation=False)
        if has:
            return True, "this GPU computes in bfloat16"
        return False, "this GPU does not compute in bfloat16 (fp16=True is faster than float32)"


class _Cpu(DeviceTraits):
    backend = "gloo"
    has_fused_optimizer = True
    pins_memory = False

    def bf16(self) -> tuple[bool, str]:
        flags = cpu_flags()
        flag = next((flag for flag in _CPU_BF16_FLAGS if flag in flags), None)
        if flag == "avx512_bf16" and flags >= _HIDES_AMX:
            return False, "avx512_bf16 without AMX is slower than float32 on this CPU"
        return flag is not None, f"this CPU has {flag or 'no ' + ', no '.join(_CPU_BF16_FLAGS)}"


class _Neuron(DeviceTraits):
    backend = "neuron"
    compiles_each_shape = True
    needs_group_first = True
    compiler = "neuron"
    compiles_shards = False  # AWS names SimpleFSDP for that

    def bf16(self) -> tuple[bool, str]:
        # Not queried: the runtime must not start before the process group.
        return True, "Trainium2 and later compute in bfloat16"


class _Xla(DeviceTraits):
    backend = "xla"
    compiles_each_shape = True
    needs_group_first = True
    shards = False
    compiler = None

    def bf16(self) -> tuple[bool, str]:
        computes_in = xla.device_type()
        return computes_in == "NEURON", f"PJRT_DEVICE is {computes_in}"


KINDS: Mapping[str, type[DeviceTraits]] = {
    "cuda": _Cuda,
    "cpu": _Cpu,
    "neuron": _Neuron,
    "xla": _Xla,
}


def kind_of(name: str) -> DeviceTraits:
    """Return the kind of this name in PyTorch, with defaults for a name without a row."""
    return KINDS.get(name, DeviceTraits)(name)


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Return the vendor and the instruction sets that Linux lists for the first CPU; an empty set
    elsewhere."""
    if not cpuinfo.is_file():
        return set()
    first = cpuinfo.read_text().partition("\n\n")[0].splitlines()
    known = (line.partition(":") for line in first)
    return {word for key, _, words in known if key.strip() in _OF_CPU for word in words.split()}


def check_world(device: torch.device, expected: int) -> None:
    """Raise DistributedError if a sum over all processes does not have `expected` terms: then they
    would train independently of each other."""
    if expected == 1:
        return
    total = torch.ones(1, device=device)
    if dist.is_initialized():
        dist.all_reduce(total)
    if int(total.item()) != expected:
        raise DistributedError(
            f"WORLD_SIZE is {expected}, but a sum over all processes has {int(total.item())} "
            "term(s).",
            "Start the script through torchrun, with the same arguments on every host.",
        )


def gather_objects(value: Any) -> list[Any]:
    """Gather `value` of each process, by rank, over the hosts' network, not the accelerators'."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=_hosts())
    return values


@functools.cache
def _hosts() -> Any:
    return dist.new_group(backend="gloo")


def leave_world() -> None:
    """Wait for all processes, then destroy the process group, if there is one."""
    if dist.is_initialized():
        gather_objects(None)  # the barrier of torch-xla's backend waits for nobody
        _hosts.cache_clear()
        dist.destroy_process_group()


_POLL_SECONDS = 0.1
_turns = itertools.count()


@contextlib.contextmanager
def first_of_host() -> Iterator[None]:
    """Run the block in the first process of each host, then in the others; end when all have.

    A collective of all processes. The others poll the group's store without a time-out. A barrier
    would fail after the time-out of collectives (30 minutes by default) and would not react to
    signals. If the block fails in one process, the others continue, and fail on their own.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    store, rank, turn = _get_default_store(), dist.get_rank(), next(_turns)
    names = [f"amphora turn {turn} of rank {other}" for other in range(dist.get_world_size())]
    first = rank - int(os.environ.get("LOCAL_RANK", rank))
    while rank != first and not store.check([names[first]]):
        time.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        store.set(names[rank], "done")
    # Wait for all: the time-out of the next collective begins here, and hosts differ in speed.
    while not store.check(names):
        time.sleep(_POLL_SECONDS)
