"""Compute forward and backward passes by graphs (`recipe.runtime.graphs`).

In small batches a GPU waits for the CPU, which starts each kernel (docs/GPU.md). A replay adds to
the gradients that were recorded. The optimizer, clipping and evaluations are outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from recipe.runtime import distribution
from recipe.runtime.graphs import Batch, Bucket, Graphs, Recorder, Work

_MOST = 8


def why_not(
    model: nn.Module, args: TrainingArguments, is_flat: bool, compiles_layers: bool
) -> str | None:
    """Return why a training cannot compute by graphs; None if it can.

    Args:
        is_flat: Whether a batch is one row of samples, whose attention reads no value on the CPU.
        compiles_layers: Whether layers are compiled one at a time. Their programs are made in the
            runs before the recording, and start kernels on the current stream.
    """
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
    if args.torch_compile and not compiles_layers:
        return "the whole model is compiled"
    if args.gradient_checkpointing:
        return "recomputed layers read the state of random numbers"
    if distribution.has_changing_buffers(model):
        return "a forward pass changes buffers of the model"
    return None


class StepGraphs(Graphs):
    """The graphs of a training.

    Args:
        weights: Those that are trained.
        step: Computes the gradients of a batch, which are added to those of the weights; returns
            values.
    """

    def __init__(self, weights: Sequence[nn.Parameter], step: Work, recorder: Recorder) -> None:
        super().__init__(step, recorder, _MOST)
        self._weights = weights
        self._gradients: list[Tensor] = []

    def run(self, batch: Batch) -> Sequence[Tensor]:
        """Compute the gradients of a batch and add them to those of the weights; return the values
        of the step.

        After an optimizer step the trainer sets the gradients to None. Here they come back as zeros
        in the memory that was recorded.
        """
        self._attach()
        return super().run(batch)

    @torch.no_grad()
    def _attach(self) -> None:
        if not self._gradients:
            self._gradients = [torch.zeros_like(weight) for weight in self._weights]
        pairs = zip(self._weights, self._gradients, strict=True)
        if lost := [pair for pair in pairs if pair[0].grad is None]:
            torch._foreach_zero_([gradient for _, gradient in lost])
        for weight, gradient in lost:
            weight.grad = gradient

    def record_bucket(self, leaves: Sequence[Any], form: Any) -> Bucket:
        """Record a bucket. Gradients of earlier batches and random numbers are as before."""
        kept = [gradient.clone() for gradient in self._gradients]
        devices = {weight.device for weight in self._weights if weight.device.type != "cpu"}
        with torch.random.fork_rng(list(devices)):
            bucket = super().record_bucket(leaves, form)
        with torch.no_grad():
            torch._foreach_copy_(self._gradients, kept)
        return bucket
