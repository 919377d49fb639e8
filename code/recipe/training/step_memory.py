"""Predict the memory of a training step, also of a GPU that is not here.

A step of the largest batch is computed with fake tensors, which have shapes and no numbers; what is
alive at once is counted. Builds of torch for CPUs cannot compute gradients of fake CUDA tensors, so
the tensors are the CPU's, and a GPU's precision and attention are put in place of the CPU's.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import Trainer

from recipe.batching import batches
from recipe.batching.batches import Batch
from recipe.models import flat_attention, lora, quantized
from recipe.models.bf16_weights import Bf16Weights
from recipe.plan import trainer_arguments
from recipe.runtime import memory
from recipe.training.preparation import PreparedTraining

_ALLOCATED = 512
"""A GPU's allocator hands out multiples of so many bytes."""
_BUCKETS = 2
"""Graphs of a training, about: a rare fuller batch has another shape (`recipe.batching.flat`)."""
_IN_FLOAT32 = ("layer_norm", "rms_norm", "group_norm", "softmax", "log_softmax")
"""Functions that autocast computes in float32 on a GPU, and not on a CPU."""


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes of one process at the peak of a training step."""

    weights: int
    gradients: int
    optimizer: int
    activations: int | None
    """What a batch adds to the others; None if the model reads values, which fake tensors lack."""
    copies: int = 0
    """Of the weights in bfloat16."""
    graphs: int = 0
    """What graphs keep: the batch that each reads, and gradients while one is recorded."""

    @property
    def total(self) -> int:
        """Return all bytes that are known."""
        kept = self.weights + self.copies + self.gradients + self.optimizer + self.graphs
        return kept + (self.activations or 0)

    def describe(self) -> str:
        """Name the parts and their sizes."""
        parts = {"weights": self.weights, "gradients": self.gradients,
                 "optimizer": self.optimizer, "activations": self.activations}  # fmt: skip
        extra = {"bfloat16 copies": self.copies, "graphs": self.graphs}
        parts |= {part: count for part, count in extra.items() if count}
        return ", ".join(
            f"{part} {'unknown' if count is None else memory.size(count)}"
            for part, count in parts.items()
        )


def predict(
    prepared: PreparedTraining,
    kind: str,
    bf16: bool,
    *,
    checkpoints: bool | None = None,
    in_4_bits: bool = False,
    shards: int = 1,
) -> StepMemory:
    """Predict the peak of a step of the largest batch, within the first or later steps.

    LoRA is known by the model's weights, the optimizer and accumulation by the plan.

    Args:
        kind: `cpu`, or `cuda` for a GPU of compute capability 8.0 or later if `bf16`.
        bf16: Whether the device computes in bfloat16, by autocast.
        checkpoints: Whether layers are computed again for their gradients
            (gradient_checkpointing); None as planned.
        in_4_bits: Whether a GPU keeps the frozen weights in 4 bits.
        shards: Processes that share weights, gradients and optimizer (FSDP).
    """
    model: Any = prepared.loaded.model
    args = prepared.loaded.arguments
    checkpoints = bool(args.gradient_checkpointing) if checkpoints is None else checkpoints
    compressed = quantized.layers(model) if in_4_bits else ()
    saved = sum(
        layer.weight.nbytes - int(layer.weight.numel() * quantized.BYTES) for layer in compressed
    )
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    held = [*model.parameters(), *model.buffers()]
    weights, gradients = (sum(part.nbytes for part in parts) for parts in (held, trained))
    peak: int | None = None
    copies = graphs = 0
    with contextlib.suppress(RuntimeError), _laid_out_for(prepared, kind, bf16) as batch:
        if prepared.loaded.cuda_graphs and flat_attention.is_used(lora.bare(model).config):
            tensors = [part for part in tree_leaves(batch) if isinstance(part, Tensor)]
            graphs = gradients + _BUCKETS * sum(part.nbytes for part in tensors)
        peak, copies = _peak(prepared, batch, kind, bf16, checkpoints)
    return StepMemory(
        weights=(weights - saved) // shards,
        gradients=gradients // shards,
        optimizer=_state_bytes(prepared, trained) // shards,
        activations=None if peak is None else max(0, peak - gradients),
        copies=copies,
        graphs=graphs,
    )


def _state_bytes(prepared: PreparedTraining, trained: list[Tensor]) -> int:
    """Return what the optimizer keeps for the trained weights, from a step on fake ones."""
    args = prepared.loaded.arguments
    with FakeTensorMode(allow_non_fake_inputs=True):
        weights = [
            torch.nn.Parameter(torch.empty(part.shape, dtype=part.dtype)) for part in trained
        ]
        for weight in weights:
            weight.grad = torch.empty_like(weight)
        try:
            kind, options = Trainer.get_optimizer_cls_and_kwargs(args, prepared.loaded.model)
            optimizer = kind(weights, **options)
            optimizer.step()
        except Exception:  # of a package that is not here, or that calls its own kernels
            size = 2 if "8bit" in trainer_arguments.name_of(args.optim) else 8
            return size * sum(weight.numel() for weight in weights)
        states = [value for state in optimizer.state.values() for value in state.values()]
        return sum(state.nbytes for state in states if isinstance(state, Tensor))


@contextlib.contextmanager
def _laid_out_for(prepared: PreparedTraining, kind: str, bf16: bool) -> Iterator[Batch]:
    """Yield the largest batch on a kind of device, while the model has the attention used there."""
    loaded, decided = prepared.loaded, prepared.batches
    model, training, layout = loaded.model, decided.training, decided.train_layout
    inner = lora.bare(model)
    before = inner.config._attn_implementation
    if kind != loaded.arguments.device.type:
        training = replace(training, size=decided.cut.given[0], accumulation=decided.cut.given[1])
        if before != "eager":
            inner.set_attn_implementation("sdpa")
        packs = loaded.packing is not False and loaded.objective.packs(model)
        dtype = torch.bfloat16 if bf16 else torch.float32
        device, least = torch.device("cuda"), flat_attention.LOWEST_CAPABILITY
        if packs and flat_attention.why_not(inner.config, device, dtype, least) is None:
            flat_attention.use(model)
    try:
        drawn = [(training.samples, rows) for rows in training.typical(layout.balanced)]
        if kind != loaded.arguments.device.type:
            layout = loaded.objective.layout(model, packs, training.size, loaded.pad_id, drawn)
        samples, rows = max(drawn, key=lambda batch: layout.computed_tokens(*batch))
        yield batches.finish(samples, layout, rows, training.size, 1)
    finally:
        if inner.config._attn_implementation != before:
            inner.set_attn_implementation(before)


def _peak(
    prepared: PreparedTraining, batch: Batch, kind: str, bf16: bool, checkpoints: bool
) -> tuple[int, int]:
    """Return the most bytes alive at once in a step, without weights, their copies and optimizer;
    and the bytes of the copies."""
    model: Any = prepared.loaded.model
    args, objective = prepared.loaded.arguments, prepared.loaded.objective
    was_training = model.training
    model.train()
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    if checkpoints:  # otherwise the Trainer has not turned it on yet
        getattr(model, f"{name}_checkpointing_enable")(args.gradient_checkpointing_kwargs)
    live = _Live(_ALLOCATED if kind == "cuda" else 1)
    precision = torch.autocast("cpu", torch.bfloat16, enabled=bf16)
    inner = lora.bare(model)
    forward = vars(inner).get("forward")
    copies = Bf16Weights(model) if bf16 and prepared.loaded.bf16_weights else None
    hidden = copies.used(None) if copies else contextlib.nullcontext()
    as_gpu = _functions_of_gpu() if kind == "cuda" else contextlib.nullcontext()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, live, as_gpu, hidden:
            held = live.now
            state = {
                name: torch.empty(part.shape, dtype=part.dtype).requires_grad_(part.requires_grad)
                for name, part in (*model.named_parameters(), *model.named_buffers())
            }
            live.forget()
            # Gradients of earlier batches are there.
            for name, part in state.items() if args.gradient_accumulation_steps > 1 else ():
                part.grad = torch.empty_like(part) if part.requires_grad else None
                if copies and part.requires_grad:  # it adds to the gradients of these
                    dict(model.named_parameters())[name].grad = part.grad
            inputs = tree_map_only(Tensor, fake.from_tensor, batch)
            labels, real = inputs.pop("labels"), inputs.pop("rows") >= 0
            total = inputs.pop("total")
            with precision:
                logits = functional_call(model, state, (), inputs).logits
                losses = objective.losses(logits, labels, args.label_smoothing_factor)
                loss = (losses * real[: len(losses)]).sum() / total[0]
            del logits, losses
            loss.backward()
    finally:
        if copies:
            model.zero_grad()
            del inner.forward
            vars(inner).update({"forward": forward} if forward else {})
        model.train(was_training)
        if checkpoints:
            getattr(model, f"{name}_checkpointing_disable")()
    return live.peak, held


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that operations make and that are alive.

    Args:
        multiple: Of how many bytes an allocation is.
    """

    def __init__(self, multiple: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._multiple, self.now, self.peak = multiple, 0, 0
        self._seen = weakref.WeakSet[Any]()

    def forget(self) -> None:
        """Begin to count at 0."""
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._note, outputs)
        return outputs

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = -(-storage.nbytes() // self._multiple) * self._multiple
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.now -= size


@contextlib.contextmanager
def _functions_of_gpu() -> Iterator[None]:
    """Let PyTorch's functions do with fake tensors of a CPU what autocast and attention do on a
    GPU."""

    def widened(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return function(*args, **options)
        args, options = tree_map_only(Tensor, Tensor.float, (args, options))
        return function(*args, **options)

    names, replaced = vars(functional), {name: vars(functional)[name] for name in _IN_FLOAT32}
    attention = functional.scaled_dot_product_attention
    names |= {name: functools.partial(widened, usual) for name, usual in replaced.items()}
    names["scaled_dot_product_attention"] = _efficient_attention
    try:
        yield
    finally:
        names |= {**replaced, "scaled_dot_product_attention": attention}


def _efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Return functional.scaled_dot_product_attention by the kernel that GPUs have for masks, which
    keeps no scores."""
    parts = [query, key, value]
    if torch.is_autocast_enabled("cpu"):
        parts = [part.bfloat16() for part in parts]
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        parts[1:] = [part.repeat_interleave(groups, dim=1) for part in parts[1:]]
    if attn_mask is not None:
        attn_mask = attn_mask.to(parts[0].dtype).expand(*query.shape[:3], key.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        *parts, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]
