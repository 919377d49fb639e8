"""Make rows of a text and its labels of JSON in which tools nest them: Label Studio's tasks, and
CLUENER's entities by their kinds and texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recipe.errors import DataError

_LABEL, _ENTITIES = "label", "entities"
_CONTROLS = {"choices": _LABEL, "labels": _ENTITIES}
"""Label Studio's types of results that are read, and their columns."""
Row = dict[str, Any]


def plain_rows(where: str, rows: Sequence[Row], lines: Sequence[int]) -> Sequence[Row]:
    """Return rows with columns of labels or spans; those of other JSON unchanged.

    Raises:
        DataError: Tasks of Label Studio have several annotations or controls, or other results.
    """
    if rows and all(map(_is_task, rows)):
        return _label_studio(where, rows, lines)
    if any(_are_kinds(row.get(_LABEL)) and _spans(row[_LABEL]) for row in rows):
        return [
            {**row, _LABEL: _spans(row[_LABEL])} if _are_kinds(row.get(_LABEL)) else row
            for row in rows
        ]
    return rows


def _are_kinds(value: Any) -> bool:
    """Return whether a label is `{kind: {text: [[start, end], ...]}}`, or empty."""
    return isinstance(value, dict) and all(
        isinstance(texts, dict)
        and all(
            isinstance(ranges, list)
            and all(isinstance(ends, list) and list(map(type, ends)) == [int, int]
                    for ends in ranges)
            for ranges in texts.values()
        )
        for texts in value.values()
    )  # fmt: skip


def _spans(kinds: Any) -> list[Row]:
    """Return CLUENER's entities, whose ends are inclusive; their texts are checked later."""
    return [
        {"start": start, "end": end + 1, "label": kind, "text": text}
        for kind, texts in kinds.items()
        for text, ranges in texts.items()
        for start, end in ranges
    ]


def _is_task(row: Row) -> bool:
    annotations = row.get("annotations")
    return (
        isinstance(row.get("data"), dict)
        and isinstance(annotations, list)
        and all(isinstance(one, dict) and isinstance(one.get("result"), list)
                for one in annotations)
    )  # fmt: skip


def _label_studio(where: str, tasks: Sequence[Row], lines: Sequence[int]) -> list[Row]:
    """Return the data of tasks with a label and spans."""
    made: list[Row] = []
    controls: dict[str, str] = {}
    """The control of each column."""
    missing: int | None = None
    for task, line in zip(tasks, lines, strict=True):
        given = [one for one in task["annotations"] if not one.get("was_cancelled")]
        if len(given) > 1:
            raise _refusal(f"{where}{line} has {len(given)} annotations")
        row: Row = {**task["data"]}
        missing = line if not given and missing is None else missing
        for result in given[0]["result"] if given else ():
            value, kind = result.get("value"), result.get("type")
            names = value.get(kind) if isinstance(value, dict) else None
            is_span = isinstance(value, dict) and "start" in value
            if not isinstance(names, list) or is_span is not (kind == "labels"):
                raise _refusal(f"{where}{line} has a result of type {kind!r}")
            column, control = _CONTROLS[kind], f"{result.get('from_name')}"
            if controls.setdefault(column, control) != control or column in task["data"]:
                raise _refusal(f"{where}{line} has {kind} of {control!r} and others")
            row.setdefault(column, []).extend([value] if is_span else names)
        made.append(row)
    if _ENTITIES in controls and missing is not None:
        raise DataError(
            f"{where}{missing} has no annotation, in an export of Label Studio whose texts have "
            "entities.",
            "Export annotated tasks only; one without entities has an annotation without results.",
        )
    is_single = all(len(row.get(_LABEL, ())) <= 1 for row in made if _LABEL in controls)
    for row in made:
        if _ENTITIES in controls:
            row.setdefault(_ENTITIES, [])
        if _LABEL in controls:
            row[_LABEL] = (row.get(_LABEL) or [None])[0] if is_single else row.get(_LABEL)
    return made


def _refusal(what: str) -> DataError:
    return DataError(
        f"{what}, in an export of Label Studio: only tasks with one annotation of one control for "
        "choices, and one for labels of a text, are read.",
        "Export JSON-MIN from Label Studio instead, and keep one row for each text.",
    )
