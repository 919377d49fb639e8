"""Count the instances that an endpoint needs, by the CPU time of a request."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from amphora.instances.instance_types import Instance
from amphora.instances.training_fit import CONTEXT, GB, NO, SPARE, UNKNOWN, YES, TrainingNeeds

FRONT_MS = 0.7
"""CPU-ms of the HTTP front for a request at 32 clients (docs/LAB.md)."""
MEASURED_MS = {True: 14.5, False: 47.7}
"""CPU-ms of a request of 115 tokens, 32 clients, on a Xeon with AMX and without (docs/LAB.md)."""
MEASURED_TOKENS, MEASURED_WEIGHTS = 115, 10.8e6
"""Of these requests, and MiniLM-L6's weights without embeddings."""
MEASURED_MEMORY, MEASURED_MODEL = 0.530 * GB, 0.091 * GB
"""Memory of the server of MiniLM-L6 (docs/LAB.md), and its weights, which workers share."""
USED = 0.5
"""Share of an instance's rate to use: a further one takes minutes to start (docs/ENDPOINTS.md)."""


@dataclass(frozen=True, kw_only=True)
class ServingLoad:
    """What an endpoint has to answer."""

    requests: float
    """A second, at most."""
    cpu_ms: float | None = None
    """CPU time of a request as the user measured it; None estimates it from the model's size."""
    tokens: float | None = None
    """Tokens of a request; None for the mean of the training data."""


@dataclass(frozen=True, kw_only=True)
class ServingFit:
    """How many instances of a type an endpoint needs."""

    instance: Instance
    verdict: str
    why: str = ""
    count: int | None = None
    cpu_ms: float | None = None
    """CPU time of a request on this type."""
    rate: float | None = None
    """Requests a second of one instance, at half of what its CPUs can do."""
    needed: float | None = None
    """Bytes of main memory."""

    def as_dict(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return {
            "type": self.instance.name, "fits": self.verdict, "why": self.why, "count": self.count,
            "cpu_ms": self.cpu_ms, "requests_a_second": self.rate, "needed_bytes": self.needed,
            "vcpus": self.instance.vcpus, "memory_bytes": self.instance.memory,
        }  # fmt: skip


def fit_serving(instance: Instance, needs: TrainingNeeds, load: ServingLoad) -> ServingFit:
    """Count the instances of a type that answer a load; accelerators are compared by memory only,
    since no rate of them is known for this model."""
    if not instance.serves:
        return ServingFit(instance=instance, verdict=NO, why="SageMaker trains on it only")
    device = instance.device
    if device.kind != "cpu":
        half = needs.weights / 2 if device.bf16 else needs.weights
        needed = half * SPARE + CONTEXT
        available = device.memory / device.cores
        if needed > available:
            why = f"needs {needed / GB:.3g} of the {available / GB:.3g} GB of each {device.name}"
            return ServingFit(instance=instance, verdict=NO, why=why, needed=needed)
        return ServingFit(
            instance=instance, verdict=UNKNOWN, why="holds the weights; requests: not measured",
            needed=needed,
        )  # fmt: skip
    needed = SPARE * (MEASURED_MEMORY - MEASURED_MODEL + needs.weights)
    if needed > instance.memory:
        why = f"needs {needed / GB:.3g} of {instance.memory / GB:.3g} GB"
        return ServingFit(instance=instance, verdict=NO, why=why, needed=needed)
    cpu_ms = request_ms(device.bf16, needs, load)
    if cpu_ms is None:
        why = "requests: not measured; give --cpu-ms"
        return ServingFit(instance=instance, verdict=UNKNOWN, why=why, needed=needed)
    rate = USED * instance.vcpus * 1000 / cpu_ms
    return ServingFit(
        instance=instance, verdict=YES, count=math.ceil(load.requests / rate), cpu_ms=cpu_ms,
        rate=rate, needed=needed,
    )  # fmt: skip


def request_ms(bf16: bool, needs: TrainingNeeds, load: ServingLoad) -> float | None:
    """Return the CPU-ms of a request on a CPU with or without bfloat16: as given, or as measured
    for MiniLM-L6, in proportion to tokens and weights without embeddings; None for models that
    generate text, and for samples that are not texts."""
    if load.cpu_ms is not None:
        return load.cpu_ms
    tokens = load.tokens or needs.tokens
    if needs.generates or tokens is None:
        return None
    work = tokens * needs.matrix_weights / (MEASURED_TOKENS * MEASURED_WEIGHTS)
    return FRONT_MS + (MEASURED_MS[bf16] - FRONT_MS) * work
