"""The arguments of transformers' `generate`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from recipe.backend.loaded_model import LoadedModel
from recipe.console import log

# Settings of a generation_config that change prompts, give several tokens a step, or return more
# than tokens.
_IGNORED = ("prompt_lookup_num_tokens", "assistant_early_exit", "token_healing",
            "return_dict_in_generate", "output_scores", "output_logits", "output_attentions",
            "output_hidden_states")  # fmt: skip


def settle(model: Any) -> None:
    """Give a model a `generation_config` with which `generate` returns tokens, one a step.

    It is a copy, since other models may share the original.
    """
    config = copy.deepcopy(model.generation_config)
    for name in _IGNORED:
        if getattr(config, name, None):
            log(f"generation: ignores {name} of generation_config.json")
            setattr(config, name, None)
    model.generation_config = config


def end_ids(model: Any) -> list[int]:
    """Return the end tokens of a model's generation_config."""
    configured = model.generation_config.eos_token_id
    if configured is None:
        return []
    return list(configured) if isinstance(configured, list) else [configured]


def pad_token_id(loaded: LoadedModel) -> int:
    """Return the tokenizer's padding token, or one that the attention mask hides."""
    tokenizer = loaded.tokenizer
    known: tuple[Any, ...] = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return int(next(number for number in known if number is not None))


def padded(
    loaded: LoadedModel, rows: Sequence[list[int]], side: str = "left"
) -> dict[str, torch.Tensor]:
    """Return token ids and attention mask, shapes (rows, tokens), padded on a side: what
    `generate` adds to a decoder's prompts follows them directly."""
    join = partial(pad_sequence, batch_first=True, padding_side=side)
    ids, device = [torch.tensor(row) for row in rows], loaded.model.device
    return {
        "input_ids": join(ids, padding_value=pad_token_id(loaded)).to(device),
        "attention_mask": join([torch.ones_like(row) for row in ids]).to(device),
    }


def set_seed(seed: int | None, index: int) -> None:
    """Seed torch for the inputs of a request from `index` on: those that do not fit into one call
    have different seeds, so that equal ones do not get equal texts."""
    if seed is None:
        torch.seed()  # forked workers would otherwise all draw the same
    else:
        torch.manual_seed((seed + index) % 2**64 if index else seed)
