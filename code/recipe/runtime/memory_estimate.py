"""Estimate the memory of a training step, by a step on fake tensors.

The model runs forward and backward on PyTorch's fake tensors, which have shapes but no data, with
the fullest batch of the real layout, and the bytes of live tensors are counted. So the estimate
includes the actual model, adapters, loss and layout. For a GPU, calls whose kernels differ from
those of a CPU (attention, dropout, autocast to float32) are replaced by the GPU's form.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

_BLOCK = 512
"""Granularity of CUDA allocations, in bytes."""
LIBRARIES = 64 << 20
"""What cuBLAS and cuBLASLt keep of a GPU's memory, as seen on an H200."""
_STATE_BYTES = {"adafactor": 0, "sgd": 0, "lion": 4, "8bit": 2, "rmsprop": 4, "adagrad": 4}
"""Bytes of optimizer state for each trained number, by a part of its name; others have Adam's 8."""
_IN_FLOAT32 = frozenset(
    (
        *(functional.layer_norm, functional.softmax, functional.log_softmax, torch.softmax),
        *(torch.log_softmax, Tensor.softmax, Tensor.log_softmax, functional.cross_entropy),
        *(functional.nll_loss, functional.mse_loss, functional.cosine_similarity),
        *(torch.cosine_similarity, torch.rsqrt, torch.pow, Tensor.pow, Tensor.norm),
        *(torch.linalg.vector_norm, torch.cumsum, Tensor.cumsum),
    )
)
"""Functions that autocast computes in float32 on a GPU, as far as models here call them."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes of one process at a step's peak, without the device's own context."""

    weights: int
    gradients: int
    """Gradients that are kept for the whole step."""
    optimizer: int
    step: int
    """Everything else at the peak: activations, copies in bfloat16, other gradients."""

    @property
    def total(self) -> int:
        """Return the sum."""
        return self.weights + self.gradients + self.optimizer + self.step


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How the step is computed."""

    on_gpu: bool
    dtype: torch.dtype | None
    """The precision of autocast; None without autocast."""
    optimizer: str = "adamw_torch_fused"
    processes: int = 1
    is_sharded: bool = False
    accumulation: int = 1
    checkpoints: bool = False
    """Whether activations are recomputed (gradient_checkpointing)."""
    smoothing: float = 0.0
    in_4_bits: Sequence[nn.Linear] = ()
    """The frozen layers whose weights will be in 4 bits; here they are unquantized."""
    bytes_of_4_bits: float = 0.0
    """Bytes of each of their weights, with its share of the scales."""


def estimate_step(
    model: Any,
    batch: Mapping[str, Any],
    losses: Callable[[Tensor, Tensor, float], Tensor],
    setting: Setting,
) -> Estimate:
    """Estimate the peak memory of a training step.

    Args:
        model: The model, on the CPU. Its weights are lost afterwards.
        batch: A batch of the layout (`recipe.batching.batches`).
        losses: Computes the loss of each sample from logits, labels and label smoothing.

    Raises:
        Exception: The model raises it, for instance if a shape depends on data.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # loads sympy

    numbers = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    names = (_STATE_BYTES[part] for part in _STATE_BYTES if part in setting.optimizer)
    optimizer = numbers * next(names, 8)
    gradients = 0
    if setting.checkpoints:
        recompute_activations(model)
    model.train()
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes, contextlib.ExitStack() as stack:
        weights = _use_fake_tensors(model, fakes, setting)
        for layer in setting.in_4_bits:
            count = layer.weight.numel()
            weights -= layer.weight.nbytes - math.ceil(count * setting.bytes_of_4_bits)
            layer.forward = functools.partial(_forward_4_bits, layer)  # type: ignore[method-assign]
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        keeps = setting.processes > 1 or setting.accumulation > 1
        if setting.is_sharded:
            for weight in trained:  # after reduce-scatter, a process keeps only its shard
                weight.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
        elif keeps:
            gradients = sum(weight.nbytes for weight in trained)
            for weight in trained:
                weight.grad = torch.zeros_like(weight)
        inputs = {
            name: fakes.from_tensor(value) if isinstance(value, Tensor) else value
            for name, value in batch.items()
        }
        live = stack.enter_context(_Live())
        if setting.on_gpu:
            stack.enter_context(_GpuCalls())
        with torch.autocast("cpu", setting.dtype, enabled=setting.dtype is not None):
            labels, rows, total = (inputs.pop(name) for name in ("labels", "rows", "total"))
            logits = model(**inputs).logits.float()
            sample_losses = losses(logits, labels, setting.smoothing)
            loss: Any = (sample_losses * (rows >= 0)).sum() / total[0]
            del logits, sample_losses
        loss.backward()
    if not setting.is_sharded:
        return Estimate(weights=weights, gradients=gradients, optimizer=optimizer, step=live.peak)
    count = setting.processes
    return Estimate(
        weights=2 * weights // count if setting.dtype is not None else weights // count,
        gradients=4 * numbers // count,
        optimizer=optimizer // count,
        step=live.peak + _gathered_bytes(model),
    )


