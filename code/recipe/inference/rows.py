"""What a model reads at once, and what is read of its output."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from recipe.runtime import blocked_weights


@dataclass(frozen=True)
class TokenRow:
    """A text, a pair or a part of one."""

    ids: list[int]
    types: list[int] | None = None
    """Which part of a pair each token is of, if the model asks for it."""
    keep: list[int] | None = None
    """The places of the tokens whose values are wanted; None means all."""


class Reading(enum.Enum):
    """What is wanted of each row."""

    LABELS = "logits [labels]"
    TOKENS = "of each token [tokens, ...]: logits; a span's first and last; or hidden states"
    MEAN = "the mean of the last hidden states [hidden], in float32"


def of_padded(
    reading: Reading, output: Any, mask: Tensor, rows: Sequence[TokenRow]
) -> list[Tensor]:
    """What is wanted of each row of a padded batch.

    Args:
        reading: What.
        output: Of a model of transformers.
        mask: [rows, longest], 1 where there is a token.
        rows: Those of the batch.
    """
    if reading is Reading.LABELS:
        return list(output.logits)
    if reading is Reading.MEAN:
        states = output.last_hidden_state.float()
        weights = mask.unsqueeze(-1).float()
        return list((states * weights).sum(1) / weights.sum(1))
    if "start_logits" in output:
        values = torch.stack([output.start_logits, output.end_logits], dim=-1)
    else:
        values = output.logits if "logits" in output else output[0]
    return [
        own[: len(row.ids)] if row.keep is None else own[row.keep]
        for row, own in zip(rows, values, strict=True)
    ]


def lay_out(
    model: PreTrainedModel, environ: Mapping[str, str], answers: Callable[[], Sequence[Tensor]]
) -> None:
    """Let the linear layers of `model` keep their weights as its CPU's kernels read them, if it has
    such kernels and the model answers as before; else the log says why not.

    Args:
        model: In the precision that it answers in.
        environ: AMPHORA_BLOCKED_WEIGHTS.
        answers: Those of the model to a few texts.

    Raises:
        ValueError: AMPHORA_BLOCKED_WEIGHTS is neither 0 nor 1.
    """
    if blocked_weights.why_not(model, model.dtype, environ) is not None:
        return

    def are_same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
        return are_close(one, other, tolerance_of(other, model.dtype))

    if fault := blocked_weights.use(model, answers, are_same):
        print(f"weights: as PyTorch has them: {fault}", flush=True)


def tolerance_of(expected: Sequence[Tensor], dtype: torch.dtype, exact: float = 1e-3) -> float:
    """By how much values may differ that are the same but for the order of sums.

    Args:
        expected: The values.
        dtype: What they were computed in.
        exact: The share of the largest value, if that is float32.
    """
    scale = max(float(values.abs().max()) for values in expected)
    return (exact if dtype == torch.float32 else 0.06) * max(scale, 1e-3)


def are_close(one: Sequence[Tensor], other: Sequence[Tensor], tolerance: float) -> bool:
    """Whether no number differs by more, and none is NaN."""
    return all(
        torch.allclose(ours, theirs, atol=tolerance, rtol=0)
        for ours, theirs in zip(one, other, strict=True)
    )
