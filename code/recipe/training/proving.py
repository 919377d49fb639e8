"""Write the proof of a finished model, and the checksums of its files."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

from recipe.backend import precision
from recipe.backend.pipelines.foreign import Foreign
from recipe.backend.proofs import making
from recipe.backend.proofs.proof import Proof
from recipe.backend.proofs.trained_answers import TrainedAnswers
from recipe.models.sources.origin import Origin
from recipe.plan.table import Table
from recipe.runtime import memory
from recipe.storage import checksums
from recipe.task_table import SERVED, resolve, served_as
from recipe.tasks.base import OK, WARNING, Finding

_MOST_MEASURED = 4_000_000_000
"""Bytes of the largest model whose errors are measured in float64."""
_COPIES = {True: 5, False: 2.5}
"""Free memory in float32, as a multiple of the files, for models that are measured and others: the
files may have half the bits."""
_COPIES_OF_HALF = 1.5
_MOST_OF_STOPPED = 2_000_000_000
"""Bytes of the largest model that is proved within the 120 s that a stopped job has."""


def prove(
    task: str,
    folder: Path,
    table: Table,
    is_partial: bool,
    environ: Mapping[str, str],
    trained: TrainedAnswers | str = "",
) -> str:
    """Write proof.json into the folder of a model, and SHA256SUMS. If the proof cannot be computed,
    the table has a warning, and the model has none.

    Args:
        task: The task of the training.
        folder: The files of the model, as they are served.
        is_partial: Whether the training was stopped, and the job ends soon.
        environ: The variables by which a server would load it.
        trained: The answers of the model in memory, or why there are none.

    Returns:
        How the saved model differs from the one in memory: then it has no proof. Empty if it does
        not differ, or was not compared.
    """
    sums = checksums.sums(folder)
    level, fault = WARNING, ""
    try:
        proof, fault, compared = _made(task, folder, sums, is_partial, environ, trained)
        if fault:
            detail = f"not written: the saved model does not answer as the trained one: {fault}"
        else:
            proof.write(folder)
            allowed = ", ".join(f"{kind} {most:.2g}" for kind, most in proof.tolerances.items())
            detail = f"{len(proof.probes)} probes, differences allowed: {allowed}; {compared}"
            level = OK
    except Exception as error:  # the trained model matters more than its proof
        detail = f"not written: {type(error).__name__}: {str(error)[:300]}"
    table.append(Finding(level=level, what="proof", detail=detail))
    checksums.write(folder, sums)
    return fault


def _made(
    task: str,
    folder: Path,
    sums: Mapping[str, str],
    is_partial: bool,
    environ: Mapping[str, str],
    trained: TrainedAnswers | str,
) -> tuple[Proof, str, str]:
    """Return the proof, how the saved model differs from the trained one, and whether they were
    compared."""
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if is_partial and size > _MOST_OF_STOPPED:
        raise MemoryError("the model is too large for the time of a stopped job")
    free, kind = memory.available(), "float32"
    if free is not None and free < _COPIES[size <= _MOST_MEASURED] * size:
        kind = "bfloat16"
        if free < (needed := int(_COPIES_OF_HALF * size)):
            raise MemoryError(f"{memory.size(needed)} are needed, {memory.size(free)} are free")
    with precision.as_reference(kind), _quiet(), torch.random.fork_rng([]):
        name, served = load(task, folder, environ)
        values = None
        if isinstance(trained, TrainedAnswers):
            try:
                values = trained.repeat(served)
            except Exception as error:
                trained = f"{type(error).__name__}: {str(error)[:200]}"
        proof = making.make(name, served, sums)  # changes the precision of what is served
    if values is None or isinstance(trained, str):
        return proof, "", f"not compared with the trained model: {trained}"
    return proof, trained.compare(served, values, proof), "equal to the trained model"


def load(task: str, folder: Path, environ: Mapping[str, str]) -> tuple[str, Any]:
    """Return the name of the task that serves a model of a training task, and the loaded model."""
    origin, name = Origin.find(str(folder), environ), served_as(task)
    if (entry := SERVED.get(name)) is None:
        return name, Foreign.load(origin, name, {})
    return name, resolve(entry.load)(origin, **entry.options)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress what loading a model for serving logs."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(level)
