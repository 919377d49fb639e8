"""Log-probabilities of the tokens of prompts and generated texts, as vLLM answers them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from recipe.backend import turns
from recipe.backend.generation.decoding import HALF, NOT_FINITE, pad_token_id
from recipe.backend.generation.prompts import Prompt
from recipe.backend.loaded_model import LoadedModel
from recipe.backend.padded_rows import ALONE, PADDED

_LEAST = -9999.0
"""What vLLM answers for lower log-probabilities, which JSON may not have."""
_SPACE = "\u2581"
_CONTEXT = 4
"""Most tokens of a character."""


def score_tokens(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    texts: Sequence[Sequence[dict[str, Any]]],
    merges: bool,
) -> None:
    """Add `scores` to the generated texts of each prompt: for each token, of the prompt, too, if it
    is echoed, its `text`, `logprob` and those of the likeliest tokens (`top`), by their texts. The
    first token of a prompt has None.

    Args:
        merges: Whether the model answers padded rows, and parts of a row, as whole ones.
    """
    settings = prompts[0].settings
    rows, texts_of_rows = [], []
    for prompt, some in zip(prompts, texts, strict=True):
        for text in some:
            rows.append([*prompt.ids, *(token["id"] for token in text["tokens"])])
            texts_of_rows.append((text, 0 if settings.echo else len(prompt.ids)))
    layout = replace(loaded.padded, merging=PADDED if merges else ALONE)
    for members in layout.cuts([len(row) for row in rows]):
        some_rows = [rows[index] for index in members]
        step = max(1, layout.call_tokens // len(members)) if merges else len(some_rows[-1])
        numbers, values = _log_probabilities(loaded, some_rows, settings.logprobs or 0, step)
        for index, *columns in zip(members, numbers, values, strict=True):
            text, start = texts_of_rows[index]
            positions = range(start, len(rows[index]))
            text["scores"] = [
                _token_score(loaded.tokenizer, rows[index], position, *columns)
                for position in positions
            ]
            turns.pause()


@torch.inference_mode()
def _log_probabilities(
    loaded: LoadedModel, rows: Sequence[list[int]], top: int, step: int
) -> tuple[list[Any], list[Any]]:
    """Return the ids of each token but the first, and of the `top` likeliest ones in its place, and
    their log-probabilities, [rows, longest - 1, 1 + top]. Only `step` positions at once have scores
    of the vocabulary."""
    model: Any = loaded.model
    tensors = [torch.tensor(row) for row in rows]
    # Padding follows the tokens, so causal attention needs no mask.
    ids = pad_sequence(tensors, batch_first=True, padding_value=pad_token_id(loaded))
    ids = ids.to(model.device)
    pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
    before: dict[str, Any] = {}
    # The name since transformers 5.24, and the one before.
    taken = inspect.signature(model.forward).parameters
    key = "cache" if "cache" in taken else "past_key_values"
    for start in range(0, ids.shape[1] - 1, step):
        following = ids[:, start + 1 : start + 1 + step, None]
        output = model(ids[:, start : start + step], use_cache=step < ids.shape[1], **before)
        before = {key: getattr(output, key)} if step < ids.shape[1] else {}
        logits = output.logits[:, : following.shape[1]].float()
        total = logits.logsumexp(-1, keepdim=True)
        if not bool(total.isfinite().all()):
            raise ArithmeticError(NOT_FINITE)
        best = logits.topk(top)
        chosen = torch.cat([logits.gather(-1, following), best.values], -1) - total
        pieces.append((torch.cat([following, best.indices], -1), chosen.clamp(min=_LEAST)))
        turns.pause()
    if not pieces:
        return [[]] * len(rows), [[]] * len(rows)
    numbers, values = (torch.cat(parts, 1).tolist() for parts in zip(*pieces, strict=True))
    return numbers, values


def _token_score(
    tokenizer: Any, row: list[int], position: int, numbers: list[Any], values: list[Any]
) -> dict[str, Any]:
    if position == 0:
        return {"text": str(tokenizer.decode([row[0]])), "logprob": None, "top": None}
    before = row[max(0, position - _CONTEXT) : position]
    names = [_text_of(tokenizer, before, number) for number in numbers[position - 1]]
    top: dict[str, float] = {}
    for name, value in zip(names, values[position - 1], strict=True):
        # Several bytes of characters are alike, and the likeliest token must not be lost.
        top[name] = max(value, top.get(name, value))
    return {"text": names[0], "logprob": values[position - 1][0], "top": top}


def _text_of(tokenizer: Any, before: list[int], number: int) -> str:
    """Return a token's text as vLLM decodes it: with the spaces of its piece, and all of a
    character after its last token."""
    text = str(tokenizer.decode([number]))
    if not text.endswith(HALF):
        piece = str(tokenizer.convert_ids_to_tokens(number))
        spaces = len(piece) - len(piece.lstrip(_SPACE)) - (len(text) - len(text.lstrip(" ")))
        return " " * spaces + text
    for count in range(1, len(before) + 1):
        whole = str(tokenizer.decode([*before[-count:], number]))
        if not whole.endswith(HALF):
            clean = before[-count:]
            while clean and str(tokenizer.decode(clean[-1:])).endswith(HALF):
                clean.pop()
            return whole[len(str(tokenizer.decode(clean))) if clean else 0 :]
    return ""
