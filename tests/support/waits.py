"""Operations that make a process wait for its GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Waits(TorchDispatchMode):
    """Counts the operations for whose result a process would wait for its GPU."""

    NAMES = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "unique", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        # By a mask, of which it must know how many places are True.
        by_mask = name in ("index", "index_put_", "index_put") and any(
            each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]
        )
        if name.startswith(self.NAMES) or by_mask:
            self.found.append(name)
        return func(*args, **(kwargs or {}))
