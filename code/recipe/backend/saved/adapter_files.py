"""Merges a LoRA adapter that peft has saved into its base, and checks that all of it takes effect.

peft only warns if an adapter lacks weights or does not fit the base: the base alone would answer.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, GenerationConfig

from recipe.backend.saved.origin import Origin
from recipe.compat import dtype_argument
from recipe.compat.new_weights import check_layers, unread
from recipe.console import log
from recipe.errors import UNLOADABLE, ModelError, listed, why_unloadable


def refuse_partial(
    weights: Mapping[str, Any], adapter_weights: Mapping[str, Any], others: Mapping[str, Any]
) -> None:
    """Raise ModelError if some weights of an adapter would not take effect in a model.

    Args:
        weights: The weights in the adapter's file, by peft's names.
        adapter_weights: The adapter's weights in the model.
        others: Other weights of the model, for which the file may have values.
    """
    if missing := sorted(set(adapter_weights) - set(weights)):
        raise ModelError(
            f"it lacks weights for {listed(missing, 3)}.",
            "Give the whole folder that peft wrote, with the base that it was trained on.",
        )
    if surplus := sorted(set(weights) - set(adapter_weights) - set(others)):
        raise ModelError(
            f"the base has no place for its {listed(surplus, 3)}.",
            "Give the base that it was trained on.",
        )


def merged(origin: Origin, architecture: Any, dtype: torch.dtype) -> Any:
    """Load the base of the adapter in `origin`, and merge the adapter into it.

    Raises:
        ModelError: They cannot be read or merged, or weights are missing.
    """
    from peft import PeftModel
    from peft.utils import get_peft_model_state_dict, load_peft_weights

    from recipe.models.lora import tied

    base = origin.base or origin.adapter["base_model_name_or_path"]
    config = origin.config()
    if origin.base:
        _fit_labels(config, origin.location)
    try:
        model, report = architecture.from_pretrained(
            base, config=config, output_loading_info=True, **dtype_argument(dtype), **origin.options
        )
    except OSError as error:
        raise ModelError(
            f"{origin.location} contains an adapter, and its base {base!r} cannot be read: "
            f"{str(error).splitlines()[0]}",
            "Train with lora_save=merged, or provide the base there.",
        ) from error
    if (Path(origin.location) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(origin.location)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft uses an old name of transformers
            adapted: Any = PeftModel.from_pretrained(model, origin.location)
        weights = load_peft_weights(origin.location, device="cpu")
        adapter_weights = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        refuse_partial(weights, adapter_weights, adapted.state_dict())
        if fault := tied(adapted):
            raise ModelError(f"{fault}.", "Train without adapters of these layers.")
        merged = adapted.merge_and_unload()
    except (*UNLOADABLE, ModelError, AttributeError, KeyError, TypeError) as error:
        reason = str(error) if isinstance(error, ModelError) else why_unloadable(error)
        raise ModelError(
            f"The adapter {origin.location} cannot be merged into its base {base}: {reason}",
            "Give the whole folder that peft wrote, with the base that it was trained on.",
        ) from error
    # A head that is in neither of them would be random.
    brought = {name.removeprefix("base_model.model.") for name in weights}
    lacking = sorted(set(unread(report)) - brought)
    if architecture is AutoModel:
        check_layers(str(base), merged, lacking)
    elif lacking:
        raise ModelError(
            f"Neither the adapter {origin.location} nor its base {base} has {listed(lacking, 3)}.",
            "Train with lora_save=merged, or save the adapter with its head (modules_to_save).",
        )
    return merged


def _fit_labels(config: Any, adapter: str) -> None:
    """Set the number of labels in a base's configuration to that of the adapter's head. Their names
    are unknown, since peft does not save them."""
    from peft.utils import load_peft_weights

    heads = (".classifier.weight", ".classifier.out_proj.weight", ".score.weight")
    weights = load_peft_weights(adapter, device="cpu")
    counts = {len(weight) for name, weight in weights.items() if name.endswith(heads)}
    if len(counts) == 1 and counts != {config.num_labels}:
        (config.num_labels,) = counts
        log(
            f"labels: {config.num_labels} without names, since {adapter} has no config.json "
            "(model.config.save_pretrained writes it)"
        )
