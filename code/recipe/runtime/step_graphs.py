"""Compute forward and backward passes by graphs: one launch instead of some hundred.

In small batches a GPU waits for the CPU, which starts each kernel (docs/GPU.md). A graph is
recorded once for each bucket, which is what a recorded kernel cannot change: the shapes of a
batch's tensors and its numbers. A replay reads the batch from the tensors that were recorded, and
adds to the same gradients. The optimizer, clipping and evaluations are outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import TrainingArguments

from recipe.console import say
from recipe.runtime import distribution

_MOST = 8
"""Graphs of a training, each of which costs memory; further buckets are computed without one."""

Batch = Mapping[str, Any]
Step = Callable[[Batch], Sequence[Tensor]]
"""Computes the gradients of a batch, which are added to those of the weights; returns values."""


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


def why_not(model: nn.Module, args: TrainingArguments, is_flat: bool) -> str | None:
    """Return why a training cannot compute by graphs; None if it can. `is_flat` says whether a
    batch is one row of samples, whose attention reads no value on the CPU."""
    if args.device.type != "cuda":
        return "graphs are for CUDA devices"
    if not is_flat:
        return "its batches are not rows of samples for flash attention"
    if args.world_size > 1:
        return "several processes sum gradients while these are computed"
    if args.fp16:
        return "float16 scales the loss by a number that changes"
    if "lomo" in str(args.optim):
        return "the backward pass updates the weights"
    if args.torch_compile:
        return "the model is compiled"
    if args.gradient_checkpointing:
        return "recomputed layers read the state of random numbers"
    if distribution.has_changing_buffers(model):
        return "a forward pass changes buffers of the model"
    return None


class StepGraphs:
    """The graphs of a training, by bucket.

    Args:
        weights: Those that are trained.
        step: The work to record. It must read no value on the CPU.
    """

    def __init__(self, weights: Sequence[nn.Parameter], step: Step, recorder: Recorder) -> None:
        self._weights, self._work, self._recorder = weights, step, recorder
        self._gradients: list[Tensor] = []
        self._buckets: dict[Any, tuple[list[Tensor], Callable[[], Any], list[Tensor]]] = {}
        self._has_logged_most = False

    def run(self, batch: Batch) -> Sequence[Tensor]:
        """Compute the gradients of a batch and add them to those of the weights; return the values
        of the step.

        After an optimizer step the trainer sets the gradients to None. Here they come back as zeros
        in the memory that was recorded.
        """
        leaves, form = pytree.tree_flatten(batch)
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        key = (form, *(
            (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ))  # fmt: skip
        if key not in self._buckets and len(self._buckets) == _MOST:
            if not self._has_logged_most:
                say(f"graphs: {_MOST} are recorded, batches of other shapes are computed without")
                self._has_logged_most = True
            self._attach()
            return self._work(batch)
        self._attach()
        if key not in self._buckets:
            self._buckets[key] = self._record(leaves, form)
        inputs, replay, values = self._buckets[key]
        torch._foreach_copy_(inputs, given, non_blocking=True)
        replay()
        return [value.clone() for value in values]

    @torch.no_grad()
    def _attach(self) -> None:
        if not self._gradients:
            self._gradients = [torch.zeros_like(weight) for weight in self._weights]
        pairs = zip(self._weights, self._gradients, strict=True)
        if lost := [pair for pair in pairs if pair[0].grad is None]:
            torch._foreach_zero_([gradient for _, gradient in lost])
        for weight, gradient in lost:
            weight.grad = gradient

    def _record(
        self, leaves: Sequence[Any], form: Any
    ) -> tuple[list[Tensor], Callable[[], Any], list[Tensor]]:
        """Record a bucket. Gradients of earlier batches and random numbers are as before."""
        fixed = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        batch, values = pytree.tree_unflatten(fixed, form), list[Tensor]()
        kept = [gradient.clone() for gradient in self._gradients]
        devices = {weight.device for weight in self._weights if weight.device.type != "cpu"}

        def work() -> None:
            values[:] = self._work(batch)

        caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # a cached weight would be of another recording
        try:
            with torch.random.fork_rng(list(devices)):
                replay = self._recorder.record(work)
        finally:
            torch.set_autocast_cache_enabled(caches)
        with torch.no_grad():
            torch._foreach_copy_(self._gradients, kept)
        return [leaf for leaf in fixed if isinstance(leaf, Tensor)], replay, values
