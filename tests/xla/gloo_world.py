"""Runs a script in a process of torchrun's with torch-xla's collectives done by gloo.

    python -m torch.distributed.run --nproc_per_node 2 gloo_world.py all code/train.py --key value

torch-xla's CPU device knows no other process: each would be a world of its own. Here it gets the
world and the rank that torchrun gave, and sums go through the hosts' network. What is summed:
`all`; `start`, only single numbers, such as that of the recipe's check before it trains; `nothing`.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr


@functools.cache
def hosts() -> Any:
    return dist.new_group(backend="gloo")


def all_reduce(
    what: str,
    kind: str,
    inputs: Any,
    scale: float = 1.0,
    groups: Any = None,
    pin_layout: bool = True,
) -> Any:
    """torch-xla's function of this name, for sums over the whole world."""
    assert kind == xm.REDUCE_SUM
    assert not groups
    tensors = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    torch_xla.sync()  # One graph for all of them: each copy to the host would compile its own.
    flat = torch.cat([tensor.detach().cpu().flatten() for tensor in tensors])
    if what == "all" or (what == "start" and len(flat) == 1):
        dist.all_reduce(flat, group=hosts())
    summed = (flat * scale).split([tensor.numel() for tensor in tensors])
    with torch.no_grad():
        for tensor, values in zip(tensors, summed, strict=True):
            tensor.copy_(values.view_as(tensor))
    return inputs


def rendezvous(tag: str, payload: bytes = b"", replicas: Any = ()) -> list[bytes]:
    """torch-xla's function of this name."""
    payloads: list[bytes] = [b""] * dist.get_world_size()
    dist.all_gather_object(payloads, payload, group=hosts())
    return payloads


if __name__ == "__main__":
    summed, script = sys.argv[1:3]
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    xr.world_size = lambda: world
    xr.global_ordinal = lambda: rank
    xm.all_reduce = functools.partial(all_reduce, summed)
    xm.rendezvous = rendezvous
    sys.argv = sys.argv[2:]
    sys.path.insert(0, os.path.dirname(script))  # noqa: PTH120
    runpy.run_path(script, run_name="__main__")
