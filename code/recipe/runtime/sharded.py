"""Copy tensors that may be sharded over processes (FSDP2) to the host, and back.

All processes gather the sharded tensors one after the other, so that a device holds one whole
tensor at a time. Tensors that are not sharded are copied directly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def copy_to_host(value: Any, keeps: bool, copies: bool = True, into: Any = None) -> Any:
    """Return `value`, a tree of mappings and sequences, with whole tensors on the CPU.

    With sharded tensors, a collective of all processes.

    Args:
        keeps: Whether this process needs the tensors; otherwise each is None.
        copies: Whether to copy tensors that are already on the CPU.
        into: The unused result of an earlier call with `copies`, whose memory is reused:
            allocating takes longer than copying.
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
        # The result of a collective has no storage from which a file could be written.
        fits = isinstance(into, Tensor) and (into.shape, into.dtype) == (whole.shape, whole.dtype)
        if not fits:
            # Not empty_like, which keeps torch-xla's wrapper of tensors.
            into = torch.empty(whole.shape, dtype=whole.dtype, device="cpu")
        return into.copy_(whole)
    if isinstance(value, Mapping):
        targets = into if isinstance(into, Mapping) else {}
        return {
            key: copy_to_host(item, keeps, copies, targets.get(key)) for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        same = isinstance(into, (list, tuple)) and len(into) == len(value)
        pairs = zip(value, into if same else [None] * len(value), strict=True)
        return type(value)(copy_to_host(item, keeps, copies, target) for item, target in pairs)
    return value


def shard_like(whole: Tensor, target: Tensor) -> Tensor:
    """Return `whole`, which is equal on all processes, sharded like the tensor `target`."""
    sharded: Any = target
    if not hasattr(sharded, "full_tensor"):
        return whole
    from torch.distributed.tensor import distribute_tensor  # slow to import

    on_device = whole.to(sharded.device)
    return distribute_tensor(on_device, sharded.device_mesh, sharded.placements)


@torch.no_grad()
def fill(targets: Mapping[str, Tensor], stored: Mapping[str, Tensor] | None, shares: bool) -> None:
    """Copy `stored` into `targets`. A collective of all processes.

    Args:
        stored: Tensors by the same names; with `shares`, None on processes without them.
        shares: Whether the first process sends its tensors to the others.
    """
    for name, target in targets.items():
        whole = torch.empty(target.shape, dtype=target.dtype) if stored is None else stored[name]
        if shares:
            whole = whole.to(target.device, target.dtype).contiguous()
            dist.broadcast(whole, src=0)
        target.copy_(shard_like(whole, target))
