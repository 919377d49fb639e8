"""The content of proof.json: what a model answers to the fixed probes.

Tolerances are differences of raw values (logits, vectors, log-probabilities). The references are
computed in float64, or float32, each text alone; the scale is their largest value. Shares of the
scale are those of MiniLM.

- float32: 32 x the error of float32 measured at training, at least 1e-5 x scale. That is 1.1e-5;
  other sums (AVX2, threads) change 4e-7, and gelu_new instead of gelu 8e-4.
- bfloat16: 4 x the measured error of bfloat16, from 0.01 to 0.25 x scale. That is 0.03.
- float16: a quarter of that, as it has three more bits; its error is 0.001.
- int8: 2 x the measured error of the encoder in int8, at least 0.02 x scale (int8/proof.json).

If a precision cannot be measured, float32 may differ by 1e-4 x scale and half precision by 0.06 x
scale. NaN and infinity are beyond every tolerance.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipe.backend.rows import TokenRow
from recipe.errors import ModelError

NAME, FORMAT = "proof.json", 1
GENERATED = "log-probabilities"
"""The reading of models that generate text: of the tokens of a prompt and those that follow."""
_MOST_COLUMNS, _BEST_COLUMNS = 2048, 16
_FLOORS = {"float32": 1e-5, "bfloat16": 1e-2}
_FACTORS = {"float32": 32, "bfloat16": 4}
_MOST_SHARE = 0.25
_UNMEASURED = {"float32": 1e-4, "bfloat16": 0.06, "float16": 0.06}


@dataclass(frozen=True)
class ProbeRow(TokenRow):
    """The tokens of a row that the model reads for a probe."""

    tokens: list[int] | None = None
    """The tokens that a model generates after `ids`; of an encoder-decoder all of the decoder's."""


@dataclass(frozen=True, kw_only=True)
class StoredValues:
    """The raw values of a row. Of more than 2,048 columns, the largest and others at equal
    distances are stored."""

    shape: list[int]
    columns: list[int] | None
    numbers: list[float]

    @classmethod
    def store(cls, values: Tensor) -> StoredValues:
        """Store a tensor of float32 with eight digits."""
        columns = None
        kept = values
        if values.ndim and (width := values.shape[-1]) > _MOST_COLUMNS and values.numel():
            rows = values.reshape(-1, width)
            best = rows.topk(_BEST_COLUMNS, dim=-1).indices.flatten().tolist()
            columns = sorted({*best, *range(0, width, -(-width // 128))})
            kept = values[..., columns]
        numbers = [float(f"{number:.8g}") for number in kept.flatten().tolist()]
        return cls(shape=list(values.shape), columns=columns, numbers=numbers)

    def restore(self) -> Tensor:
        """Return the tensor; columns that are not stored have the least stored number."""
        numbers = torch.tensor(self.numbers)
        if self.columns is None:
            return numbers.reshape(self.shape)
        least = float(numbers.min()) if len(self.numbers) else 0.0
        whole = torch.full(self.shape, least)
        whole[..., self.columns] = numbers.reshape(*self.shape[:-1], len(self.columns))
        return whole

    def difference(self, values: Tensor) -> float:
        """Return the largest difference from other values of the row; infinity if their shapes
        differ, or one of them is NaN or infinite."""
        if list(values.shape) != self.shape:
            return float("inf")
        if self.columns is not None:
            values = values[..., self.columns]
        others = torch.tensor(self.numbers).reshape(values.shape)
        largest = float((values - others).abs().max()) if values.numel() else 0.0
        return largest if largest < float("inf") else float("inf")

    def sorted_difference(self, values: Tensor) -> float:
        """Return the largest difference of the sorted values."""
        ordered = torch.tensor(self.numbers).sort().values
        if ordered.shape != values.flatten().shape:
            return float("inf")
        return float((values.flatten().sort().values - ordered).abs().max())


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A probe with its answer."""

    name: str
    rows: list[ProbeRow]
    """Empty if the request is refused, or the model reads no tokens."""
    values: list[StoredValues]
    """One for each row; of images one of the scores."""
    answer: Any
    """What the task makes of these values, as JSON; of a refused request None."""
    margins: list[float] = field(default_factory=list)
    """By how much the generated tokens are better than the second best, in log-probability."""
    prompt: Any = None
    """The text or the messages that are continued."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What a model answers to the probes."""

    task: str
    """The task of the requests, such as fill-mask."""
    handler: str
    """The name of the class that answers them."""
    reading: str
    precision: str
    """That of the reference answers."""
    device: str
    versions: Mapping[str, str]
    tolerances: Mapping[str, float]
    files: Mapping[str, str]
    """The SHA-256 sums of the model's files."""
    probes: Sequence[Probe]
    amphora_proof: int = FORMAT

    @property
    def rows(self) -> list[ProbeRow]:
        """Return the rows of all probes."""
        return [row for probe in self.probes for row in probe.rows]

    @property
    def values(self) -> list[StoredValues]:
        """Return the values of all probes."""
        return [stored for probe in self.probes for stored in probe.values]

    def write(self, folder: Path) -> None:
        """Write proof.json."""
        (folder / NAME).write_text(json.dumps(dataclasses.asdict(self)) + "\n")

    @classmethod
    def read(cls, document: Any, location: str) -> Proof | None:
        """Return the proof in a JSON document; None if it is something else. Raise ModelError if it
        is of another version or incomplete."""
        if not isinstance(document, dict) or "amphora_proof" not in document:
            return None
        if document["amphora_proof"] != FORMAT:
            raise ModelError(
                f"{NAME} of {location} has the format {document['amphora_proof']!r}, and this "
                f"image reads {FORMAT}.",
                "Serve the model by the image that trained it, or set AMPHORA_PROOF=off.",
            )
        try:
            probes = [
                Probe(
                    **{
                        **probe,
                        "rows": [ProbeRow(**row) for row in probe["rows"]],
                        "values": [StoredValues(**stored) for stored in probe["values"]],
                    }
                )
                for probe in document["probes"]
            ]
            return cls(**{**document, "probes": probes})
        except (TypeError, KeyError, ValueError) as error:
            raise ModelError(
                f"{NAME} of {location} is incomplete: {error}.",
                "Copy the model's files again, or set AMPHORA_PROOF=off.",
            ) from error


def tolerances_of(
    reference: Sequence[Tensor], measured: Mapping[str, Sequence[Tensor]]
) -> dict[str, float]:
    """Return the tolerance of each precision.

    Args:
        reference: The values of each row.
        measured: The values of the rows in float32 and bfloat16, if these were computed.
    """
    scale = scale_of(reference)
    tolerances = {name: share * scale for name, share in _UNMEASURED.items()}
    for name, values in measured.items():
        error = largest_difference(values, reference)
        most = _MOST_SHARE * scale
        error = error if error < float("inf") else most
        tolerances[name] = min(max(_FLOORS[name] * scale, _FACTORS[name] * error), most)
        if name == "bfloat16":
            tolerances["float16"] = tolerances[name] / 4
    return tolerances


def scale_of(reference: Sequence[Tensor]) -> float:
    """Return the largest value of a reference, or 1e-3."""
    sizes = [float(values.abs().max()) for values in reference if values.numel()]
    return max([1e-3, *sizes])


def largest_difference(values: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """Return the largest difference of two lists of tensors; NaN counts as infinity."""
    largest = 0.0
    for one, other in zip(values, reference, strict=True):
        if one.numel():
            difference = float((one - other).abs().max())
            largest = max(largest, difference if difference < float("inf") else float("inf"))
    return largest
