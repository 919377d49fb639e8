"""Adapters that peft has saved: merged into their base, or trained further.

peft only warns if an adapter lacks weights or does not fit its base, which alone would answer.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoModel, GenerationConfig

from recipe.compat.new_weights import check_layers, unread_weights
from recipe.console import say_row
from recipe.errors import UNLOADABLE, HyperparameterError, ModelError, join_names, why_unloadable
from recipe.hyperparameters import ADAPTER_SETTINGS, FIELDS
from recipe.models.sources.origin import Origin
from recipe.settings import ModelSettings, split_values

_FIELDS = {"lora_r": "r", "lora_target_modules": "target_modules"}
"""peft's names of our settings, where they differ."""
_PREFIX = "base_model.model."
Settings = TypeVar("Settings", bound=ModelSettings)


def settle(settings: Settings, origin: Origin) -> Settings:
    """Return the settings with those of the adapter that is trained further, if `origin` is one.

    Raises:
        HyperparameterError: The settings contradict the adapter, or are for adapters, and it is
            none.
        ModelError: The adapter is of another kind than LoRA.
    """
    adapter = origin.adapter
    if not adapter or settings.merge_adapter:
        _check_merging(settings, bool(adapter))
        return settings
    if (kind := adapter.get("peft_type")) != "LORA":
        raise ModelError(
            f"The adapter {origin.location} is of type {kind}, and only LoRA is trained further.",
            "Give merge_adapter=True, which merges it into its base first.",
        )
    values: dict[str, Any] = {}
    contradictions = [
        f"{name}={given}, which is for a new adapter"
        for name in ("init_lora_weights", "added_tokens")
        if (given := getattr(settings, name))
    ]
    for name in ADAPTER_SETTINGS:
        given, usual = getattr(settings, name), FIELDS[name].default
        value = adapter.get(_FIELDS.get(name, name), usual)
        values[name] = value = ",".join(sorted(value)) if isinstance(value, list) else value
        is_same = given == value
        if FIELDS[name].metadata["separator"]:
            names, others = (set(split_values(text)) for text in (given, value))
            # A head that is trained in full is added automatically.
            is_same = names == others or (name == "modules_to_save" and names <= others)
        if given != usual and not is_same:
            contradictions.append(f"{name}={given}, and the adapter has {value}")
    if contradictions:
        raise HyperparameterError(
            f"The adapter {origin.location} is trained further with its own settings: "
            f"{'; '.join(contradictions)}.",
            "Leave these out, or give merge_adapter=True, which merges it into its base and trains "
            "a new one.",
        )
    return dataclasses.replace(settings, **values)


def _check_merging(settings: ModelSettings, is_adapter: bool) -> None:
    """Check merge_adapter, which is True or has no adapter to merge."""
    if not is_adapter and settings.merge_adapter is not None:
        saved = "merged" if settings.merge_adapter else "adapter"
        raise HyperparameterError(
            f"Hyperparameter merge_adapter has value {settings.merge_adapter}, but the model to "
            "start from is no adapter.",
            f"Leave it out. If the trained adapter is meant: lora_save={saved}.",
        )
    if is_adapter and settings.lora_r is not None and settings.lora_save == "adapter":
        raise HyperparameterError(
            "merge_adapter=True trains a new adapter of a merged model, which nobody has: saved "
            "alone (lora_save=adapter), it could not be used.",
            "Give lora_save=merged, or leave merge_adapter out to train the adapter further.",
        )


def read_base(
    origin: Origin, architecture: Any, dtype: torch.dtype, config: Any, **options: Any
) -> tuple[Any, Any]:
    """Return the base of the adapter in `origin`, with as many embeddings as the adapter has, and
    transformers' report on its weights. Raise ModelError if it cannot be read.

    Args:
        architecture: An Auto class of transformers.
        config: The configuration of base and adapter together.
        options: More arguments for its `from_pretrained`.
    """
    base, text = Origin(origin.base, origin.options), config.get_text_config()
    rows = getattr(text, "vocab_size", None)
    # The adapter may bring a head for other labels than the base's.
    options["ignore_mismatched_sizes"] = True
    try:
        before = getattr(base.config().get_text_config(), "vocab_size", None)
        if rows is not None:
            text.vocab_size = before
        model, report = base.read(architecture, dtype, config=config, **options)
    except ModelError as error:
        raise ModelError(
            f"{origin.location} contains an adapter, and its base {origin.base!r} cannot be read: "
            f"{error.message}",
            "Give the base as the channel base_model; for a server, as HF_MODEL_ID. Or train with "
            "lora_save=merged.",
        ) from error
    if rows is not None and (rows := _embeddings(origin, model, rows)) != before:
        model.resize_token_embeddings(rows, mean_resizing=False)  # the adapter has their values
    return model, report


