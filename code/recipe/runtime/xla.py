"""Computing through torch-xla: which device it is, and what PyTorch code does not say itself there.

torch-xla computes nothing when an operation is written: operations become a graph, and `sync` hands
that graph to the device. A graph that was not seen before is compiled first, which takes minutes on
a Neuron device. So the Trainer must meet `sync` after the same operations each time, and must not
read from the device in between.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from transformers.utils.import_utils import is_torch_xla_available

_READS = "aten::_local_scalar_dense"
"""torch-xla's counter of `Tensor.item`, `bool(tensor)` and the like."""


def in_use() -> bool:
    """Whether torch-xla is what the Trainer computes by, as it is wherever it is installed.

    The environment variable USE_TORCH_XLA=0 turns it off.
    """
    return bool(is_torch_xla_available())


def _module(name: str) -> Any:
    # Installed in the images of one stack only, so no import statement can name it.
    return importlib.import_module(name)


def device_type() -> str:
    """`NEURON`, `CPU` or another kind that PJRT_DEVICE names."""
    return str(_module("torch_xla.runtime").device_type())


def join(environ: Mapping[str, str]) -> None:
    """Make the processes that torchrun started one process group; nothing to do with one."""
    if int(environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        _module("torch_xla.distributed.xla_backend")
        dist.init_process_group("xla")


def seed(number: int) -> None:
    """Seed what is random on the device, which torch.manual_seed leaves as it is."""
    _module("torch_xla.core.xla_model").set_rng_state(number)


def sync() -> None:
    """Hand all that was written so far to the device."""
    _module("torch_xla").sync()


def on_host(model: Any) -> Any:
    """A model that is trained no more, on the CPU."""
    model.to("cpu")
    model.tie_weights()  # moving between kinds of devices makes one tensor two
    return model


def compiled() -> tuple[int, float]:
    """Graphs that this process had compiled so far, and the seconds that took."""
    compile_time = _module("torch_xla.debug.metrics").metric_data("CompileTime")
    if compile_time is None:
        return 0, 0.0
    count, nanoseconds, _ = compile_time
    return int(count), nanoseconds / 1e9


def work() -> tuple[int, int]:
    """Programs that this process compiled or took from a cache on disk so far, and how often code
    has looked at a number on the device; 0 and 0 without torch-xla."""
    if not in_use():
        return 0, 0
    programs = _module("torch_xla.runtime").get_num_cached_compilation_graph()
    return int(programs), int(_module("torch_xla.debug.metrics").counter_value(_READS) or 0)
