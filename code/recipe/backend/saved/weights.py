"""Loads the weights of a saved model, and refuses missing or NaN weights."""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import AutoModel, PreTrainedModel

from recipe.backend.saved import adapter_files
from recipe.backend.saved.origin import Origin
from recipe.compat import dtype_argument
from recipe.compat.new_weights import check_layers, unread
from recipe.errors import UNLOADABLE, ModelError, why_unloadable


def read(origin: Origin, architecture: Any, dtype: torch.dtype) -> Any:
    """Load a model, or the base of a LoRA adapter with the adapter merged.

    Raises:
        ModelError: It cannot be loaded, or weights are missing, which would be random.
    """
    if origin.adapter:
        return adapter_files.merged(origin, architecture, dtype)
    try:
        model, report = architecture.from_pretrained(
            origin.location, **dtype_argument(dtype), output_loading_info=True, **origin.options
        )
    except UNLOADABLE as error:
        raise ModelError(
            f"The model {origin.location} cannot be loaded: {why_unloadable(error)}",
            "It needs config.json, complete weights (best in model.safetensors) and its tokenizer.",
        ) from error
    missing = unread(report)
    if architecture is AutoModel:
        # Vectors are means of hidden states, so the pooler may be missing.
        check_layers(origin.location, model, missing)
    elif missing:
        raise ModelError(
            f"The model {origin.location} lacks {len(missing)} weights of {type(model).__name__}"
            f" ({', '.join(missing[:3])}).",
            "Check that its files are complete, and that HF_TASK is what it was trained for.",
        )
    return model


def refuse_broken(model: torch.nn.Module, origin: Origin) -> None:
    """Raise ModelError if a weight is NaN or infinite."""
    # Checking the minimum and the maximum takes a twentieth of the time of checking all values.
    broken = [
        name
        for name, weight in model.named_parameters()
        if weight.is_floating_point()
        and weight.numel()
        and not bool(torch.isfinite(torch.stack(torch.aminmax(weight))).all())
    ]
    if broken:
        raise ModelError(
            f"{len(broken)} weights of the model {origin.location} contain NaN or infinity "
            f"({', '.join(broken[:3])}).",
            "Its training diverged, or its file is damaged: use an earlier checkpoint.",
        )


def embeddings_of(model: PreTrainedModel) -> int:
    """Return the number of tokens for which a model has embeddings."""
    return len(cast("Any", model.get_input_embeddings()).weight)
