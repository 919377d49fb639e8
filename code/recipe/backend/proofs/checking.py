"""Answer the probes by a served task, and compare tokens and answers with those of a proof.

A task's code reads a probe's request, computes raw values of rows of tokens, and makes the answer
of them. The three are compared one after the other, so that a difference has a place: rows with
`prepare`, values by the layout of the model (`computing`), and the answer by `predict`, which here
receives the values of the proof.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from recipe.backend.loaded_model import LoadedModel
from recipe.backend.proofs.proof import Probe, ProbeRow
from recipe.backend.requests.payloads import BadRequest, Request
from recipe.backend.rows import OutputKind, TokenRow
from recipe.backend.served_task import ServedTask

_SAME_SCORE = 1e-4
"""The difference of scores that are made of the same values."""
_DECODED = {"sequence"}
"""Keys of whole texts that are decoded, which versions of tokenizers space differently."""


class Captured(Exception):
    """What a task would compute for a request."""

    def __init__(self, rows: Sequence[TokenRow], reading: OutputKind) -> None:
        super().__init__("rows")
        self.rows, self.reading = rows, reading


@dataclass(frozen=True, kw_only=True)
class _Replay(LoadedModel):
    """A model that computes nothing: it returns given values, or raises what it should compute."""

    given: Iterator[Sequence[Tensor]]

    def forward(self, rows: Sequence[TokenRow], reading: OutputKind) -> list[Tensor]:
        if (values := next(self.given, None)) is None:
            raise Captured(rows, reading)
        return list(values)


def replay_task(task: ServedTask, given: Sequence[Sequence[Tensor]]) -> ServedTask:
    """Return the task with a model that returns the values that are given for each of its calls,
    and raises Captured for the call after them."""
    loaded = task.loaded_model
    assert loaded is not None
    kept = {item.name: getattr(loaded, item.name) for item in fields(LoadedModel)}
    replay = _Replay(**{**kept, "given": iter(given)})
    replaced: ServedTask = dataclasses.replace(task, loaded=replay)  # type: ignore[type-var]
    return replaced


def prepare(task: ServedTask, request: Request) -> Request | None:
    """Return a probe's request as its task prepares it; None if it is refused."""
    try:
        return task.prepare(request)
    except BadRequest:
        return None


def rows_of(task: ServedTask, prepared: Request) -> tuple[list[ProbeRow], OutputKind | None]:
    """Return the rows of tokens that a task computes for a request, and what it reads of each;
    None for a prompt, whose generated tokens are not among them."""
    if task.generates:
        return [ProbeRow(ids=list(task.prompt_ids(prepared)))], None
    try:
        replay_task(task, []).predict([prepared])
    except Captured as captured:
        return [ProbeRow(**vars(row)) for row in captured.rows], captured.reading
    raise TypeError(f"{type(task).__name__} does not compute its answers by its LoadedModel")


def answer_of(task: ServedTask, prepared: Request, values: Sequence[Tensor]) -> Any:
    """Return the task's answer to a request, made of values of its rows, as JSON."""
    answerer = replay_task(task, [values]) if task.loaded_model is not None else task
    with torch.inference_mode():
        (answer,) = answerer.predict([prepared])
    if isinstance(answer, Exception):
        raise answer
    return json.loads(json.dumps(answer["entries"]))


def image_values(task: ServedTask, request: Request) -> tuple[list[str], Tensor]:
    """Return the labels of the answer to an image, in order, and the score of each."""
    (answer,) = task.predict([task.prepare(request)])
    if isinstance(answer, Exception):
        raise answer
    entries = answer["entries"]
    entries = entries[0] if entries and isinstance(entries[0], list) else entries
    scored = sorted((str(entry["label"]), float(entry["score"])) for entry in entries)
    return [label for label, _ in scored], torch.tensor([score for _, score in scored])


def token_difference(probe: Probe, task: ServedTask, request: Request) -> str:
    """Return where the tokens of a probe differ from those of its proof; empty if nowhere."""
    prepared = prepare(task, request)
    rows = [] if prepared is None else rows_of(task, prepared)[0]
    if len(rows) != len(probe.rows):
        return f"{probe.name} has {len(rows)} rows instead of {len(probe.rows)}"
    for row, stored in zip(rows, probe.rows, strict=True):
        for what in ("ids", "types", "keep"):
            ours, theirs = getattr(row, what) or [], getattr(stored, what) or []
            if ours != theirs:
                pairs = enumerate(zip(ours, theirs, strict=False))
                unequal = (index for index, pair in pairs if pair[0] != pair[1])
                index = next(unequal, min(len(ours), len(theirs)))
                return (
                    f"{what} of {probe.name}: {len(ours)} instead of {len(theirs)}, from position "
                    f"{index} on {ours[index : index + 4]} instead of {theirs[index : index + 4]}"
                )
    return ""


def answer_difference(probe: Probe, task: ServedTask, request: Request) -> str:
    """Return how the task's answer to a probe, made of the values of its proof, differs from that
    of the proof; empty if it does not."""
    prepared = prepare(task, request)
    if prepared is None or not probe.rows:
        return ""
    try:
        answer = answer_of(task, prepared, [stored.restore() for stored in probe.values])
    except Exception as error:
        return f"{probe.name}: {type(error).__name__}: {str(error)[:200]}"
    why = _unequal(answer, probe.answer, "")
    return why and f"{probe.name}: {why}"


def _unequal(one: Any, other: Any, path: str) -> str:
    """Return where two JSON values differ, apart from rounding; empty if nowhere."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        pairs = ((one[key], other[key], f"{path}.{key}") for key in one if key not in _DECODED)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = ((*pair, f"{path}[{n}]") for n, pair in enumerate(zip(one, other, strict=True)))
    elif isinstance(one, float) and isinstance(other, (int, float)):
        is_same = math.isclose(one, other, rel_tol=_SAME_SCORE, abs_tol=_SAME_SCORE)
        return "" if is_same else f"answer{path} is {one:.6g} instead of {other:.6g}"
    else:
        shown = json.dumps(one)[:60], json.dumps(other)[:60]
        return "" if one == other else f"answer{path} is {shown[0]} instead of {shown[1]}"
    return next((why for why in (_unequal(*pair) for pair in pairs) if why), "")


def continuation_difference(
    probe: Probe, task: ServedTask, request: Request, tolerance: float
) -> str:
    """Return by which tokens a prompt is continued instead of those of its proof; empty if by the
    same. A token may be another one only if the second best was as good, within twice the
    tolerance; tokens after it are not compared."""
    prepared = prepare(task, request)
    for row in probe.rows if prepared is not None else ():
        assert prepared is not None
        ours, theirs = task.continue_prompt(prepared), row.tokens or []
        begin = len(theirs) - len(probe.margins)
        for index, margin in enumerate(probe.margins, begin):
            if margin <= 2 * tolerance:
                break
            if ours[index : index + 1] != theirs[index : index + 1]:
                return (
                    f"{probe.name} is continued by the tokens {ours[begin:]} instead of "
                    f"{theirs[begin:]}"
                )
    return ""


def model_of(task: Any) -> Any:
    """Return the model of a served task."""
    return task.pipeline.model if task.loaded_model is None else task.loaded_model.model
