"""Tensors that may be sharded over processes (FSDP2): whole on the host, and back in their places.

A sharded tensor is gathered by all processes together, one after the other, so that a device holds
one whole tensor at a time. Plain tensors are those of any other training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def on_host(value: Any, keeps: bool, copies: bool = True, into: Any = None) -> Any:
    """`value`, a tree of mappings and sequences, with each tensor whole and on the CPU.

    Every process must call it where a tensor is sharded.

    Args:
        keeps: Whether this process wants them; the others get None in the place of each tensor.
        copies: Whether a tensor that is there already is copied, so that it keeps its numbers.
        into: What an earlier call with `copies` gave and nobody reads any more. Its tensors are
            written over and given again where they fit: new memory takes longer than the copy.
    """
    if isinstance(value, Tensor):
        whole: Any = value.detach()
        is_sharded = hasattr(whole, "full_tensor")
        if is_sharded:
            whole = whole.full_tensor()
        if not keeps:
            return None
        if whole.device.type == "cpu" and not copies and not is_sharded:
            return whole
        # An answer of a collective has no storage of its own, which a file could be written from.
        fits = isinstance(into, Tensor) and (into.shape, into.dtype) == (whole.shape, whole.dtype)
        if not fits:
            # Of the shape: empty_like keeps the wrapper that torch-xla puts around its tensors.
            into = torch.empty(whole.shape, dtype=whole.dtype, device="cpu")
        return into.copy_(whole)
    if isinstance(value, Mapping):
        places = into if isinstance(into, Mapping) else {}
        return {key: on_host(each, keeps, copies, places.get(key)) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        same = isinstance(into, (list, tuple)) and len(into) == len(value)
        pairs = zip(value, into if same else [None] * len(value), strict=True)
        return type(value)(on_host(each, keeps, copies, place) for each, place in pairs)
    return value


def like(whole: Tensor, place: Tensor) -> Tensor:
    """`whole`, the same on every process, as this process has its part of the tensor `place`."""
    sharded: Any = place
    if not hasattr(sharded, "full_tensor"):
        return whole
    from torch.distributed.tensor import distribute_tensor  # its import takes time

    on_device = whole.to(sharded.device)
    return distribute_tensor(on_device, sharded.device_mesh, sharded.placements)


@torch.no_grad()
def fill(places: Mapping[str, Tensor], stored: Mapping[str, Tensor] | None, shares: bool) -> None:
    """Put `stored` into `places`, in the order of these; every process must call it.

    Args:
        stored: By the same names; None on a process that has none, where it is shared.
        shares: Whether the first process sends what it has to the others.
    """
    for name, place in places.items():
        whole = torch.empty(place.shape, dtype=place.dtype) if stored is None else stored[name]
        if shares:
            whole = whole.to(place.device, place.dtype).contiguous()
            dist.broadcast(whole, src=0)
        place.copy_(like(whole, place))
