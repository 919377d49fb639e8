"""Make the proof of a model: its answers to the probes in float32 on the CPU, each text alone, and
how far other precisions are from these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recipe.backend.loaded_model import LoadedModel
from recipe.backend.proofs import checking, computing
from recipe.backend.proofs.computing import name_of
from recipe.backend.proofs.proof import Probe, ProbeRow, Proof, StoredValues, tolerances_of
from recipe.backend.proofs.reference import versions
from recipe.backend.rows import OutputKind, Pooling
from recipe.backend.served_task import ServedTask
from recipe.errors import ModelError

_MOST_MEASURED = 1_000_000_000
"""The parameters of the largest model whose errors are measured, which takes twice its memory in
float32 and four times the time."""


def make(name: str, task: ServedTask, files: Mapping[str, str]) -> Proof:
    """Return the proof of a model that is loaded for reference (`precision.as_reference`). The
    model cannot be used afterwards. Raise ModelError if it answers no probe, or an answer is NaN or
    infinite.

    Args:
        name: The task, by which the server serves the model.
        task: The model.
        files: The SHA-256 sums of the model's files.
    """
    requests = task.probes()
    prepared = [checking.prepare(task, request) for request in requests]
    if not any(prepared):
        raise ModelError("The model refuses all probes.", "")
    loaded = task.loaded_model
    if loaded is None:
        return _prove_images(name, task, files)
    rows: list[list[ProbeRow]] = []
    reading: OutputKind | None = None
    for some in prepared:
        rows.append([])
        if some is not None:
            rows[-1], reading = checking.rows_of(task, some)
            if reading is None:
                rows[-1] = [ProbeRow(ids=rows[-1][0].ids, tokens=task.continue_prompt(some))]
    flat = [row for group in rows for row in group]
    values = computing.compute(loaded, flat, reading)
    if not all(bool(torch.isfinite(some).all()) for some in values):
        raise ModelError("An answer is NaN or infinite.", "")
    stored, probes = iter(map(StoredValues.store, values)), []
    for number, (some, group) in enumerate(zip(prepared, rows, strict=True), 1):
        prompt = None
        kept = [next(stored) for _ in group]
        answer, margins = None, list[float]()
        if reading is None:
            margins = [margin for row in group for margin in computing.margins(loaded, row)]
            prompt = requests[number - 1].inputs[0]
        elif some is not None:
            answer = _rounded(checking.answer_of(task, some, [one.restore() for one in kept]))
        probes.append(
            Probe(
                name=f"probe {number}",
                rows=group,
                values=kept,
                answer=answer,
                margins=margins,
                prompt=prompt,
            )
        )
    return Proof(
        task=name,
        handler=type(task).__name__,
        reading=name_of(reading),
        precision=str(loaded.model.dtype).removeprefix("torch."),
        device=loaded.model.device.type,
        versions=versions(),
        tolerances=_measure(loaded, flat, reading, values),
        files=files,
        probes=probes,
    )


def _prove_images(name: str, task: ServedTask, files: Mapping[str, str]) -> Proof:
    probes = []
    for number, request in enumerate(task.probes(), 1):
        labels, values = checking.image_values(task, request)
        stored = StoredValues.store(values)
        probes.append(Probe(name=f"image {number}", rows=[], values=[stored], answer=labels))
    reference = [stored.restore() for probe in probes for stored in probe.values]
    return Proof(
        task=name,
        handler=type(task).__name__,
        reading="IMAGE",
        precision="float32",
        device="cpu",
        versions=versions(),
        tolerances=tolerances_of(reference, {}),
        files=files,
        probes=probes,
    )


def _measure(
    loaded: LoadedModel,
    rows: Sequence[ProbeRow],
    reading: OutputKind | None,
    values: Sequence[Tensor],
) -> dict[str, float]:
    """Return the tolerances of a model in float32, which is converted to other types."""
    model: Any = loaded.model
    modules: list[Any] = [model, *(reading.modules if isinstance(reading, Pooling) else ())]
    if model.dtype != torch.float32:
        return tolerances_of(values, {}) | {"float32": tolerances_of(values, {})["bfloat16"]}
    if sum(weight.numel() for weight in model.parameters()) > _MOST_MEASURED:
        return tolerances_of(values, {})
    computed: dict[torch.dtype, list[Tensor]] = {}
    # float32 comes back exactly from float64, and bfloat16 is last.
    for dtype in (torch.float64, torch.bfloat16):
        for module in modules:
            module.to(dtype)
        try:
            computed[dtype] = computing.compute(loaded, rows, reading)
        except (RuntimeError, TypeError):
            continue  # kernels or code for float32 alone
    exact = computed.get(torch.float64, values)
    measured = {"float32": values} if torch.float64 in computed else {}
    if torch.bfloat16 in computed:
        measured["bfloat16"] = computed[torch.bfloat16]
    return tolerances_of(exact, measured)


def _rounded(value: Any) -> Any:
    """Return a JSON value whose fractions have six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    return [_rounded(entry) for entry in value] if isinstance(value, list) else value
