"""Compare a served task with the proof in its model's folder, at each start."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from recipe.backend import precision
from recipe.backend.proofs import checking, computing, reference
from recipe.backend.proofs.proof import NAME, Proof
from recipe.backend.proofs.reference import VARIABLE, cause_of, proof_error
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
    if task.loaded_model is not None and len(task.probes()) != len(proof.probes):
        why = f"{NAME} has {len(proof.probes)} probes, and the task {len(task.probes())}"
        raise proof_error(origin, proof, why, cause_of(origin, proof, "labels or settings"))
    wrong = [outcome for outcome in compare_probes(proof, task, False) if not outcome.is_same]
    if wrong:
        # Other tokens of one probe explain other answers to all.
        first = next((outcome for outcome in wrong if outcome.tokens), wrong[0])
        cause = cause_of(origin, proof, first.kind)
        raise proof_error(origin, proof, first.tokens or first.answer, cause)
    log(
        f"proof: the answers to {len(proof.probes)} probes are those of the training "
        f"({time.process_time() - began:.2f} CPU-s)"
    )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The comparison of one probe with its proof."""

    probe: str
    tokens: str
    """How tokens differ; empty if they do not."""
    difference: float
    """Of the raw values; 0 if they were not computed."""
    tolerance: float
    answer: str
    """How the answer differs; empty if it does not."""
    kind: str
    """What causes a difference of tokens or answers."""

    @property
    def is_same(self) -> bool:
        """Return whether the probe is answered as in the proof."""
        return not (self.tokens or self.answer) and self.difference <= self.tolerance


def compare_probes(proof: Proof, task: ServedTask, computes: bool = True) -> Iterator[Outcome]:
    """Yield the outcome of each probe, in the precision and layout of the task's model.

    Args:
        computes: Whether raw values of texts are computed and compared, too.
    """
    name = str(checking.model_of(task).dtype).removeprefix("torch.")
    loaded, tolerance = task.loaded_model, proof.tolerances.get(name, 0.0)
    for probe, request in zip(proof.probes, task.probes(), strict=False):
        tokens, answer, kind, difference = "", "", "labels or settings", 0.0
        if loaded is None:
            labels, scores = checking.image_values(task, request)
            difference = probe.values[0].difference(scores)
            if labels != probe.answer or difference > tolerance:
                answer = f"scores of {probe.name} differ by {difference:.3g}, and {tolerance:.3g}"
                answer += " is allowed"
            is_moved = probe.values[0].sorted_difference(scores) <= tolerance
            if labels == probe.answer and not is_moved:
                kind = "weights, settings or library"
        else:
            if tokens := checking.token_difference(probe, task, request):
                kind = "tokenizer"
            elif task.generates:
                kind = "settings of generation or library"
            if task.generates:
                answer = checking.continuation_difference(probe, task, request, tolerance)
            else:
                answer = checking.answer_difference(probe, task, request)
            prepared = checking.prepare(task, request) if computes and probe.rows else None
            if prepared is not None:
                reading = checking.rows_of(task, prepared)[1]
                values = computing.compute(loaded, probe.rows, reading)
                pairs = zip(probe.values, values, strict=True)
                difference = max(stored.difference(row) for stored, row in pairs)
        yield Outcome(
            probe=probe.name,
            tokens=tokens,
            difference=difference,
            tolerance=tolerance,
            answer=answer,
            kind=kind,
        )
