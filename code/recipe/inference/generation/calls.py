"""What transformers' `generate` is called with for prompts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from recipe.errors import ModelError
from recipe.inference.generation.decoding import Ends
from recipe.inference.generation.prompts import Prompt
from recipe.inference.loaded_model import LoadedModel

# What makes generate quicker and changes no text, but gives several tokens at a step.
_SEVERAL_TOKENS = ("prompt_lookup_num_tokens", "assistant_early_exit")
_OUTPUTS = ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions",
            "output_hidden_states")  # fmt: skip


def settle(model: Any, place: str) -> None:
    """Give a model settings of its own for `generate` by which that returns tokens, one a step.

    Args:
        model: Its generation_config is replaced, not changed: others may share it.
        place: Where it lies, for messages.

    Raises:
        ModelError: Its settings would change what a prompt says.
    """
    config = copy.deepcopy(model.generation_config)
    if getattr(config, "token_healing", None):
        raise ModelError(
            f"The generation_config.json of {place} asks for token_healing, which puts another "
            "token in the place of a prompt's last one.",
            "Leave token_healing out of it.",
        )
    for name in _SEVERAL_TOKENS:
        if getattr(config, name, None):
            print(f"writes: without {name} of generation_config.json", flush=True)
            setattr(config, name, None)
    for name in _OUTPUTS:
        if getattr(config, name, None):
            setattr(config, name, False)
    model.generation_config = config


def ends(loaded: LoadedModel, prompt: Prompt) -> Ends:
    """What ends the texts of a prompt."""
    model: Any = loaded.model
    configured = model.generation_config.eos_token_id
    tokens = [loaded.tokenizer.eos_token_id]
    if configured is not None:
        listed = configured if isinstance(configured, list) else [configured]
        # Chat models often end their turns with a token that only their tokenizer names.
        tokens = [*listed, *(tokens if prompt.is_chat else [])]
    return Ends(
        ids=frozenset(number for number in tokens if number is not None),
        stop=prompt.settings.stop,
        most=prompt.new,
    )


def weighs_prompts(model: Any) -> bool:
    """Whether a decoder's own settings weigh what a prompt holds: its padding would weigh too."""
    own = model.generation_config
    return own.repetition_penalty not in (None, 1.0) or bool(own.no_repeat_ngram_size)


def weighs_sources(model: Any) -> bool:
    """The same of what the encoder of an encoder-decoder reads."""
    own = model.generation_config
    penalty = own.encoder_repetition_penalty
    return penalty not in (None, 1.0) or bool(own.encoder_no_repeat_ngram_size)


def pad_token_id(loaded: LoadedModel) -> int:
    """The tokenizer's; if it has none, a token that the mask hides."""
    tokenizer = loaded.tokenizer
    known: tuple[Any, ...] = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return int(next(number for number in known if number is not None))


def inputs(loaded: LoadedModel, prompts: Sequence[list[int]]) -> dict[str, torch.Tensor]:
    """Prompts padded on the left, so that what is written follows each: shape (prompts, tokens)."""
    longest = max(map(len, prompts))
    mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
    padded = [[pad_token_id(loaded)] * (longest - len(ids)) + ids for ids in prompts]
    device = loaded.model.device
    return {
        "input_ids": torch.tensor(padded, device=device),
        "attention_mask": torch.tensor(mask, device=device),
    }
