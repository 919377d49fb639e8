"""Low-rank adapters by peft: added to a model before training, merged or saved after it."""

from __future__ import annotations

import copy
import functools
import glob
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from recipe.console import say_row
from recipe.errors import HyperparameterError
from recipe.models.changes import adapters, freezing, vocabulary
from recipe.settings import ModelSettings, split_values

ALL_LINEAR = "all-linear"
_WITHOUT_POSITIONS = "QUESTION_ANS"
_LOFTQ = {"loftq_bits": 4, "loftq_iter": 1}
"""peft's defaults."""
_MUTATING = ("olora", "pissa", "pissa_niter_16")
"""Values of init_lora_weights that subtract the initial adapter from the base."""


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
    model: Any,
    settings: ModelSettings,
    task: str | None,
    *,
    new: Iterable[str] | None = None,
    tokenizer: Any = None,
) -> Any:
    """Return `model` ready for training: with added_tokens, and by lora_r as a peft.PeftModel with
    adapters on its linear layers and all other weights but the head frozen; otherwise with the
    layers frozen that the job names.

    Args:
        model: Maybe a peft.PeftModel, whose adapter is trained further.
        task: peft's task type: SEQ_CLS, CAUSAL_LM ...; None if peft has none for it.
        new: Names of weights that were initialised at random. They and the modules outside the base
            model are trained in full; None if it has no head of its own.
        tokenizer: The tokenizer, which gets added_tokens.
    """
    if hasattr(model, "peft_config"):
        return _finish(model, settings, task)
    added = vocabulary.extend(model, tokenizer, settings)
    if settings.lora_r is None:
        freezing.freeze(model, settings, added)
        keep_averages(model)
        return model
    import peft  # takes a second, and older images lack it

    layers = [name for name, _ in model.named_modules()]
    targets = settings.lora_target_modules
    named = split_values(targets) if targets != ALL_LINEAR else []
    freezing.refuse_unknown("lora_target_modules", map(glob.escape, named), layers)
    modules = split_values(settings.modules_to_save)
    freezing.refuse_unknown("modules_to_save", map(glob.escape, modules), layers)
    # peft takes every name that ends with these letters: norm is in input_layernorm.
    full = [name for name in layers if f".{name}".endswith(tuple(f".{one}" for one in modules))]
    if new is not None:
        full += [name.rpartition(".")[0] for name in new]
        children = model.named_children()
        heads = ((name, head) for name, head in children if name != model.base_model_prefix)
        full += [name for name, head in heads if [*head.parameters()]]
    full = [name for name in full if not name.startswith(tuple(f"{one}." for one in full))]
    start: Any = settings.init_lora_weights or True
    config = peft.LoraConfig(
        # peft's model for this type drops position_ids and token_type_ids.
        task_type=None if task == _WITHOUT_POSITIONS else task,
        loftq_config=_LOFTQ if start == "loftq" else {},
        r=settings.lora_r,
        lora_alpha=settings.lora_alpha or 2 * settings.lora_r,
        lora_dropout=settings.lora_dropout,
        use_rslora=settings.use_rslora,
        use_dora=settings.use_dora,
        init_lora_weights=start,
        target_modules=named or ALL_LINEAR,
        **vocabulary.adapter_arguments(model, added, full),
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft uses an old name of transformers
            wrapped: Any = peft.get_peft_model(model, config)
    except (AssertionError, ImportError, RuntimeError, TypeError, ValueError) as error:
        if start is True:
            raise
        why_not = f"init_lora_weights has value {start!r}, which is not possible here: {error}"
        raise HyperparameterError(f"Hyperparameter {why_not}", "Leave it out.") from error
    if start in _MUTATING and settings.lora_save == "adapter":
        state = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)
        pairs = [name for name in state if ".lora_A." in name or ".lora_B." in name]
        wrapped.initial_adapter = {name: state[name].clone() for name in pairs}
    return _finish(wrapped, settings, task)


