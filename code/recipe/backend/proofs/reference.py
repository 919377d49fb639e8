"""The reference that a start compares layouts and engines with: the model's proof, or the answers
of each text alone in the served precision."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from recipe.backend.loaded_model import LoadedModel
from recipe.backend.proofs import computing
from recipe.backend.proofs.proof import (
    NAME,
    ProbeRow,
    Proof,
    StoredValues,
    tolerances_of,
)
from recipe.backend.requests import probes
from recipe.backend.rows import OutputKind
from recipe.errors import ModelError
from recipe.models.sources.origin import Origin
from recipe.storage import checksums

VARIABLE = "AMPHORA_PROOF"
_LIBRARIES = ("torch", "transformers", "tokenizers", "sentence-transformers")


def find(origin: Origin, environ: Mapping[str, str]) -> Proof | None:
    """Return the proof in the files of a model; None if there is none, or AMPHORA_PROOF is off.

    Raises:
        ModelError: It cannot be read.
        ValueError: AMPHORA_PROOF is neither on nor off.
    """
    setting = environ.get(VARIABLE) or "on"
    if setting not in ("on", "off"):
        raise ValueError(
            f"{VARIABLE} is {setting!r}. Set on (compare with {NAME}) or off (serve anyway)."
        )
    return Proof.read(origin.read_json(NAME), origin.location) if setting == "on" else None


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The row whose values differ the most from those of a reference."""

    size: float
    """Infinity if values are NaN, infinite or of another shape."""
    tolerance: float
    row: str

    @property
    def is_rounding(self) -> bool:
        """Return whether it is within the tolerance."""
        return self.size <= self.tolerance

    def __str__(self) -> str:
        if math.isinf(self.size):
            return f"the answer to {self.row} is NaN, infinite or of another shape"
        return (
            f"the answer to {self.row} differs by {self.size:.3g}, and {self.tolerance:.3g} is "
            "allowed"
        )


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Rows with their values, and how far others may differ."""

    rows: Sequence[ProbeRow]
    reading: OutputKind | None
    expected: Sequence[StoredValues]
    names: Sequence[str]
    """The name of the probe of each row."""
    tolerances: Mapping[str, float]
    proof: Proof | None
    """The proof that it is of; None if it was computed at the start."""

    @classmethod
    def from_proof(cls, proof: Proof | None, reading: OutputKind | None) -> Reference | None:
        """Return the reference of a proof; None without one, or if it holds other values than those
        that are read of the model."""
        if proof is None or proof.reading != computing.name_of(reading) or not proof.rows:
            return None
        names = [probe.name for probe in proof.probes for _ in probe.rows]
        return cls(
            rows=proof.rows,
            reading=reading,
            expected=proof.values,
            names=names,
            tolerances=proof.tolerances,
            proof=proof,
        )

    @classmethod
    def from_texts_alone(cls, loaded: LoadedModel, reading: OutputKind | None) -> Reference:
        """Compute the values of each text alone by a model in its precision."""
        rows, names, values = [], [], []
        for number, text in enumerate(probes.PROMPTS if reading is None else probes.TEXTS, 1):
            row = ProbeRow(**vars(loaded.probe(text)))
            row = _forced(loaded, row) if reading is None else row
            # Embeddings may lack tokens that only a few texts have.
            with contextlib.suppress(IndexError):
                if row.ids:
                    values += computing.compute(loaded.alone(), [row], reading)
                    rows.append(row)
                    names.append(f"probe {number}")
        return cls(
            rows=rows,
            reading=reading,
            expected=list(map(StoredValues.store, values)),
            names=names,
            tolerances=tolerances_of(values, {}),
            proof=None,
        )

    def compare(self, values: Sequence[Tensor], precision: str) -> Difference:
        """Return the largest difference of the values that a layout computed in a precision."""
        sizes = [stored.difference(row) for stored, row in zip(self.expected, values, strict=True)]
        tolerance = self.tolerances.get(precision, 0.0)
        if not sizes:
            return Difference(size=0.0, tolerance=tolerance, row="no probe")
        index = max(range(len(sizes)), key=sizes.__getitem__)
        return Difference(size=sizes[index], tolerance=tolerance, row=self.names[index])

    def try_layout(self, loaded: LoadedModel) -> str:
        """Return why a layout is not used; empty if its answers are the reference's."""
        precision = str(loaded.model.dtype).removeprefix("torch.")
        try:
            values = computing.compute(loaded, self.rows, self.reading)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:200]}"
        difference = self.compare(values, precision)
        return "" if difference.is_rounding else str(difference)


def _forced(loaded: LoadedModel, row: ProbeRow) -> ProbeRow:
    """Return a row whose last tokens, or those of the decoder, are read as if generated."""
    if loaded.model.config.is_encoder_decoder:
        return replace(row, tokens=row.ids[:4])
    middle = max(1, len(row.ids) - 4)
    return replace(row, ids=row.ids[:middle], tokens=row.ids[middle:])


def refused(
    origin: Origin,
    reference: Reference,
    loaded: LoadedModel,
    why_not: str,
    read_exactly: Callable[[], LoadedModel] | None,
) -> ModelError:
    """Return the error for a model whose values are not those of its proof, with the place of the
    difference: precision, weights, library or device.

    Args:
        why_not: The difference, from `Reference.try_layout`.
        read_exactly: Loads the model in float32, each text alone.
    """
    assert reference.proof is not None
    precision = str(loaded.model.dtype).removeprefix("torch.")
    cause = cause_of(origin, reference.proof, "weights or library")
    is_half = precision != "float32" and read_exactly is not None
    if is_half and not reference.try_layout(read_exactly()):  # type: ignore[misc]
        cause = f"precision: float32 gives the answers of {NAME}; set AMPHORA_DTYPE=float32"
    return proof_error(origin, reference.proof, f"in {precision}, {why_not}", cause)


def proof_error(origin: Origin, proof: Proof, difference: str, cause: str) -> ModelError:
    """Return the error for a model that does not answer as its proof says.

    Args:
        difference: What differs.
        cause: Where.
    """
    return ModelError(
        f"The model {origin.location} does not answer as its {NAME} says: {difference}. "
        f"Cause: {cause}.",
        f"{VARIABLE}=off serves it anyway.",
    )


def cause_of(origin: Origin, proof: Proof, kind: str) -> str:
    """Return the cause of a difference of one `kind`, with the files that changed since the proof
    was written, or else the libraries."""
    if changed := changed_files(origin, proof):
        return f"{kind}; since {NAME} was written {', '.join(changed[:5])} changed"
    current = versions()
    others = [
        f"{name} {current.get(name, 'missing')} instead of {version}"
        for name, version in proof.versions.items()
        if current.get(name) != version
    ]
    if others:
        return f"{kind}; {', '.join(others)}"
    return f"{kind}; the files and versions are those of the proof"


def changed_files(origin: Origin, proof: Proof) -> list[str]:
    """Return the files of a model's folder that differ from those of the proof, or are missing."""
    folder = Path(origin.location)
    if not folder.is_dir():
        return []
    return [
        name
        for name, written in proof.files.items()
        if not (folder / name).is_file() or checksums.digest(folder / name) != written
    ]


def versions() -> dict[str, str]:
    """Return the versions of the libraries that compute answers."""
    known = {}
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            known[name] = importlib.metadata.version(name)
    return known
