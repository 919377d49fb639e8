"""Compare a served task with the proof in its model's folder, at each start."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from recipe.backend import precision
from recipe.backend.proofs import checking, computing, reference
from recipe.backend.proofs.proof import NAME, Probe, Proof
from recipe.backend.proofs.reference import VARIABLE, cause_of, proof_error
from recipe.backend.requests.payloads import Request
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
    requests = task.probes()
    if len(requests) != len(proof.probes):
        why = f"{NAME} has {len(proof.probes)} probes, and the task {len(requests)}"
        raise proof_error(origin, proof, why, cause_of(origin, proof, "labels or settings"))
    pairs = list(zip(proof.probes, requests, strict=True))
    for probe, request in pairs:
        if why := checking.token_difference(probe, task, request):
            raise proof_error(origin, proof, why, cause_of(origin, proof, "tokenizer"))
    for probe, request in pairs:
        if why := last_difference(proof, probe, task, request):
            kind = "settings of generation or library" if task.generates else "labels or settings"
            raise proof_error(origin, proof, why, cause_of(origin, proof, kind))


def last_difference(proof: Proof, probe: Probe, task: ServedTask, request: Request) -> str:
    """Return how the end of a task's work on a probe differs, after tokens and values: the
    generated tokens, or the answer that is made of the values. Empty if it does not."""
    if not task.generates:
        return checking.answer_difference(probe, task, request)
    tolerance = proof.tolerances.get(checking.precision_of(task), 0.0)
    return checking.continuation_difference(probe, task, request, tolerance)


def _verify_images(origin: Origin, proof: Proof, task: ServedTask) -> None:
    tolerance = proof.tolerances.get(checking.precision_of(task), 0.0)
    for probe, request in zip(proof.probes, task.probes(), strict=False):
        labels, values = checking.image_values(task, request)
        difference = probe.values[0].difference(values)
        if labels == probe.answer and difference <= tolerance:
            continue
        why = f"scores of {probe.name} differ by {difference:.3g}, and {tolerance:.3g} is allowed"
        is_moved = probe.values[0].sorted_difference(values) <= tolerance
        is_named = is_moved or labels != probe.answer
        kind = "labels or settings" if is_named else "weights, settings or library"
        raise proof_error(origin, proof, why, cause_of(origin, proof, kind))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The comparison of one probe with its proof."""

    probe: str
    tokens: str
    """How tokens differ; empty if they do not."""
    difference: float
    """Of the raw values."""
    tolerance: float
    answer: str
    """How the answer differs; empty if it does not."""

    @property
    def is_same(self) -> bool:
        """Return whether the probe is answered as in the proof."""
        return not (self.tokens or self.answer) and self.difference <= self.tolerance


def compare_probes(proof: Proof, task: ServedTask) -> list[Outcome]:
    """Return the outcome of each probe, in the precision and layout of the task's model."""
    tolerance = proof.tolerances.get(checking.precision_of(task), 0.0)
    loaded, outcomes = task.loaded_model, []
    for probe, request in zip(proof.probes, task.probes(), strict=False):
        tokens, answer = "", ""
        if loaded is None:
            labels, values = checking.image_values(task, request)
            computed = [values]
            answer = "" if labels == probe.answer else f"labels {labels[:5]}"
        else:
            tokens = checking.token_difference(probe, task, request)
            prepared = checking.prepare(task, request)
            reading = None
            if prepared is not None:
                reading = checking.rows_of(task, prepared)[1]
            computed = computing.compute(loaded, probe.rows, reading) if probe.rows else []
            answer = last_difference(proof, probe, task, request)
        pairs = zip(probe.values, computed, strict=True)
        sizes = [stored.difference(values) for stored, values in pairs]
        outcomes.append(
            Outcome(
                probe=probe.name,
                tokens=tokens,
                difference=max(sizes, default=0.0),
                tolerance=tolerance,
                answer=answer,
            )
        )
    return outcomes
