"""Layers and modules that keep their weights in a training without adapters."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from recipe.console import say_row
from recipe.errors import HyperparameterError, did_you_mean
from recipe.settings import ModelSettings, split_values


def freeze(model: Any, settings: ModelSettings, added: Collection[int] = ()) -> None:
    """Freeze the hyperparameters freeze_layers and freeze_modules of a model, and log how many
    parameters are trained. Raise HyperparameterError if there are no such layers or modules,
    nothing is left, or the embeddings of `added` tokens are frozen."""
    if settings.freeze_layers is None and settings.freeze_modules is None:
        return
    patterns = split_values(settings.freeze_modules)
    weights = dict(model.named_parameters())
    refuse_unknown("freeze_modules", patterns, weights)
    frozen = {name for name in weights if any(_is_in(name, pattern) for pattern in patterns)}
    if settings.freeze_layers is not None:
        frozen |= _first_layers(model, settings.freeze_layers)
    for name in frozen:
        weights[name].requires_grad_(False)
    trained = sum(weight.numel() for weight in weights.values() if weight.requires_grad)
    if not trained:
        raise HyperparameterError(
            f"freeze_layers={settings.freeze_layers} and freeze_modules={settings.freeze_modules} "
            "leave no weight to train.",
            "Freeze fewer of them.",
        )
    if added and not model.get_input_embeddings().weight.requires_grad:
        raise HyperparameterError(
            f"Hyperparameter added_tokens has value {settings.added_tokens!r}, but the embeddings "
            "are frozen: the tokens would have no meaning.",
            "Freeze other modules by freeze_modules.",
        )
    whole = sum(weight.numel() for weight in weights.values())
    say_row("frozen", f"{len(frozen)} weights; {trained:,} of {whole:,} parameters are trained")


def _first_layers(model: Any, count: int) -> set[str]:
    """Return the names of weights of embeddings, and of the first layers of each stack."""
    base = model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    stacks: dict[str, int] = {}
    for name, module in base.named_modules():
        is_stack = isinstance(module, nn.ModuleList) and len({type(layer) for layer in module}) == 1
        if is_stack and len(module) > 1 and not name.startswith(tuple(f"{one}." for one in stacks)):
            stacks[name] = len(module)
    if count > min(stacks.values(), default=0):
        sizes = ", ".join(f"{size} layers in {name}" for name, size in stacks.items())
        raise HyperparameterError(
            f"Hyperparameter freeze_layers has value {count}, but the model has "
            f"{sizes or 'no list of layers'}.",
            "Give fewer, or names of modules in freeze_modules.",
        )
    outside = [
        name
        for name, module in base.named_modules()
        if (isinstance(module, nn.Embedding) or "emb" in name.rpartition(".")[2])
        and not name.startswith(tuple(f"{stack}." for stack in stacks))
    ]
    layers = [f"{stack}.{number}" for stack in stacks for number in range(count)]
    inside = tuple(f"{name}." for name in (*outside, *layers))
    return {f"{prefix}{name}" for name, _ in base.named_parameters() if name.startswith(inside)}


def refuse_unknown(setting: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise HyperparameterError with all of the `names` of the hyperparameter `setting`, which may
    have *, that are not in the names of a model's modules or weights, `known`."""
    known = list(known)
    if unknown := [one for one in names if not any(_is_in(name, one) for name in known)]:
        parts = {part for name in known for part in name.split(".")}
        hints = [hint for name in unknown if (hint := did_you_mean(name, parts))]
        raise HyperparameterError(
            f"Hyperparameter {setting} names {', '.join(map(repr, unknown))}, and the model has no "
            "such layer.",
            " ".join(hints) or "Give names of its layers with commas.",
        )


def _is_in(name: str, pattern: str) -> bool:
    """Return whether a weight or module is, or is in, the one of a name with *, which may leave out
    the beginning of the path."""
    parts = name.split(".")
    paths = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return any(fnmatchcase(path, pattern) or fnmatchcase(path, f"*.{pattern}") for path in paths)
