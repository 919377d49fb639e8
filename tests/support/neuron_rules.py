"""code/train.py under the rules of TorchNeuron, on stock torch and a CPU.

    python neuron_rules.py OUTPUT [hyperparameters]        or the same through torchrun

A Dynamo backend called `neuron` counts graphs and refuses symbolic shapes; in a single process,
fullgraph turns a graph break into an error; the process group called `neuron` is gloo. Each process
writes its counts to OUTPUT/<rank>.json. With LONELY=1 the group reduces over one process only,
whatever its world size, as torch-xla's does on a CPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

TRAIN = Path(__file__).resolve().parents[2] / "code" / "train.py"
shapes: list[list[str]] = []
operators: dict[str, bool] = {}
"""The operators of a watched run, and whether one returned float64."""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the operators, and which compute in float64: TorchNeuron uses float32 for them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        values = answer if isinstance(answer, (list, tuple)) else [answer]
        types_of = [value.dtype for value in values if isinstance(value, torch.Tensor)]
        operators[str(func)] = operators.get(str(func), False) or torch.float64 in types_of
        return answer


def compile_graph(graph: Any, inputs: list[Any]) -> Any:
    """Count a graph, and return it unchanged."""
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    sizes = [size for tensor in tensors for size in tensor.shape]
    symbols = [value for value in (*inputs, *sizes) if isinstance(value, torch.SymInt)]
    assert not symbols, f"a symbolic shape: {symbols}"
    shapes.append([str(tuple(value.shape)) for value in inputs if value.dtype == torch.int64])
    return graph.forward


def make_group(store: dist.Store, rank: int, size: int, timeout: Any) -> Any:
    if os.environ.get("LONELY"):
        return dist.ProcessGroupGloo(dist.PrefixStore(str(rank), store), 0, 1, timeout)
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def main() -> None:
    output, sys.argv = Path(sys.argv[1]), [str(TRAIN), *sys.argv[2:]]
    sys.path.insert(0, str(TRAIN.parent))
    torch._dynamo.register_backend(compile_graph, name="neuron")
    dist.Backend.register_backend("neuron", make_group, devices=["cpu"])
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        os.environ["ACCELERATE_DYNAMO_USE_FULLGRAPH"] = "True"
    else:  # accelerate compiles DDP around the model, and DDP itself is no graph
        dist.init_process_group("neuron")
        assert dist.get_backend() == "neuron"
    # The host computes the proof of the written model; the one in memory is not compared there.
    from recipe.backend.proofs import trained_answers
    from recipe.training import proving

    def unwatched(function: Any) -> Any:
        def run(*arguments: Any) -> Any:
            with _disable_current_modes():
                return function(*arguments)

        return run

    proving.prove = unwatched(proving.prove)
    trained_answers.compute = unwatched(trained_answers.compute)
    watch = Watch() if os.environ.get("WATCH") else contextlib.nullcontext()  # type: ignore[no-untyped-call]
    try:
        with watch:
            runpy.run_path(str(TRAIN), run_name="__main__")
    finally:
        breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
        seen = {
            "graphs": len(shapes),
            "shapes": shapes,
            "breaks": breaks,
            "operators": operators,
        }
        (output / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
