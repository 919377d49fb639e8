"""Read the table of SageMaker's instance types: types.json, which names the source of each fact.

To update it, write what `aws ec2 describe-instance-types` prints. Tests compare it with botocore's
lists of training and of endpoint types.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_FILE = Path(__file__).with_name("types.json")
_MIB = 1 << 20


@dataclass(frozen=True)
class ComputeDevice:
    """What an instance type computes on."""

    name: str
    kind: str
    """`cuda`, `neuron` or `cpu`."""
    bf16: bool
    """Whether it computes in bfloat16."""
    memory: int
    """Bytes of the device's own memory; 0 for CPUs."""
    cores: int
    """Processes that share the device's memory: Neuron cores."""
    gb_s: float | None
    """GB/s of its memory; None if unknown."""
    tflops: float | None
    """Dense TFLOP/s in bfloat16, or float16 without it; None if unknown."""
    source: str


@dataclass(frozen=True)
class Instance:
    """A SageMaker instance type."""

    name: str
    """As in `ml.g5.xlarge`."""
    device: ComputeDevice
    devices: int
    """Accelerators; 0 if it has none."""
    vcpus: int
    memory: int
    """Bytes of main memory."""
    network: float | None
    """Gbit/s, sustained; None if unknown."""
    trains: bool
    serves: bool

    @property
    def family(self) -> str:
        """Return the family: g5 of ml.g5.xlarge."""
        return self.name.split(".")[1]

    @property
    def size(self) -> tuple[float, ...]:
        """Return a key that sorts the small types of a kind first, as prices do: CPUs that compute
        in bfloat16 before others, and those whose speed is limited (t2, t3) last."""
        is_burstable = self.family.startswith("t") and not self.devices
        memory = self.devices * self.device.memory
        slow = self.device.kind == "cpu" and not self.device.bf16
        return (is_burstable, slow, memory, self.vcpus, self.memory)


@dataclass(frozen=True)
class InstanceTable:
    """All instance types on which the images run."""

    instances: Sequence[Instance]
    left_out: Mapping[str, str]
    """The reason by the family on which no image runs."""
    origin: str


def read_table() -> InstanceTable:
    """Read types.json."""
    content = json.loads(_FILE.read_text(encoding="utf-8"))
    devices = {
        key: ComputeDevice(
            name=entry["name"], kind=entry["kind"], bf16=entry["bf16"],
            memory=entry.get("mib", 0) * _MIB, cores=entry.get("cores", 1),
            gb_s=entry.get("gb_s"), tflops=entry.get("tflops"), source=entry["source"],
        )
        for key, entry in content["devices"].items()
    }  # fmt: skip
    instances = [
        Instance(
            name=f"ml.{family}.{size}", device=devices[entry["device"]], devices=count,
            vcpus=vcpus, memory=mib * _MIB, network=mbits and mbits / 1000,
            trains="training" in uses, serves="serving" in uses,
        )
        for family, entry in content["families"].items()
        for size, (count, vcpus, mib, mbits, uses) in entry["sizes"].items()
    ]  # fmt: skip
    return InstanceTable(instances, content["left_out"], content["about"]["instances"])
