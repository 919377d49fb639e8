"""The log-probabilities of a prompt's own tokens, as TGI tells them (decoder_input_details)."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from recipe.inference import turns
from recipe.inference.generation.prompts import Prompt
from recipe.inference.loaded_model import LoadedModel

_AT_ONCE = 256
"""Tokens whose scores over the whole vocabulary are in memory together."""


def prefill(loaded: LoadedModel, prompts: Sequence[Prompt]) -> list[list[dict[str, Any]]]:
    """Of each prompt its tokens: id, text, and how likely each was behind those before it; None of
    the first."""
    return [_tokens(loaded, prompt.ids) for prompt in prompts]


def _tokens(loaded: LoadedModel, ids: Sequence[int]) -> list[dict[str, Any]]:
    model: Any = loaded.model
    # A model that keeps another state than keys and values reads the prompt at once.
    keeps = "past_key_values" in inspect.signature(model.forward).parameters
    size = _AT_ONCE if keeps else len(ids)
    logprobs: list[float | None] = [None]
    before: Any = None
    for start in range(0, len(ids) - 1, size):
        piece = ids[start : start + size]
        followers = ids[start + 1 : start + size + 1]
        own, before = _scores(model, piece, before if keeps else None, keeps=keeps)
        places = torch.arange(len(followers), device=own.device)
        chosen = own[places, torch.tensor(followers, device=own.device)]
        logprobs += [float(each) for each in chosen.cpu()]
        turns.pause()
    texts = loaded.tokenizer.batch_decode([[number] for number in ids])
    return [
        {"id": number, "text": text, "logprob": logprob}
        for number, text, logprob in zip(ids, texts, logprobs, strict=True)
    ]


@torch.inference_mode()
def _scores(
    model: Any, ids: Sequence[int], before: Any, *, keeps: bool
) -> tuple[torch.Tensor, Any]:
    """Log-probabilities [tokens, vocabulary] behind each token, and what is kept for the next."""
    asked = {"past_key_values": before, "use_cache": True} if keeps else {}
    output = model(input_ids=torch.tensor([list(ids)], device=model.device), **asked)
    kept = output.past_key_values if keeps else None
    return output.logits[0].float().log_softmax(-1), kept
