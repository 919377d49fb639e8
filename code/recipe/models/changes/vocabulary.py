"""Tokens that a job adds to the vocabulary of its model."""

from __future__ import annotations

import json
from typing import Any

from transformers import PreTrainedTokenizerBase

from recipe.console import say_row
from recipe.errors import HyperparameterError, join_names
from recipe.settings import ModelSettings, split_values


def extend(model: Any, tokenizer: Any, settings: ModelSettings) -> list[int]:
    """Add the hyperparameter added_tokens to the tokenizer, and embeddings to the model, which
    start at the mean of the others, as transformers makes them. Return the ids of new tokens.

    Raises:
        HyperparameterError: The model reads no text.
    """
    if not settings.added_tokens:
        return []
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise HyperparameterError(
            f"Hyperparameter added_tokens has value {settings.added_tokens!r}, but the model reads "
            "no text.",
            "Leave it out.",
        )
    try:
        tokens = [str(token) for token in json.loads(settings.added_tokens)]
    except (ValueError, TypeError):
        tokens = split_values(settings.added_tokens)
    vocabulary, tokens = tokenizer.get_vocab(), list(dict.fromkeys(tokens))
    new = [token for token in tokens if token not in vocabulary]
    known = [token for token in tokens if token in vocabulary]
    shown = f"{len(new)} tokens are added: {join_names(new)}" if new else "no token is added"
    say_row("vocabulary", shown + (f"; it has {join_names(known)} already" if known else ""))
    if not new:
        return []
    tokenizer.add_tokens(new)
    ids = [tokenizer.get_vocab()[token] for token in new]
    rows = max(len(model.get_input_embeddings().weight), len(tokenizer))
    # Models may have more rows than tokens, which nobody trained: these start at the mean, too.
    model.resize_token_embeddings(min(ids))
    model.resize_token_embeddings(rows)
    return ids


def adapter_arguments(model: Any, ids: list[int], full: list[str]) -> dict[str, Any]:
    """Return the arguments of peft's LoraConfig by which the modules `full` are trained, and the
    embeddings of these tokens, also those of an output layer.

    Raises:
        HyperparameterError: peft does not train them.
    """
    saved = {"modules_to_save": sorted({*full}) or None}
    if not ids:
        return saved
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    is_tied = layers[1] is not None and layers[0].weight is layers[1].weight
    has_bias = getattr(layers[1], "bias", None) is not None
    if model.config.is_encoder_decoder or (is_tied and has_bias):
        raise HyperparameterError(
            "added_tokens with lora_r is not possible for a model whose embeddings are shared by "
            "encoder and decoder, or by an output layer with a bias: peft would train copies.",
            "Leave lora_r out, or train the tokens without it in a job before.",
        )
    names = [
        name
        for name, module in model.named_modules()
        if any(module is layer for layer in layers)
        and not f"{name}.".startswith(tuple(f"{one}." for one in full))
    ]
    if has_bias:  # which peft's layer for single rows leaves out
        return {"modules_to_save": sorted({*full, *names}) or None}
    return {**saved, "trainable_token_indices": dict.fromkeys(names[:1] if is_tied else names, ids)}
