"""JSON Lines that ask with different parameters: each line is answered in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from recipe.backend.requests import payloads
from recipe.backend.requests.payloads import Answers, BadRequest, Request

Form = Callable[[Any, Request], Any]
"""Makes a request's answer of a task's prediction."""


def measure(request: Request, measure_one: Callable[[Request], list[int]]) -> list[int]:
    """The tokens of each text; lines that cannot be asked so become faults of their own.

    Raises:
        BadRequest: None can.
    """
    if not request.parts:
        return measure_one(request)
    tokens: list[int] = []
    kept = []
    for places, part in request.parts:
        try:
            if part.streams:
                raise BadRequest("Lines of different parameters cannot be streamed.")
            tokens += measure_one(part)
        except BadRequest as error:
            request.faults |= dict.fromkeys(places, str(error))
        else:
            kept.append((places, part))
    if not kept:
        raise BadRequest(request.faults[min(request.faults)])
    request.parts = kept
    return tokens


def predicted(
    requests: Sequence[Request], predict: Callable[[list[Request]], Sequence[Any]], in_form: Form
) -> list[Any]:
    """The answer to each request, or a function that gives it where that takes many turns."""
    told = iter(predict([part for request in requests for part in request.asked]))
    return [_answer([next(told) for _ in request.asked], request, in_form) for request in requests]


def _answer(predictions: Sequence[Any], request: Request, in_form: Form) -> Any:
    if any(map(callable, predictions)):
        return partial(_later, predictions, request, in_form)
    return _woven(predictions, request) if request.parts else in_form(predictions[0], request)


def _later(predictions: Sequence[Any], request: Request, in_form: Form) -> Any:
    told = [each() if callable(each) else each for each in predictions]
    answer = _answer(told, request, in_form)
    if isinstance(answer, Exception):
        raise answer
    return answer


def _woven(predictions: Sequence[Any], request: Request) -> Any:
    """The parts' answers in the places of their lines; the exception of one that has failed."""
    faults, truncated = dict(request.faults), list[int]()
    entries: dict[int, Any] = {}
    for (places, part), prediction in zip(request.parts, predictions, strict=True):
        if isinstance(prediction, BadRequest):
            faults |= dict.fromkeys(places, str(prediction))
        elif isinstance(prediction, Exception):
            return prediction
        else:
            faults |= {places[own]: why for own, why in part.faults.items()}
            right = [place for own, place in enumerate(places) if own not in part.faults]
            entries |= dict(zip(right, prediction, strict=True))
            truncated += [right[own] for own in prediction.truncated]
    if not entries:
        return BadRequest(faults[min(faults)])
    order = sorted(entries)
    told = Answers([entries[place] for place in order], sorted(map(order.index, truncated)))
    return payloads.with_faults(told, Request(texts=order, faults=faults))
