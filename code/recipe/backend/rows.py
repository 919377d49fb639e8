"""Rows of tokens, padded batches of them, and the values that are read from a model's output."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from recipe.console import log
from recipe.runtime import blocked_weights


@dataclass(frozen=True)
class TokenRow:
    """A text, a pair or a part of one."""

    ids: list[int]
    types: list[int] | None = None
    """The type id of each token, if the model needs them."""
    keep: list[int] | None = None
    """The positions of the tokens whose values are needed; None means all."""


class Reading(enum.Enum):
    """The values that a caller reads of each row."""

    LABELS = "logits [labels]"
    TOKENS = "of each token [tokens, ...]: logits, start and end logits, or hidden states"
    MEAN = "the mean of the last hidden states [hidden], in float32"


@dataclass(frozen=True)
class Pooling:
    """Reads a vector for each row: sentence-transformers' modules compute it of hidden states."""

    modules: Sequence[Any]
    """The modules after the encoder."""
    prompt_length: Any = None
    """Tokens of the prompt before each text, in the form that the library's modules need."""

    def vectors(self, states: Tensor, **features: Any) -> Tensor:
        """Return the vectors [rows, width] of hidden states.

        Args:
            states: [rows, tokens, hidden] with `attention_mask`, or packed rows [1, tokens,
                hidden] with `cu_seq_lens_q`, the start of each row and the end of the last.
            features: The mask, or these positions.
        """
        features["token_embeddings"] = states
        if self.prompt_length is not None:
            features["prompt_length"] = self.prompt_length
        for module in self.modules:
            features = module(features)
        vectors: Tensor = features["sentence_embedding"]
        return vectors


Wanted = Reading | Pooling


@dataclass(frozen=True)
class Values:
    """The values of the rows of one call, in one tensor on the model's device."""

    whole: Tensor
    counts: Sequence[int] | None = None
    """How many entries of the first dimension each row has; None: each row is one entry."""

    def split(self) -> list[Tensor]:
        """Return the values of each row."""
        if self.counts is None:
            return list(self.whole)
        return list(torch.split(self.whole, list(self.counts)))


def padded(
    rows: Sequence[TokenRow], longest: int, pad: int, device: torch.device
) -> dict[str, Tensor]:
    """Return a model's inputs: `input_ids`, `attention_mask` and, if a row has types,
    `token_type_ids`, each [rows, longest], on the device.

    Args:
        rows: The rows of one call.
        longest: Tokens of each row of the tensors.
        pad: The id of the padding token.
        device: The model's device.
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


def of_padded(reading: Wanted, output: Any, mask: Tensor, rows: Sequence[TokenRow]) -> Values:
    """Return the values of each row of a padded batch.

    Args:
        reading: The values to read.
        output: The output of a model of transformers.
        mask: [rows, longest], 1 for tokens and 0 for padding.
        rows: The rows of the batch, which only values of tokens need.
    """
    if isinstance(reading, Pooling):
        return Values(reading.vectors(output[0], attention_mask=mask))
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
    """Return logits, start and end logits, or hidden states [rows, longest, ...]."""
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    values: Tensor = output.logits if "logits" in output else output[0]
    return values


def places_kept(rows: Sequence[TokenRow], begins: Iterable[int]) -> tuple[Tensor, list[int]]:
    """Return the positions of the tokens that rows keep, and how many each row keeps.

    Args:
        rows: The rows of one call.
        begins: The position of each row's first token.
    """
    kept = [range(len(row.ids)) if row.keep is None else row.keep for row in rows]
    places = [
        begin + np.asarray(tokens, dtype=np.int64)
        for tokens, begin in zip(kept, begins, strict=True)
    ]
    return torch.from_numpy(np.concatenate(places)), [len(tokens) for tokens in kept]


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device. Copies to CUDA devices are asynchronous: torch does
    not reuse the pinned memory before the copy is complete."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Coming:
    """Copies values to the host, in float32, without waiting for a CUDA device."""

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
    """Convert the weights of a model's linear layers to the layout of the CPU's kernels, if it has
    such kernels and the model's answers stay the same. Otherwise log the reason.

    Args:
        model: A model in its final precision.
        environ: AMPHORA_BLOCKED_WEIGHTS.
        answers: Computes the model's values of a few texts.

    Raises:
        ValueError: AMPHORA_BLOCKED_WEIGHTS is neither 0 nor 1.
    """
    if blocked_weights.why_not(model, model.dtype, environ) is not None:
        return

    def are_same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
        return are_close(one, other, tolerance_of(other, model.dtype))

    if fault := blocked_weights.use(model, answers, are_same):
        log(f"weights: in PyTorch's layout: {fault}")


def tolerance_of(expected: Sequence[Tensor], dtype: torch.dtype, exact: float = 1e-3) -> float:
    """Return the difference that rounding may cause.

    Args:
        expected: The values.
        dtype: The type in which they were computed.
        exact: The allowed difference in float32, as a share of the largest value.
    """
    scale = max(float(values.abs().max()) for values in expected)
    return (exact if dtype == torch.float32 else 0.06) * max(scale, 1e-3)


def are_close(one: Sequence[Tensor], other: Sequence[Tensor], tolerance: float) -> bool:
    """Return whether all numbers are within a tolerance, and none is NaN."""
    return all(
        torch.allclose(ours, theirs, atol=tolerance, rtol=0)
        for ours, theirs in zip(one, other, strict=True)
    )
