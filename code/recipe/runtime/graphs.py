"""Record work on a device, and repeat it by one launch instead of some hundred.

Work is recorded once for each bucket, which is what a recorded kernel cannot change: the shapes of
a batch's tensors and its numbers. A replay reads the batch from the tensors that were recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from recipe.console import say

Batch = Mapping[str, Any]
Work = Callable[[Batch], Sequence[Tensor]]
"""Computes a batch. It must read no value on the CPU."""
Bucket = tuple[list[Tensor], Callable[[], Any], list[Tensor]]
"""The tensors of a recorded batch, what computes them again, and the results."""


class Recorder(Protocol):
    """Records work on a device."""

    def record(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """Run `work`, maybe several times, to record it; return what repeats its operations with
        the same tensors."""


class CudaRecorder:
    """Records as CUDA graphs, which share memory for what they do not return."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """Run `work` three times on another stream, as PyTorch's documentation says, and record it
        in a fourth. Other threads copy batches and checkpoints meanwhile."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        replay: Callable[[], Any] = graph.replay
        return replay


class Graphs:
    """Graphs of the same work, by bucket.

    Args:
        most: Graphs, each of which costs memory; further buckets are computed without one.
    """

    def __init__(self, work: Work, recorder: Recorder, most: int) -> None:
        self._work, self._recorder, self._most = work, recorder, most
        self._buckets: dict[Any, Bucket] = {}
        self._has_logged_most = False

    def run(self, batch: Batch) -> Sequence[Tensor]:
        """Compute a batch; return copies of the results."""
        leaves, form = pytree.tree_flatten(batch)
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        key = (form, *(
            (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ))  # fmt: skip
        if key not in self._buckets and len(self._buckets) == self._most:
            if not self._has_logged_most:
                say(f"graphs: {self._most} are recorded, other shapes are computed without")
                self._has_logged_most = True
            return self._work(batch)
        if key not in self._buckets:
            self._buckets[key] = self.record_bucket(leaves, form)
        inputs, replay, values = self._buckets[key]
        torch._foreach_copy_(inputs, given, non_blocking=True)
        replay()
        return [value.clone() for value in values]

    def record_bucket(self, leaves: Sequence[Any], form: Any) -> Bucket:
        """Record a batch, whose parts are `leaves` in the `form` of a tree."""
        fixed = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        batch, values = pytree.tree_unflatten(fixed, form), list[Tensor]()

        def work() -> None:
            values[:] = self._work(batch)

        caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # a cached weight would be of another recording
        try:
            replay = self._recorder.record(work)
        finally:
            torch.set_autocast_cache_enabled(caches)
        return [leaf for leaf in fixed if isinstance(leaf, Tensor)], replay, values
