"""Compare a served task with the proof in its model's folder, at each start."""

from __future__ import annotations

import time
from collections.abc import Mapping

from recipe.backend import precision
from recipe.backend.proofs import checking, reference
from recipe.backend.proofs.proof import NAME, Proof
from recipe.backend.proofs.reference import VARIABLE, disproved
from recipe.backend.served_task import ServedTask
from recipe.console import log
from recipe.models.sources.origin import Origin


def verify(origin: Origin, name: str, task: ServedTask, environ: Mapping[str, str]) -> None:
    """Compare the tokens of the probes, the answers made of the proof's values, and generated
    tokens. `loading` has compared the values. Log the outcome.

    Args:
        name: The task for which the model is served.

    Raises:
        ModelError: The model does not answer as its proof says.
        ValueError: AMPHORA_PROOF is neither on nor off.
    """
    if precision.is_reference():
        return
    proof = reference.find(origin, environ)
    if proof is None:
        if environ.get(VARIABLE) == "off":
            log(f"WARNING: {VARIABLE}=off: answers are not compared with {NAME}")
        return
    if proof.handler != type(task).__name__:
        log(f"proof: made for {proof.task}; requests of {name} are not compared with it")
        return
    began = time.process_time()
    if task.loaded_model is None:
        _verify_images(origin, proof, task)
    else:
        _verify_texts(origin, proof, task)
    log(
        f"proof: the answers to {len(proof.probes)} probes are those of the training "
        f"({time.process_time() - began:.2f} CPU-s)"
    )


def _verify_texts(origin: Origin, proof: Proof, task: ServedTask) -> None:
    assert task.loaded_model is not None
    requests = task.probes()
    if len(requests) != len(proof.probes):
        cause = f"labels or settings: the task has {len(requests)} probes"
        raise disproved(origin, proof, f"{NAME} has {len(proof.probes)} probes", cause)
    if why := checking.tokens_differ(proof, task, requests):
        raise disproved(origin, proof, why, reference.cause_of(origin, proof, "tokenizer"))
    if task.generates:
        kind = str(task.loaded_model.model.dtype).removeprefix("torch.")
        tolerance = proof.tolerances.get(kind, 0.0)
        if why := checking.generated_differ(proof, task, requests, tolerance):
            cause = reference.cause_of(origin, proof, "settings of generation or library")
            raise disproved(origin, proof, why, cause)
    elif why := checking.answers_differ(proof, task, requests):
        cause = reference.cause_of(origin, proof, "labels or settings")
        raise disproved(origin, proof, why, cause)


def _verify_images(origin: Origin, proof: Proof, task: ServedTask) -> None:
    for probe, request in zip(proof.probes, task.probes(), strict=False):
        (answer,) = task.predict([task.prepare(request)])
        labels, values = checking.image_values(answer)
        difference = probe.values[0].difference(values)
        tolerance = proof.tolerances[checking.precision_of(task)]
        if labels == probe.answer and difference <= tolerance:
            continue
        why = f"scores of {probe.name} differ by {difference:.3g}, and {tolerance:.3g} is allowed"
        is_moved = probe.values[0].sorted_difference(values) <= tolerance
        is_named = is_moved or labels != probe.answer
        kind = "labels or settings" if is_named else "weights, settings or library"
        raise disproved(origin, proof, why, reference.cause_of(origin, proof, kind))
