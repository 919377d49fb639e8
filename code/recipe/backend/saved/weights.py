"""Loads the weights of a saved model, and refuses missing or NaN weights.

A LoRA adapter that peft has saved is merged into its base. peft only warns if an adapter lacks
weights or does not fit the base: the base alone would answer.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModel, GenerationConfig, PreTrainedModel

from recipe.compat import attend_fully
from recipe.compat.new_weights import check_layers, missing_weights, unread_weights
from recipe.errors import UNLOADABLE, ModelError, join_names, why_unloadable
from recipe.models.sources import tokenizers
from recipe.models.sources.origin import Origin

_AFTER_POOLING = {"Dense", "Normalize", "LayerNorm", "Dropout"}
"""sentence-transformers' modules that read the pooled vector alone."""
_SENTENCE_FILES = (
    "Give every file that its save_pretrained wrote, or an encoder with its tokenizer."
)
_OTHER_MODULES = (
    "Only a transformer with pooling and dense layers is read: train others by "
    "examples/retrieval/train_encoder.py, and serve them by the inference.py next to it."
)


def read(origin: Origin, architecture: Any, dtype: torch.dtype) -> Any:
    """Load a model, or the base of a LoRA adapter with the adapter merged. Raise ModelError if it
    cannot be loaded, or weights are missing, which would be random."""
    if origin.adapter:
        return merged(origin, architecture, dtype)
    model, report = origin.read(architecture, dtype)
    missing = unread_weights(report)
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


def read_sentences(origin: Origin, device: str, model_kwargs: Mapping[str, Any]) -> Any:
    """Return the SentenceTransformer that `origin` names: a transformer, its pooling and dense
    layers. Raise ModelError if it cannot be loaded, lacks layers, or consists of something else.

    Args:
        model_kwargs: Keyword arguments with which transformers loads the encoder.
    """
    from sentence_transformers import SentenceTransformer

    kind = origin.sentence_settings.get("model_type") or "SentenceTransformer"
    if kind != "SentenceTransformer":  # would be loaded with mean pooling
        raise ModelError(
            f"The model {origin.location} is a {kind} of sentence-transformers.", _OTHER_MODULES
        )
    with origin.explained(remedy=_SENTENCE_FILES, more=(KeyError, TypeError)):
        sentences: Any = SentenceTransformer(
            origin.location, device=device, model_kwargs=dict(model_kwargs), **origin.options
        )
    parts = [type(module).__name__ for module in sentences]
    encoder = getattr(sentences[0], "auto_model", None)
    is_usual = parts[:2] == ["Transformer", "Pooling"] and set(parts[2:]) <= _AFTER_POOLING
    if not is_usual or not isinstance(encoder, PreTrainedModel):
        what = f"The model {origin.location} consists of {', '.join(parts)}."
        raise ModelError(what, _OTHER_MODULES)
    check_layers(origin.location, encoder, missing_weights(encoder))
    attend_fully(encoder)
    # The library reads the first module from the folder that modules.json names.
    subfolder = (origin.sentence_modules or [{}])[0].get("path", "")
    options = {**origin.options, "subfolder": subfolder}
    tokenizers.match_sentences(sentences[0], origin.location, origin.texts, options)
    return sentences


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
    if surplus := sorted(set(weights) - set(adapter_weights) - set(others)):
        raise ModelError(
            f"the base has no place for its {join_names(surplus, 3)}.",
            "Give the base that it was trained on.",
        )


def merged(origin: Origin, architecture: Any, dtype: torch.dtype) -> Any:
    """Load the base of the adapter in `origin`, and merge the adapter into it. Raise ModelError if
    they cannot be read or merged, or weights are missing."""
    from peft import PeftModel
    from peft.utils import get_peft_model_state_dict, load_peft_weights

    from recipe.models.lora import tied_layer

    base = origin.base or origin.adapter["base_model_name_or_path"]
    try:
        # The adapter may bring a head for other labels than the base's.
        model, report = Origin(base, origin.options).read(
            architecture, dtype, config=origin.config(), ignore_mismatched_sizes=True
        )
    except ModelError as error:
        raise ModelError(
            f"{origin.location} contains an adapter, and its base {base!r} cannot be read: "
            f"{error.message}",
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
        if fault := tied_layer(adapted):
            raise ModelError(f"{fault}.", "Train without adapters of these layers.")
        merged = adapted.merge_and_unload()
    except (*UNLOADABLE, ModelError, AttributeError, KeyError, TypeError) as error:
        reason = str(error) if isinstance(error, ModelError) else why_unloadable(error)
        raise ModelError(
            f"The adapter {origin.location} cannot be merged into its base {base}: {reason}",
            "Give the whole folder that peft wrote, with its base; for other labels than those of "
            "the base also config.json and the tokenizer (save_pretrained of both).",
        ) from error
    # A head that is in neither of them would be random.
    brought = {name.removeprefix("base_model.model.") for name in weights}
    lacking = sorted(set(unread_weights(report)) - brought)
    if architecture is AutoModel:
        check_layers(str(base), merged, lacking)
    elif lacking:
        raise ModelError(
            f"Neither the adapter {origin.location} nor its base {base} has "
            f"{join_names(lacking, 3)}.",
            "Train with lora_save=merged, or save the adapter with its head (modules_to_save).",
        )
    return merged


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


def refuse_headless(model: PreTrainedModel, origin: Origin) -> None:
    """Raise ModelError if the files lack all weights of a part of a model, such as its head. Single
    weights may be of training alone, or of layers that the model leaves out."""
    lost = set(missing_weights(model))
    for part, module in model.named_children():
        names = {f"{part}.{name}" for name, _ in module.named_parameters()}
        if names and names <= lost and part != "pooler":
            raise ModelError(
                f"The model {origin.location} lacks all weights of {part} ({min(names)}, ...).",
                "Check that its files are complete, and that HF_TASK is what it was trained for.",
            )


def embeddings_of(model: PreTrainedModel) -> int:
    """Return the number of tokens for which a model has embeddings."""
    return len(cast("Any", model.get_input_embeddings()).weight)
