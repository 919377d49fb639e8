"""A recorder of graphs for devices that have none (`recipe.runtime.graphs`)."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Replays(TorchDispatchMode):
    """Records PyTorch's operations, and repeats them with the tensors of the recording, as a graph
    does: nothing of Python runs again."""

    made: ClassVar[list["Replays"]] = []

    def __init__(self) -> None:
        super().__init__()
        self.recordings: list[list[Any]] = []
        self.replayed = 0
        self.made.append(self)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile's programs, which earlier runs have made, run while it records."""
        return True

    def record(self, work: Callable[[], Any]) -> Callable[[], Any]:
        for _ in range(2):
            work()
        calls: list[Any] = []
        self.recordings.append(calls)
        with self, torch.compiler.set_stance("fail_on_recompile"):
            work()

        @torch.no_grad()
        def replay() -> None:
            self.replayed += 1
            for func, args, kwargs, results in calls:
                again = tree_leaves(func(*args, **kwargs))
                for result, value in zip(tree_leaves(results), again, strict=True):
                    if isinstance(result, torch.Tensor) and result.data_ptr() != value.data_ptr():
                        result.copy_(value)

        return replay

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.recordings[-1].append((func, args, kwargs or {}, results))
        return results
