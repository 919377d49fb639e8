"""What the legacy stack torch-xla (trn1) needs beyond ordinary PyTorch code.

torch-xla records operations into a graph, which `sync` hands to the device. A new graph is compiled
first, which takes minutes on a Neuron device. So the Trainer must call `sync` after the same
operations each time, and must not read from the device in between.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from transformers.utils.import_utils import is_torch_xla_available


def is_used() -> bool:
    """Return whether the Trainer uses torch-xla, as it does if torch-xla is installed.

    The environment variable USE_TORCH_XLA=0 turns it off.
    """
    return bool(is_torch_xla_available())


def is_turned_off() -> bool:
    """Return whether torch-xla is installed, but not used."""
    return importlib.util.find_spec("torch_xla") is not None and not is_used()


def _module(name: str) -> Any:
    # Imported by name, since it is installed in the images of one stack only.
    return importlib.import_module(name)


def device_type() -> str:
    """Return `NEURON`, `CPU` or another kind that PJRT_DEVICE names."""
    return str(_module("torch_xla.runtime").device_type())


def register_backend() -> None:
    """Make `xla` a backend of torch.distributed."""
    _module("torch_xla.distributed.xla_backend")


def seed(number: int) -> None:
    """Seed the device's random numbers, which torch.manual_seed does not."""
    _module("torch_xla.core.xla_model").set_rng_state(number)


def sync() -> None:
    """Hand the graph recorded so far to the device."""
    _module("torch_xla").sync()


def compiled() -> tuple[int, float]:
    """Return how many graphs this process has compiled, and the seconds that took."""
    compile_time = _module("torch_xla.debug.metrics").metric_data("CompileTime")
    if compile_time is None:
        return 0, 0.0
    count, nanoseconds, _ = compile_time
    return int(count), nanoseconds / 1e9


def programs() -> int:
    """Return how many programs this process has compiled or loaded; 0 without torch-xla."""
    if not is_used():
        return 0
    return int(_module("torch_xla.runtime").get_num_cached_compilation_graph())
