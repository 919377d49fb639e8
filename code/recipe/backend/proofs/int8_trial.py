"""Compare an encoder in int8 with the float weights, and time both on this host."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from recipe.backend.engines import int8
from recipe.backend.engines.ctranslate import Forward
from recipe.backend.engines.int8 import Artefact, Trial
from recipe.backend.loaded_model import LoadedModel
from recipe.backend.proofs import computing
from recipe.backend.proofs.proof import scale_of
from recipe.backend.proofs.reference import Reference
from recipe.errors import ModelError

ALONE = 8
"""How many of the probes are timed one by one."""
_ROUNDS = 2
_FACTOR, _FLOOR = 2, 0.02
"""The tolerance: twice the measured error, at least this share of the largest value."""


def try_out(
    artefact: Artefact,
    forward: Forward,
    reference: Reference,
    prepare: Callable[[], tuple[LoadedModel, LoadedModel]],
) -> Trial:
    """Compare and time the encoder in int8 in a fork: this process stays without threads, so
    that workers can be forked from it. What fails is a reason against int8.

    Args:
        artefact: The model's int8.
        forward: Of its folder.
        reference: The answers of the float weights.
        prepare: Prepares the model in the fork, and returns it as PyTorch computes it, and in
            the layout for int8.
    """

    def measure() -> Trial:
        exact, quick = prepare()
        rows, reading = list(reference.rows), reference.reading
        assert reading is not None
        forward.replace(quick.model)
        values = computing.compute(quick, reference.rows, reading)
        vars(quick.model.base_model).pop("forward", None)
        difference = replace(
            reference.compare(values, "float32"), tolerance=artefact.proof.tolerance
        )
        if not difference.is_rounding:
            return Trial(f"in int8 on this processor, {difference}")
        calls = {"alone": [[row] for row in rows[:ALONE]], "together": [rows]}
        milliseconds: dict[str, list[float]] = {}
        for how, batches in calls.items():
            least = [float("inf"), float("inf")]
            for _ in range(1 + _ROUNDS):  # the first one allocates
                for index, model in enumerate((exact, quick)):
                    if index:
                        forward.replace(quick.model)
                    started = time.process_time()
                    for batch in batches:
                        model.forward(batch, reading)
                    seconds = (time.process_time() - started) / sum(map(len, batches))
                    least[index] = min(least[index], 1000 * seconds)
                    vars(quick.model.base_model).pop("forward", None)
            milliseconds[how] = least
        scale = scale_of([stored.restore() for stored in reference.expected])
        tolerance = max(_FACTOR * difference.size, _FLOOR * scale)
        return Trial(int8.why_slower(milliseconds), milliseconds, tolerance)

    try:
        trial: Trial = int8.run_forked(measure)
    except ModelError as error:
        trial = Trial(error.message)
    return trial
