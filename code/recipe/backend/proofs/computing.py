"""Compute the raw values of probes: those of an encoder, or log-probabilities of tokens."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recipe.backend.loaded_model import LoadedModel
from recipe.backend.proofs.proof import GENERATED, ProbeRow
from recipe.backend.rows import OutputKind, Pooling

_PADDED_TO = 8
"""Lengths of padded calls are multiples of this, so a row of another length is padded."""


def name_of(reading: OutputKind | None) -> str:
    """Return the name of what is read of a model."""
    if reading is None:
        return GENERATED
    return "POOLING" if isinstance(reading, Pooling) else reading.name


def compute(
    loaded: LoadedModel, rows: Sequence[ProbeRow], reading: OutputKind | None
) -> list[Tensor]:
    """Return the raw values of rows, in float32 on the CPU: one row in a call of its own, which is
    padded alone, and the others together.

    Args:
        reading: What is read of an encoder; None for log-probabilities.
    """
    if reading is None:
        return [log_probabilities(loaded, row) for row in rows]
    lengths = [len(row.ids) % _PADDED_TO for row in rows]
    alone = next((index for index, rest in enumerate(lengths) if rest), 0)
    others = [*rows[:alone], *rows[alone + 1 :]]
    values = loaded.forward(rows[alone : alone + 1], reading)
    rest = loaded.forward(others, reading) if others else []
    return [*rest[:alone], *values, *rest[alone:]]


@torch.inference_mode()
def scores(loaded: LoadedModel, row: ProbeRow) -> tuple[Tensor, Tensor]:
    """Return a model's log-probabilities [tokens, vocabulary], and the tokens that follow: of a
    decoder those of the prompt but the first, and the generated ones.

    The generated tokens are computed in a second call, with the cache of the first.
    """
    model: Any = loaded.model
    ids = torch.tensor([row.ids], device=model.device)
    tokens = row.tokens or []
    if model.config.is_encoder_decoder:
        begin, after = tokens[:1], tokens[1:-1]
        targets = tokens[1:]
        first = model(
            input_ids=ids,
            decoder_input_ids=torch.tensor([begin], device=model.device),
            use_cache=True,
        )
        more: dict[str, Any] = {"encoder_outputs": (first.encoder_last_hidden_state,)}
        name = "decoder_input_ids"
    else:
        begin, after = row.ids, tokens[:-1]
        targets = [*row.ids[1:], *tokens]
        first = model(input_ids=ids, use_cache=True)
        more, name = {}, "input_ids"
    logits = [first.logits[0].float()]
    if after:
        arguments = {name: torch.tensor([after], device=model.device), **more}
        cache = getattr(first, "past_key_values", None)
        if cache is None:
            whole = torch.tensor([[*begin, *after]], device=model.device)
            logits = [model(**{**arguments, name: whole}).logits[0].float()]
        else:
            # The name since transformers 5.24, and the one before.
            taken = inspect.signature(model.forward).parameters
            key = "cache" if "cache" in taken else "past_key_values"
            then = model(**arguments, **{key: cache}, use_cache=True)
            logits.append(then.logits[0].float())
    table = torch.cat(logits).log_softmax(-1).cpu()
    return table[: len(targets)], torch.tensor(targets)


def log_probabilities(loaded: LoadedModel, row: ProbeRow) -> Tensor:
    """Return the log-probability of each token that follows."""
    table, targets = scores(loaded, row)
    return table.gather(1, targets[:, None])[:, 0]


def margins(loaded: LoadedModel, row: ProbeRow) -> list[float]:
    """Return by how much each generated token is better than all others; less than 0 if the
    model's settings of generation, such as penalties, chose another than the likeliest."""
    table, targets = scores(loaded, row)
    count = len(row.tokens or []) - bool(loaded.model.config.is_encoder_decoder)
    generated: list[float] = []
    for line, target in zip(table[-count:] if count else [], targets[-count:], strict=False):
        best, second = line.topk(2).values.tolist()
        chosen = float(line[target])
        generated.append(round(chosen - (second if chosen == best else best), 6))
    return generated