def _gathered_bytes(model: Any) -> int:
    """Return what a process of FSDP holds in addition to its shards during a step."""
    bare = model.get_base_model() if hasattr(model, "get_base_model") else model  # of adapters
    kinds = set(getattr(bare, "_no_split_modules", None) or ())
    blocks = [list(part.parameters()) for part in bare.modules() if type(part).__name__ in kinds]
    block: int = max((sum(weight.nbytes for weight in part) for part in blocks), default=0)
    inside = {id(weight) for part in blocks for weight in part}
    root: int = sum(weight.nbytes for weight in model.parameters() if id(weight) not in inside)
    # The computing block and the prefetched one; the root's weights stay. In addition, a block's
    # gradients in float32, before and after reduce-scatter.
    return 2 * block + root + 4 * block // 2


def recompute_activations(model: Any) -> None:
    """Turn on activation checkpointing, which transformers 4 and 5 name differently."""
    newer = getattr(model, "activation_checkpointing_enable", None)
    (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})


class _Dequantized(torch.autograd.Function):
    """A product with a frozen 4-bit weight, which is dequantized in the forward and again in the
    backward pass, and not kept between them."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        context.weight = weight
        return inputs @ weight.to(inputs.dtype, copy=True).t()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient @ context.weight.to(gradient.dtype, copy=True), None


def _forward_4_bits(layer: nn.Linear, inputs: Tensor) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        inputs = inputs.to(torch.get_autocast_dtype("cpu"))
    product: Tensor = _Dequantized.apply(inputs, layer.weight)  # type: ignore[no-untyped-call]
    return product if layer.bias is None else product + layer.bias.to(product.dtype)


def _use_fake_tensors(model: nn.Module, fakes: Any, setting: Setting) -> int:
    """Replace the model's tensors by fake ones, and return their bytes."""
    seen: dict[int, Any] = {}

    def fake(tensor: Tensor) -> Any:
        if id(tensor) not in seen:
            seen[id(tensor)] = fakes.from_tensor(tensor)
            if setting.is_sharded and setting.dtype is not None and tensor.is_floating_point():
                seen[id(tensor)] = seen[id(tensor)].detach().to(setting.dtype)
        return seen[id(tensor)]

    kept: list[Tensor] = []
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            kept.append(weight)  # so that no other tensor reuses its id
            is_known = id(weight) in seen
            new = fake(weight)
            if not is_known and not isinstance(new, nn.Parameter):
                new = seen[id(weight)] = nn.Parameter(new, requires_grad=weight.requires_grad)
            setattr(module, name, new)
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            kept.append(buffer)
            setattr(module, name, fake(buffer))
    return sum(tensor.nbytes for tensor in seen.values())


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of live tensors that are created inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        inputs = {id(tensor.untyped_storage()) for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(outputs):
            storage = tensor.untyped_storage()
            # Skip weights, inputs and views of them.
            if storage in self._known or id(storage) in inputs:
                continue
            size = -(-storage.nbytes() // _BLOCK) * _BLOCK
            self._known[storage] = size
            self._add(size)
            weakref.finalize(storage, self._add, -size)
        if func is torch.ops.aten._flash_attention_backward.default:
            # Its float32 buffers over one row of samples, each of which adds 128 tokens to the row.
            (tokens, heads, width), starts = args[1].shape, args[6]
            padded = tokens + 128 * (len(starts) - 1)
            buffers = 4 * padded * heads * (-(-width // 32) * 32 + 1)
            self.peak = max(self.peak, self.now + buffers)
        return outputs

    def _add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class _GpuCalls(TorchFunctionMode):
    """Replaces calls by those of a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return _efficient_attention(*args, **kwargs)
        if func in (functional.dropout, torch.dropout):
            return _dropout(*args, **kwargs)
        if func in _IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            halves = (torch.bfloat16, torch.float16)
            args, kwargs = tree_map_only(
                Tensor, lambda value: value.float() if value.dtype in halves else value,
                (args, kwargs),
            )  # fmt: skip
        return func(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Apply dropout with a mask of bytes; the CPU's keeps a mask of numbers."""
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input


def _efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Call the memory-efficient kernel; without a mask, flash attention keeps as much."""
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (
            tensor.to(torch.get_autocast_dtype("cpu")) for tensor in (query, key, value)
        )
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        more = query.shape[-3] // key.shape[-3]
        key, value = (tensor.repeat_interleave(more, -3) for tensor in (key, value))
    bias = attn_mask
    if bias is not None:
        # A mask is converted to numbers, once for all heads.
        bias = torch.zeros_like(bias, dtype=query.dtype)
        bias = bias.expand(*query.shape[:-1], key.shape[-2])
    output: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, dropout_p, is_causal, scale=scale
    )[0]
    return output
