"""The labels of zero-shot requests for texts and images, and the sentences made of them."""

from __future__ import annotations

from string import Formatter

from recipe.backend import bounds
from recipe.backend.bounds import Bound
from recipe.backend.requests.payloads import BadRequest, Request

_TEMPLATE = "This example is {}."


def labels_and_hypotheses(request: Request, count: int) -> tuple[list[str], list[str]]:
    """Return the labels of a request of `count` texts or images, and the hypothesis of each. Raise
    BadRequest if there are no labels, or the template has no place for them, and TooCostly if there
    are too many, or hypotheses are too long."""
    template = request.parameters.get("hypothesis_template", _TEMPLATE)
    try:
        fields = [field[1:] for field in Formatter().parse(template) if field[1] is not None]
    except ValueError:
        fields = []
    names = [name for name, *_ in fields]
    # Fields with a width or an attribute are not supported.
    if (names != [""] and set(names) != {"0"}) or any(
        form or conversion for _, form, conversion in fields
    ):
        raise BadRequest(
            f"hypothesis_template is {template[:60]!r}. Write {{}} where the label goes, as"
            f" in {_TEMPLATE!r}, or {{0}} in several places."
        )
    labels = candidate_labels(request)
    bounds.hold(Bound.ROWS, count * len(labels), f"{count:,} inputs x {len(labels):,} labels")
    size = len(labels) * len(template) + len(names) * sum(map(len, labels))
    bounds.hold(Bound.TEXT, size, "the hypotheses of all labels")
    return labels, [template.format(label) for label in labels]


def candidate_labels(request: Request) -> list[str]:
    """Return the labels that a request names. Raise BadRequest if there are none, or one of a list
    is empty: without it, the other labels would get different scores."""
    named = request.parameters.get("candidate_labels", [])
    if isinstance(named, str):
        named = [label.strip() for label in named.split(",") if label.strip()]
    for index, label in enumerate(named):
        if not label.strip():
            raise BadRequest(
                f"candidate_labels[{index}] is {label!r}: name a label, or leave it out."
            )
    if not named:
        raise BadRequest(
            "candidate_labels names no label. Send for example "
            '{"inputs": ..., "parameters": {"candidate_labels": ["sports", "politics"]}}.'
        )
    return list(named)