def _finish(adapted: Any, settings: ModelSettings, task: str | None) -> Any:
    """Check and log a peft.PeftModel that will be trained, and return it."""
    if settings.lora_save == "merged" and (fault := adapters.tied_layer(adapted)):
        raise HyperparameterError(
            f"Hyperparameter lora_target_modules has value {settings.lora_target_modules!r}: "
            f"{fault}.",
            f"Leave these layers out, give {ALL_LINEAR}, or set lora_save=adapter.",
        )
    keep_averages(adapted)
    config = adapted.peft_config[adapted.active_adapter]
    config.task_type = task  # which loading the adapter needs
    _sort_names(config)
    trained, whole = adapted.get_nb_trainable_parameters()
    counted = f"{trained:,} of {whole:,} parameters are trained"
    say_row("LoRA", f"rank {config.r}, alpha {config.lora_alpha:g}; {counted}")
    return adapted


def _sort_names(config: Any) -> None:
    """Sort the names of layers in a peft.LoraConfig: peft writes its sets in an order that differs
    between processes, and equal trainings shall write equal files."""
    for key in ("target_modules", "exclude_modules"):
        if isinstance(names := getattr(config, key), set):
            setattr(config, key, sorted(names))


def keep_averages(model: Any) -> None:
    """Keep the running averages of batch normalization in frozen layers: adapters and their
    checkpoints do not hold them. Those of a head that is trained in full are updated."""
    saved = model.state_dict()
    for name, module in model.named_modules():
        has_averages = any(
            f"{name}.{key}" in saved and value.is_floating_point()
            for key, value in module.named_buffers(recurse=False)
        )
        # In a module with others inside, the dropout of these would stay off, too.
        is_leaf = next(module.children(), None) is None
        is_trained = any(weight.requires_grad for weight in module.parameters())
        if has_averages and is_leaf and not is_trained and ".modules_to_save." not in name:
            module.eval().train = lambda mode=True, module=module: module


def whole(model: Any, weights: Mapping[str, Any] | None, settings: ModelSettings) -> Any:
    """Return a trained model in its saved form: gathered, and merged unless lora_save=adapter.
    `weights` are the gathered ones of a sharded model."""
    if weights is not None:
        # Set directly: assigned through FSDP, they would be sharded again. Tied ones stay one.
        gathered: dict[int, torch.nn.Parameter] = {}
        for name, weight in weights.items():
            path, _, last = name.rpartition(".")
            module = model.get_submodule(path)
            if last in module._parameters:
                new = torch.nn.Parameter(weight, requires_grad=False)
                module._parameters[last] = gathered.setdefault(id(module._parameters[last]), new)
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
    initial = getattr(model, "initial_adapter", {})
    if settings.lora_r is None or settings.lora_save == "merged":
        model.save_pretrained(folder)
    else:
        # With a new vocabulary peft would also save all embeddings that were not trained.
        model.save_pretrained(folder, save_embedding_layers=False)
        if initial:
            _subtract(initial, folder)
        base = model.get_base_model()
        config = copy.deepcopy(base.config)
        if hasattr(config, "quantization_config"):  # of this training, not of the base model
            del config.quantization_config
        config.save_pretrained(folder)
        if base.can_generate():
            base.generation_config.save_pretrained(folder)


def _subtract(initial: Mapping[str, Any], folder: Path) -> None:
    """Turn a saved adapter whose initialization changed the base into one for the base as it was,
    of twice the rank: W - s B0 A0 + s B A. peft's own conversion leaves out a trained head."""
    import peft

    file = folder / "adapter_model.safetensors"
    weights = load_file(file)
    for name, first in initial.items():
        is_first = ".lora_A." in name
        pair = [weights[name], first if is_first else -first]
        weights[name] = torch.cat(pair, dim=0 if is_first else 1).contiguous()
    save_file(weights, file, metadata={"format": "pt"})
    config: Any = peft.PeftConfig.from_pretrained(str(folder))
    config.lora_alpha *= 2**0.5 if config.use_rslora else 2
    config.r, config.init_lora_weights = 2 * config.r, True
    _sort_names(config)
    config.save_pretrained(folder)
