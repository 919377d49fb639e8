"""Decide on which instance types a job can train, by what the recipe found that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from amphora.instances.instance_types import Instance

YES, TIGHT, NO, UNKNOWN = "yes", "tight", "no", "unknown"
GB = 1e9
CONTEXT = 0.5 * GB
"""What CUDA keeps on a GPU besides PyTorch's tensors: measured on an H200 (docs/GPU.md)."""
SPARE = 1.15
"""The error of a prediction that tests allow (tests/recipe/training/test_step_memory.py)."""
MEASURED_RATES = {"H200": 0.25 * 788e12}
"""Floating-point operations of a training per second: BERT-base in batches of 1,024, 25 % of the
matrix rate measured in the same run (docs/GPU.md)."""
MEASURED_STEPS = {"H200": 32 / 1710}
"""Seconds of a step too small for the device: MiniLM in batches of 32, 1,710 samples a second
(docs/GPU.md)."""


@dataclass(frozen=True, kw_only=True)
class TrainingNeeds:
    """What a job needs: the line `amphora-needs` of the recipe (recipe.training.preflight), which
    explains the fields."""

    memory: Mapping[str, Mapping[str, int | None]]
    host: int
    weights: int
    bf16: bool | None
    needs_gpu: bool
    use_cpu: bool
    is_sharded: bool
    processes: int
    steps: int
    samples: int
    has_max_steps: bool
    tokens: float | None
    matrix_weights: int
    trained_matrix_weights: int
    generates: bool

    def peak(self, key: str, shards: int = 1) -> tuple[int, bool]:
        """Return the bytes that a process needs, and whether the batch's are among them.

        Args:
            key: A device and a precision: `cuda bfloat16`.
            shards: Processes that share weights, gradients and optimizer.
        """
        parts = self.memory[key]
        state = sum(parts[name] or 0 for name in ("weights", "gradients", "optimizer"))
        batch = parts["activations"]
        return state // shards + (batch or 0), batch is not None


@dataclass(frozen=True, kw_only=True)
class TrainingFit:
    """Whether a job fits on an instance type."""

    instance: Instance
    verdict: str
    why: str = ""
    """The reason, if the verdict is not `yes`."""
    needed: float | None = None
    """Bytes for each process, on its device or of main memory."""
    available: float | None = None
    seconds: float | None = None
    """Time of the steps, from measured rates only."""

    def as_dict(self) -> dict[str, Any]:
        """Return the values for JSON."""
        instance = self.instance
        return {
            "type": instance.name, "fits": self.verdict, "why": self.why,
            "needed_bytes": self.needed, "available_bytes": self.available,
            "seconds": self.seconds, "device": instance.device.name, "devices": instance.devices,
            "vcpus": instance.vcpus, "memory_bytes": instance.memory,
            "network_gbit_s": instance.network, "device_gb_s": instance.device.gb_s,
            "device_tflops": instance.device.tflops, "device_source": instance.device.source,
        }  # fmt: skip


def fit_training(instance: Instance, needs: TrainingNeeds) -> TrainingFit:
    """Decide whether a job fits on an instance type, one process for each accelerator."""
    device, kind = instance.device, instance.device.kind
    refused = ""
    if not instance.trains:
        refused = "SageMaker offers it for endpoints only"
    elif kind == "cpu" and needs.needs_gpu:
        refused = "load_in_4bit=True needs a GPU"
    elif kind != "cpu" and needs.use_cpu:
        refused = "use_cpu=True leaves its accelerators idle"
    elif kind == "neuron" and needs.needs_gpu:
        refused = "load_in_4bit=True needs a GPU"
    elif kind == "cuda" and needs.bf16 and not device.bf16:
        refused = f"bf16=True is set, and {device.name} does not compute in it"
    if refused:
        return TrainingFit(instance=instance, verdict=NO, why=refused)
    if kind == "neuron":
        return _fit_neuron(instance, needs)
    half = device.bf16 if needs.bf16 is None else needs.bf16
    key = f"{kind} {'bfloat16' if half else 'float32'}"
    processes = max(1, instance.devices)
    peak, is_known = needs.peak(key, processes if needs.is_sharded else 1)
    available: float
    if kind == "cpu":
        needed, available = needs.host + peak - needs.weights, instance.memory
        what = "of main memory"
    else:
        needed, available = peak + int(CONTEXT), device.memory
        what = f"of each {device.name}"
    host = processes * needs.host
    if needed > available:
        verdict, why = NO, f"needs {needed / GB:.3g} of the {available / GB:.3g} GB {what}"
    elif kind != "cpu" and host > instance.memory:
        verdict = NO
        why = f"{processes} processes need {host / GB:.3g} of {instance.memory / GB:.3g} GB RAM"
    elif not is_known:
        verdict, why = UNKNOWN, "the memory of a batch cannot be predicted for this model"
    elif needed * SPARE > available:
        verdict, why = TIGHT, f"less than {SPARE - 1:.0%} to spare"
    else:
        verdict, why = YES, ""
    fits = verdict in (YES, TIGHT)
    return TrainingFit(
        instance=instance, verdict=verdict, why=why, needed=needed, available=available,
        seconds=_seconds(instance, needs) if fits else None,
    )  # fmt: skip


def _fit_neuron(instance: Instance, needs: TrainingNeeds) -> TrainingFit:
    """Compare what is known with a core's share of the memory; compiled programs are not known."""
    device = instance.device
    parts = needs.memory["cuda bfloat16"]  # Weights, gradients and optimizer are in float32.
    known = sum(parts[name] or 0 for name in ("weights", "gradients", "optimizer"))
    available = device.memory // device.cores
    verdict, why = UNKNOWN, "the batch and the compiled programs: not measured"
    if known > available:
        verdict = NO
        why = f"the model alone needs {known / GB:.3g} of the {available / GB:.3g} GB of a core"
    return TrainingFit(
        instance=instance, verdict=verdict, why=why, needed=known, available=available
    )


def _seconds(instance: Instance, needs: TrainingNeeds) -> float | None:
    """Return the time of all steps, by the rates measured on one device, divided by the devices
    without loss; None if nothing was measured on it."""
    rate = MEASURED_RATES.get(instance.device.name)
    if rate is None or needs.tokens is None or needs.is_sharded:
        return None
    batch = needs.samples / needs.processes
    steps = float(needs.steps)
    if not needs.has_max_steps:
        steps *= needs.processes / instance.devices
    work = batch * needs.tokens * (4 * needs.matrix_weights + 2 * needs.trained_matrix_weights)
    return max(1.0, steps) * max(work / rate, MEASURED_STEPS[instance.device.name])
