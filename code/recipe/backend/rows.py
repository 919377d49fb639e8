"""What a model reads at once, and what is read of its output."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
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


@dataclass(frozen=True)
class Values:
    """What is wanted of the rows of one call, in one tensor on the model's device."""

    whole: Tensor
    counts: Sequence[int] | None = None
    """How many of its first dimension are each row's; None: one, without that dimension."""

    def split(self) -> list[Tensor]:
        """Those of each row."""
        if self.counts is None:
            return list(self.whole)
        return list(torch.split(self.whole, list(self.counts)))


def padded(
    rows: Sequence[TokenRow], longest: int, pad: int, device: torch.device
) -> dict[str, Tensor]:
    """What a model is called with: `input_ids`, `attention_mask` and, if a row has some,
    `token_type_ids`, each [rows, longest], on the device.

    Args:
        pad: The id of what fills a row up.
    """
    ids = torch.full((len(rows), longest), pad, dtype=torch.long)
    batch = {"input_ids": ids, "attention_mask": torch.zeros_like(ids)}
    if any(row.types for row in rows):
        batch["token_type_ids"] = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        ids[place, : len(row.ids)] = torch.tensor(row.ids, dtype=torch.long)
        batch["attention_mask"][place, : len(row.ids)] = 1
        if row.types:
            types = torch.tensor(row.types, dtype=torch.long)
            batch["token_type_ids"][place, : len(row.ids)] = types
    return {name: sent(tensor, device) for name, tensor in batch.items()}


def of_padded(reading: Reading, output: Any, mask: Tensor, rows: Sequence[TokenRow]) -> Values:
    """What is wanted of each row of a padded batch.

    Args:
        reading: What.
        output: Of a model of transformers.
        mask: [rows, longest], 1 where there is a token.
        rows: Those of the batch.
    """
    if reading is Reading.LABELS:
        return Values(output.logits)
    if reading is Reading.MEAN:
        states = output.last_hidden_state.float()
        weights = mask.unsqueeze(-1).float()
        return Values((states * weights).sum(1) / weights.sum(1))
    values = of_tokens(output)
    if all(row.keep is None and len(row.ids) == values.shape[1] for row in rows):
        return Values(values.flatten(0, 1), [values.shape[1]] * len(rows))
    begins = range(0, len(rows) * values.shape[1], values.shape[1])
    places, counts = places_kept(rows, begins)
    return Values(values.flatten(0, 1)[sent(places, values.device)], counts)


def of_tokens(output: Any) -> Tensor:
    """[rows, longest, ...] of a model's output: logits, a span's first and last, or states."""
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    values: Tensor = output.logits if "logits" in output else output[0]
    return values


def places_kept(rows: Sequence[TokenRow], begins: Iterable[int]) -> tuple[Tensor, list[int]]:
    """Where the tokens whose values are wanted are, one row's after the other's, and how many of
    each row there are.

    Args:
        rows: Those of one call.
        begins: Where each row's first token is.
    """
    kept = [range(len(row.ids)) if row.keep is None else row.keep for row in rows]
    places = [
        begin + np.asarray(own, dtype=np.int64) for own, begin in zip(kept, begins, strict=True)
    ]
    return torch.from_numpy(np.concatenate(places)), [len(own) for own in kept]


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device. A CUDA device is not waited for: the copy is from pinned
    memory, which torch gives to nobody else before it is made."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Coming:
    """Values that the device copies to the host, in float32, without waiting for the copy."""

    def __init__(self, values: Values) -> None:
        self._counts = values.counts
        self._is_there: Any = None
        whole = values.whole.float()
        if whole.device.type == "cuda":
            self._whole = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True)
            self._whole.copy_(whole, non_blocking=True)
            self._is_there = torch.cuda.current_stream(whole.device).record_event()
        else:
            self._whole = whole.cpu()

    def wait(self) -> list[Tensor]:
        """Wait for the device, and return the values of each row."""
        if self._is_there is not None:
            self._is_there.synchronize()
        return Values(self._whole, self._counts).split()


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