def fit_vocabulary(origin: Origin, model: Any) -> None:
    """Give a base as many embeddings as the adapter in `origin` has; their values are its own."""
    rows = len(model.get_input_embeddings().weight)
    if (needed := _embeddings(origin, model, rows)) != rows:
        model.resize_token_embeddings(needed, mean_resizing=False)


def _embeddings(origin: Origin, model: Any, rows: int) -> int:
    """Return how many embeddings a model needs for the tokens of the adapter in `origin`, at least
    `rows`: peft saves no configuration of the model."""
    from peft.utils import load_peft_weights

    embeddings = model.get_input_embeddings()
    (name,) = (name for name, module in model.named_modules() if module is embeddings)
    weights = load_peft_weights(origin.location, device="cpu")
    names = (f"{_PREFIX}{name}{part}.weight" for part in ("", ".token_adapter.base_layer"))
    counts = [len(weights[name]) for name in names if name in weights]
    indices = origin.adapter.get("trainable_token_indices") or []
    lists = indices.values() if isinstance(indices, dict) else [indices]
    last = max((index for one in lists for index in one), default=-1)
    return max(rows, last + 1, *counts)


def attach(
    origin: Origin, model: Any, lacking: Iterable[str], *, is_trainable: bool, new_head: bool
) -> tuple[Any, list[str]]:
    """Return the base `model` with the adapter in `origin`, a peft.PeftModel, and those of the
    `lacking` weights of the base that the adapter does not bring. Raise ModelError if it does not
    fit.

    Args:
        is_trainable: Whether the adapter is trained further.
        new_head: Whether a head that the adapter has for other labels may be left out.
    """
    from peft import PeftConfig, PeftModel
    from peft.utils import get_peft_model_state_dict, load_peft_weights

    try:
        config: Any = PeftConfig.from_pretrained(origin.location)
        if config.task_type == "QUESTION_ANS":
            config.task_type = None  # peft's model for this type drops position_ids
        config.base_model_name_or_path = origin.base
        weights = load_peft_weights(origin.location, device="cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what peft warns of is an error here
            adapted: Any = PeftModel.from_pretrained(
                model, origin.location, config=config, is_trainable=is_trainable,
                ignore_mismatched_sizes=new_head,
            )  # fmt: skip
            fitting = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        refuse_partial(weights, fitting, adapted.state_dict())
        others = {name for name in weights.keys() & fitting.keys()
                  if weights[name].shape != fitting[name].shape}  # fmt: skip
        if wrong := sorted(name for name in others if ".lora_" in name):
            raise ModelError(f"size mismatch for {join_names(wrong, 3)}.")
    except (*UNLOADABLE, ModelError, AttributeError, KeyError, TypeError) as error:
        sizes = [line.strip() for line in str(error).splitlines() if "size mismatch" in line]
        reason = str(error) if isinstance(error, ModelError) else why_unloadable(error)
        raise ModelError(
            f"The adapter {origin.location} does not fit its base {origin.base}: "
            f"{sizes[0] if sizes else reason}",
            "Give the whole folder that peft wrote, with its base; for other labels than those of "
            "the base also config.json and the tokenizer (save_pretrained of both), or "
            "merge_adapter=True for a new head.",
        ) from error
    brought = {name.removeprefix(_PREFIX) for name in weights.keys() - others}
    return adapted, sorted({*lacking} - brought)


def refuse_partial(
    weights: Mapping[str, Any], adapter_weights: Mapping[str, Any], others: Mapping[str, Any]
) -> None:
    """Raise ModelError if some weights of an adapter's file, by peft's names, would not take effect
    in a model with `adapter_weights` and others, for which the file may have values."""
    if missing := sorted(set(adapter_weights) - set(weights)):
        raise ModelError(
            f"it lacks weights for {join_names(missing, 3)}.",
            "Give the whole folder that peft wrote, with the base that it was trained on.",
        )
    surplus = sorted(set(weights) - set(adapter_weights) - set(others))
    # peft may save embeddings of a new vocabulary a second time, by the names of tied layers.
    if surplus := [name for name in surplus if ".token_adapter." not in name]:
        raise ModelError(
            f"the base has no place for its {join_names(surplus, 3)}.",
            "Give the base that it was trained on.",
        )


def start(
    origin: Origin, model: Any, lacking: Iterable[str], settings: ModelSettings
) -> tuple[Any, list[str]]:
    """Return the model with which training starts, and those of the `lacking` weights of the base
    `model` that are new: a peft.PeftModel, or the base with the adapter merged (merge_adapter).
    Raise ModelError if the adapter does not fit."""
    merges = bool(settings.merge_adapter)
    adapted, new = attach(origin, model, lacking, is_trainable=not merges, new_head=merges)
    if merges:
        say_row("adapter", f"{origin.location} is merged into its base {origin.base}")
        return _merge(origin, adapted).requires_grad_(True), new
    if new:
        raise _no_head(origin, new, "Give merge_adapter=True, which trains a new head.")
    say_row("adapter", f"{origin.location} of the base {origin.base} is trained further")
    return adapted, new


def merged(origin: Origin, architecture: Any, dtype: torch.dtype) -> Any:
    """Load the base of the adapter in `origin`, and merge the adapter into it. Raise ModelError if
    they cannot be read or merged, or weights are missing."""
    model, report = read_base(origin, architecture, dtype, origin.config())
    if (Path(origin.location) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(origin.location)
    # A head that is in neither of them would be random.
    adapted, lacking = attach(
        origin, model, unread_weights(report), is_trainable=False, new_head=False
    )
    model = _merge(origin, adapted)
    if architecture is AutoModel:
        check_layers(origin.base, model, lacking)
    elif lacking:
        remedy = "Train with lora_save=merged, or save the adapter with its head (modules_to_save)."
        raise _no_head(origin, lacking, remedy)
    return model


def merge_headless(origin: Origin, model: Any) -> Any:
    """Return the base `model`, an encoder without a head, with the adapter in `origin` merged.
    Raise ModelError if it does not fit, or merging would change other layers."""
    adapted, _ = attach(origin, model, (), is_trainable=False, new_head=False)
    return _merge(origin, adapted)


def _merge(origin: Origin, adapted: Any) -> Any:
    """Return the base with its adapter merged. Raise ModelError if merging would change others."""
    if fault := tied_layer(adapted):
        raise ModelError(
            f"The adapter {origin.location} cannot be merged into its base {origin.base}: {fault}.",
            "Train without adapters of these layers.",
        )
    model = adapted.merge_and_unload()
    vars(model).pop("peft_config", None)
    return model


def _no_head(origin: Origin, lacking: list[str], remedy: str) -> ModelError:
    return ModelError(
        f"Neither the adapter {origin.location} nor its base {origin.base} has "
        f"{join_names(lacking, 3)}.",
        remedy,
    )


def tied_layer(adapted: Any) -> str:
    """Describe a layer of a peft.PeftModel that shares its weights with another layer, which
    merging would change too; return "" if there is none."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, weight in adapted.named_parameters(remove_duplicate=False):
        names[id(weight)].append(name.removeprefix(_PREFIX))
    for same in names.values():
        # Rows of tokens are trained alike in tied layers.
        changed = [name for name in same if ".base_layer." in name and ".token_" not in name]
        if changed and len(same) > 1:
            others = ", ".join(name for name in same if name != changed[0])
            return (
                f"its adapter changes {changed[0]}, which shares its weights with {others}: "
                "merged, it would change both, unlike in training"
            )
    return ""
