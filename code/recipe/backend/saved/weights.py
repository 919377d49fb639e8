"""Loads the weights of a saved model, and refuses missing or NaN weights.

A LoRA adapter that peft has saved is merged into its base.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from typing import Any, cast

import torch
from transformers import AutoModel, PreTrainedModel

from recipe.compat import attend_fully
from recipe.compat.new_weights import check_layers, missing_weights, unread_weights
from recipe.errors import UNLOADABLE, ModelError
from recipe.models import sentence_encoders
from recipe.models.changes import adapters
from recipe.models.sources import tokenizers
from recipe.models.sources.origin import Origin

_LIBRARY = "sentence_transformers"
_SETTINGS = ("prompts", "default_prompt_name", "similarity_fn_name", "truncate_dim")
_SCALING = ("rope_parameters", "rope_scaling", "max_position_embeddings")
"""Settings of an encoder with which an adapter may have been trained."""
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
        return adapters.merged(origin, architecture, dtype)
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


def read_sentences(
    origin: Origin,
    device: str,
    model_kwargs: Mapping[str, Any],
    config_kwargs: Mapping[str, Any] | None = None,
    *,
    merges: bool = True,
) -> Any:
    """Return the SentenceTransformer that `origin` names: a transformer, its pooling and dense
    layers. Raise ModelError if it cannot be loaded, lacks layers, or consists of something else.

    Args:
        model_kwargs: Keyword arguments with which transformers loads the encoder.
        config_kwargs: Values of its configuration.
        merges: Whether an adapter is merged into the encoder, which is its base's otherwise.
    """
    from sentence_transformers import SentenceTransformer

    sentences: Any
    if origin.adapter:
        base = Origin(origin.base, origin.options, texts=origin.texts)
        before, after = base.read_settings(), origin.read_settings()
        scaled = {
            name: after[name]
            for name in _SCALING
            if after.get(name) not in (None, before.get(name))
        }
        sentences = read_sentences(base, device, model_kwargs, {**scaled, **(config_kwargs or {})})
        encoder = sentences[0].auto_model
        adapters.fit_vocabulary(origin, encoder)
        if merges:
            merged = adapters.merge_headless(origin, encoder).eval()
            sentence_encoders.set_encoder(sentences[0], merged)
        return surround(sentences, origin, origin.tokenizer())
    kind = origin.sentence_settings.get("model_type") or "SentenceTransformer"
    if kind != "SentenceTransformer":  # would be loaded with mean pooling
        raise ModelError(
            f"The model {origin.location} is a {kind} of sentence-transformers.", _OTHER_MODULES
        )
    with origin.explained(remedy=_SENTENCE_FILES, more=(KeyError, TypeError)):
        sentences = SentenceTransformer(
            origin.location,
            device=device,
            model_kwargs=dict(model_kwargs),
            config_kwargs=dict(config_kwargs or {}),
            **origin.options,
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


def surround(base: Any, origin: Origin, tokenizer: Any) -> Any:
    """Return a SentenceTransformer with the encoder of `base`, another tokenizer, and the further
    modules and prompts of the adapter in `origin`, if it has its own. Raise ModelError if they
    cannot be loaded."""
    from sentence_transformers.util import import_from_string

    sentences, first = copy.copy(base), copy.copy(base[0])
    first.processor = tokenizer
    parts = list(base)[1:]
    if modules := origin.sentence_modules[1:]:
        parts = []
        for module in modules:
            package, _, kind = module["type"].rpartition(".")
            if kind not in {"Pooling", *_AFTER_POOLING} or package.split(".")[0] != _LIBRARY:
                what = f"The adapter {origin.location} has a module {module['type']}."
                raise ModelError(what, _OTHER_MODULES)
            with origin.explained(remedy=_SENTENCE_FILES, more=(KeyError, TypeError)):
                library: Any = import_from_string(module["type"])
                part = library.load(origin.location, subfolder=module["path"])
            parts.append(part.to(first.auto_model.device).eval())
    sentences._modules = {str(number): part for number, part in enumerate([first, *parts])}
    for name, value in origin.sentence_settings.items():
        if name in _SETTINGS:
            setattr(sentences, name, value)
    return sentences


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
    lost: set[str] = set()
    # Not every class that a pipeline loads can be made without memory.
    with contextlib.suppress(*UNLOADABLE):
        lost.update(missing_weights(model))
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
