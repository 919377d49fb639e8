"""Train with bfloat16 copies of float32 weights, instead of autocast.

Autocast converts each weight once a batch, and tensors between most operations. Here the model
keeps its float32 weights: the optimizer updates them, checkpoints hold them, evaluations compute
with them, by autocast. Only while a training batch is computed, forward and backward, attributes of
the modules hide them: `layer.weight` is then a copy in bfloat16, made after each optimizer step. A
frozen weight is copied once. After the backward pass, the gradients of the copies are added to
those of the float32 weights.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import TrainingArguments
from transformers.models.llama import modeling_llama
from transformers.models.modernbert import modeling_modernbert

from recipe.models import lora

_DEVICES = ("cpu", "cuda")
_ROTATE = modeling_llama.apply_rotary_pos_emb
"""ModernBERT's converts queries and keys to float32 and back, after it has rounded the angles."""


def why_not(model: Any, packable: Iterable[str], args: TrainingArguments) -> str | None:
    """Return why a training cannot compute with copies; None if it can. `packable` are the types of
    models that the task packs, for which copies are tested."""
    kind = lora.bare(model).config.model_type
    if not args.bf16:
        return "the training does not compute in bfloat16"
    if args.world_size > 1:
        return "several processes sum gradients in float32 while these are computed"
    if args.device.type not in _DEVICES:
        return f"it is not tested on {args.device.type}"
    if kind not in packable:
        return f"it is not tested with models of type {kind}"
    if any(not weight.is_floating_point() for weight in model.parameters()):
        return "the weights are quantized"
    return None


class Bf16Weights:
    """The copies of a model's weights.

    An embedding, with all around it that has no matrix (BERT's sum of three, and their norm), stays
    in float32, and its result is rounded: PyTorch adds the gradients of a frequent token in the
    precision of the weight.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._step: int | None
        self._hiding: list[tuple[dict[str, Any], str, Any]] = []
        self._pairs: list[tuple[Tensor, Tensor]] = []
        """Trained weights, and their copies."""
        self._is_used, self._step = False, None

        def forward(inner: nn.Module, usual: Any, *args: Any, **inputs: Any) -> Any:
            kind = next(inner.parameters()).device.type
            off = torch.autocast(kind, enabled=False) if self._is_used else None
            with off or contextlib.nullcontext():
                return usual(*args, **inputs)

        lora.patch_forward(model, forward)

    @contextlib.contextmanager
    def used(self, step: int | None) -> Iterator[None]:
        """Compute a batch with the copies, and add its gradients to those of the weights.

        Args:
            step: Optimizer steps until now; copies are made anew if it has changed, or is None.
        """
        with torch.no_grad():
            if not self._hiding:
                self._hide()
            elif (step is None or step != self._step) and self._pairs:
                weights, copies = zip(*self._pairs, strict=True)
                torch._foreach_copy_(copies, weights)
        self._step, self._is_used = step, True
        hidden = [(names, name, names.get(name)) for names, name, _ in self._hiding]
        for names, name, value in self._hiding:
            names[name] = value
        try:
            yield
        finally:
            self._is_used = False
            for names, name, value in hidden:
                if value is None:
                    del names[name]
                else:
                    names[name] = value
        self._add_gradients()

    def _hide(self) -> None:
        """Make the copies, and list what hides the weights: a namespace, a name and a value."""
        lookups = list(_lookups(self._model))
        whole = {part for root in lookups for part in root.modules()}
        copies: dict[Tensor, Tensor] = {}
        for module in self._model.modules():
            for name, weight in module._parameters.items():
                if weight is None or weight.dtype != torch.float32 or module in whole:
                    continue
                if weight not in copies:
                    copies[weight] = weight.bfloat16().requires_grad_(weight.requires_grad)
                self._hiding.append((vars(module), name, copies[weight]))
            if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
                # A method, in which compilers see no difference between layers.
                self._hiding.append((vars(module), "forward", types.MethodType(_norm, module)))
        for root in lookups:
            rounded = functools.partial(_round, root.forward)
            self._hiding.append((vars(root), "forward", rounded))
        if lora.bare(self._model).config.model_type == "modernbert":
            self._hiding.append((vars(modeling_modernbert), "apply_rotary_pos_emb", _ROTATE))
            rotary: Any = lora.bare(self._model).get_submodule("model.rotary_emb")
            if set(rotary.rope_type.values()) == {"default"}:
                read = functools.partial(_read_angles, rotary, rotary.forward, {})
                self._hiding.append((vars(rotary), "forward", read))
        self._pairs = [pair for pair in copies.items() if pair[0].requires_grad]

    def _add_gradients(self) -> None:
        pairs = [(weight, copy) for weight, copy in self._pairs if copy.grad is not None]
        new: list[Tensor] = []
        rounded: list[Tensor] = []
        for weight, copy in pairs:
            gradient: Any = copy.grad
            copy.grad = None
            if weight.grad is None:
                weight.grad = torch.empty_like(weight)
                new.append(weight.grad)
                rounded.append(gradient)
            else:  # of an earlier batch, or of an embedding that is also a matrix
                weight.grad.add_(gradient)
        if new:
            torch._foreach_copy_(new, rounded)


def _lookups(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the largest modules with an embedding whose weights are of embeddings and norms."""
    parts = [part for part in module.modules() if part._parameters]
    if parts and all(isinstance(part, nn.Embedding | nn.LayerNorm) for part in parts):
        if any(isinstance(part, nn.Embedding) for part in parts):
            yield module
    else:
        for child in module.children():
            yield from _lookups(child)


def _round(usual: Any, *args: Any, **inputs: Any) -> Tensor:
    result: Tensor = usual(*args, **inputs)
    return result.bfloat16()


def _norm(module: Any, states: Tensor) -> Tensor:
    """Compute a root mean square norm by PyTorch's function: on a GPU one kernel, without
    conversions."""
    weight = module.weight
    return functional.rms_norm(states, weight.shape, weight, module.variance_epsilon)


def _read_angles(
    rotary: Any,
    usual: Any,
    tables: dict[str, list[Tensor]],
    states: Tensor,
    position_ids: Tensor,
    layer_type: str,
) -> list[Tensor]:
    """Return the cosines and sines of positions, which do not change, from tables."""
    if layer_type not in tables:
        positions = torch.arange(rotary.max_seq_len_cached, device=states.device)[None]
        tables[layer_type] = [part[0] for part in usual(states, positions, layer_type)]
    return [functional.embedding(position_ids, table) for table in tables[layer_type]]
