"""Low-rank adapters by peft: added to a model before training, merged or saved after it."""

from __future__ import annotations

import copy
import functools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from recipe.console import say_row
from recipe.errors import HyperparameterError, did_you_mean
from recipe.settings import ModelSettings, split_values

ALL_LINEAR = "all-linear"
_WITHOUT_POSITIONS = "QUESTION_ANS"


def bare(model: Any) -> Any:
    """Return the model inside its adapters; `model` itself if it has none."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def patch_forward(model: Any, forward: Callable[..., Any]) -> None:
    """Let the model inside its adapters compute `forward(inner, usual, *args, **inputs)`, where
    `usual` is its own forward pass."""
    inner = bare(model)
    usual = inner.forward
    # Keeps the signature, which peft and generate() read.
    inner.forward = functools.update_wrapper(functools.partial(forward, inner, usual), usual)


def wrap(
    model: PreTrainedModel,
    settings: ModelSettings,
    new: Iterable[str],
    task: str | None,
    *,
    trains_head: bool,
) -> Any:
    """Return `model` with adapters on its linear layers, and all other weights but the head frozen.

    Args:
        new: Names of weights that were initialised at random: they are trained in full.
        task: peft's task type: SEQ_CLS, CAUSAL_LM ...; None if peft has none for it.
        trains_head: Whether modules outside the base model are trained in full.

    Returns:
        A peft.PeftModel; `model` itself if the hyperparameter lora_r is not given.
    """
    if settings.lora_r is None:
        return model
    import peft  # takes a second, and older images lack it

    targets = settings.lora_target_modules
    named = split_values(targets)
    layers = [name for name, _ in model.named_modules()]
    for target in named if targets != ALL_LINEAR else ():
        if not any(layer == target or layer.endswith(f".{target}") for layer in layers):
            last = {layer.rpartition(".")[2] for layer in layers}
            raise HyperparameterError(
                f"Hyperparameter lora_target_modules has value {targets!r}, but the model has no "
                f"layer {target!r}.",
                did_you_mean(target, last)
                or f"Give names of its layers with commas, or {ALL_LINEAR}.",
            )
    head = [
        name
        for name, module in model.named_children()
        if name != model.base_model_prefix and any(True for _ in module.parameters())
    ]
    full_modules = sorted({*head, *(name.rpartition(".")[0] for name in new)})
    config = peft.LoraConfig(
        # peft's model for this type drops position_ids and token_type_ids.
        task_type=None if task == _WITHOUT_POSITIONS else task,
        r=settings.lora_r,
        lora_alpha=settings.lora_alpha or 2 * settings.lora_r,
        lora_dropout=settings.lora_dropout,
        use_rslora=settings.use_rslora,
        use_dora=settings.use_dora,
        target_modules=ALL_LINEAR if targets == ALL_LINEAR else named,
        modules_to_save=full_modules if trains_head else None,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft uses an old name of transformers
        wrapped: Any = peft.get_peft_model(model, config)
    if settings.lora_save == "merged" and (fault := tied_layer(wrapped)):
        raise HyperparameterError(
            f"Hyperparameter lora_target_modules has value {targets!r}: {fault}.",
            f"Leave these layers out, give {ALL_LINEAR}, or set lora_save=adapter.",
        )
    keep_averages(wrapped)
    config.task_type = task  # which loading the adapter needs
    trained, whole = wrapped.get_nb_trainable_parameters()
    say_row("LoRA", f"rank {config.r}, {trained:,} of {whole:,} parameters are trained")
    return wrapped


def keep_averages(adapted: Any) -> None:
    """Keep the running averages of batch normalization in frozen layers: adapters and their
    checkpoints do not hold them. Those of a head that is trained in full are updated."""
    saved = adapted.state_dict()
    for name, module in adapted.named_modules():
        has_averages = any(
            f"{name}.{key}" in saved and value.is_floating_point()
            for key, value in module.named_buffers(recurse=False)
        )
        # In a module with others inside, the dropout of these would stay off, too.
        is_leaf = next(module.children(), None) is None
        if has_averages and is_leaf and ".modules_to_save." not in name:
            module.eval().train = lambda mode=True, module=module: module


def tied_layer(adapted: Any) -> str:
    """Describe a layer of a peft.PeftModel that shares its weights with another layer, which
    merging would change too; return "" if there is none."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, weight in adapted.named_parameters(remove_duplicate=False):
        names[id(weight)].append(name.removeprefix("base_model.model."))
    for same in names.values():
        changed = [name for name in same if ".base_layer." in name]
        if changed and len(same) > 1:
            others = ", ".join(name for name in same if name != changed[0])
            return (
                f"its adapter changes {changed[0]}, which shares its weights with {others}: "
                "merged, it would change both, unlike in training"
            )
    return ""


def whole(model: Any, weights: Mapping[str, Any] | None, settings: ModelSettings) -> Any:
    """Return a trained model in its saved form: gathered, and merged unless lora_save=adapter.
    `weights` are the gathered ones of a sharded model."""
    if weights is not None:
        # Set directly: assigned through FSDP, they would be sharded again.
        for name, weight in weights.items():
            path, _, last = name.rpartition(".")
            module = model.get_submodule(path)
            if last in module._parameters:
                module._parameters[last] = torch.nn.Parameter(weight, requires_grad=False)
        model.tie_weights()
    if settings.lora_r is not None and settings.lora_save == "merged":
        return model.merge_and_unload()
    return model


def save(
    model: Any,
    weights: Mapping[str, Any] | None,
    folder: Path,
    settings: ModelSettings,
) -> None:
    """Write a trained model to `folder`: a LoRA model merged, or its adapter (lora_save=adapter).
    `weights` are the gathered ones of a sharded model."""
    model = whole(model, weights, settings)
    model.save_pretrained(folder)
    if settings.lora_r is not None and settings.lora_save == "adapter":
        base = model.get_base_model()
        config = copy.deepcopy(base.config)
        if hasattr(config, "quantization_config"):  # of this training, not of the base model
            del config.quantization_config
        config.save_pretrained(folder)
        if base.can_generate():
            base.generation_config.save_pretrained(folder)
