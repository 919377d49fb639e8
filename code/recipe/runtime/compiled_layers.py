"""Compile each layer of a model alone, whole: layers alike share a program.

A compiled model takes a minute to start, compiled layers seconds, since twelve layers are compiled
once. Compiled programs are kept below the checkpoints, where a restarted job finds them. The rest
of the model, its loss and evaluations are computed as before, so weights have their usual names.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from recipe.runtime.device import cpu_flags

FOLDER = "torch-compile-cache"
"""The folder of compiled programs, below the checkpoints."""
_DEVICES = ("cpu", "cuda")
_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_DEFAULT = "torchinductor_"
"""How the name of PyTorch's own folder begins, which a job would lose."""
_MOST = 64
"""Programs of a layer: by shapes of a batch, and by whether its input has gradients."""


def why_not(model: nn.Module, args: TrainingArguments, is_packed: bool) -> str | None:
    """Return why a training cannot compile layer by layer; None if it can. `is_packed` says whether
    batches have few shapes."""
    where = "neuron" if args.torch_compile_backend == "neuron" else args.device.type
    if where not in _DEVICES:
        return f"it is not tested on {where}"
    if args.fsdp:
        return "weights are sharded"
    if any(adapter.use_dora for adapter in getattr(model, "peft_config", {}).values()):
        return "PyTorch cannot trace use_dora"
    if not is_packed:
        return "batches are padded to many lengths"
    if not any(_layers(model)):
        return "the model has no repeated layers"
    return None


class CompiledLayers:
    """The layers of a model, compiled.

    Args:
        args: They name the backend and its mode, and the folder of checkpoints, in which compiled
            programs are kept unless TORCHINDUCTOR_CACHE_DIR names another one.
    """

    def __init__(self, model: nn.Module, args: TrainingArguments) -> None:
        # Programs for a CPU have its instructions, and another host may lack them.
        kind = hashlib.sha256(" ".join(sorted(cpu_flags())).encode()).hexdigest()[:8]
        # PyTorch itself sets the variable, when it is imported.
        if Path(os.environ.get(_VARIABLE, _DEFAULT)).name.startswith(_DEFAULT):
            os.environ[_VARIABLE] = str(Path(str(args.output_dir)) / FOLDER / kind)
        config: Any = torch._dynamo.config
        config.recompile_limit = max(_MOST, config.recompile_limit)
        # No dynamic shapes: a resumed job would see another one first, and round otherwise.
        how: Any = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
        self._forwards = [
            (layer, torch.compile(layer.forward, fullgraph=True, dynamic=False, **how))
            for layer in _layers(model)
        ]

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Compute the layers by their programs."""
        before = [vars(layer).get("forward") for layer, _ in self._forwards]
        for layer, compiled in self._forwards:
            vars(layer)["forward"] = compiled
        try:
            yield
        finally:
            for (layer, _), usual in zip(self._forwards, before, strict=True):
                if usual is None:
                    del vars(layer)["forward"]
                else:
                    vars(layer)["forward"] = usual


def describe() -> str:
    """Say how many graphs were compiled, and how many programs were found in the cache."""
    counters: Any = torch._dynamo.utils.counters  # importing it takes seconds
    hits, misses = (counters["inductor"][f"fxgraph_cache_{end}"] for end in ("hit", "miss"))
    breaks = sum(counters["graph_break"].values())
    return (
        f"{counters['stats']['unique_graphs']} graphs with {breaks} breaks, {misses} programs "
        f"compiled and {hits} found in the cache"
    )


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of the largest lists of modules of one class."""
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len({type(part) for part in child}) == 1:
            yield from child
        else:
            yield from _layers(child)
