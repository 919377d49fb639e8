"""Make rows of a text and its labels of JSON that nests them: Label Studio's, and CLUENER's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recipe.errors import DataError

_COLUMNS = {"choices": "label", "labels": "entities"}
"""Label Studio's types of results that are read, and the columns they become."""
Row = dict[str, Any]


def plain_rows(where: str, rows: Sequence[Row], lines: Sequence[int]) -> Sequence[Row]:
    """Return rows with columns of labels or spans; those of other JSON unchanged.

    Raises:
        DataError: Tasks of Label Studio have several annotations or controls, or other results.
    """
    if rows and all(map(is_task, rows)):
        return _rows_of_tasks(where, rows, lines)
    spans = [_spans(row.get("label")) for row in rows]
    if not any(spans):
        return rows
    return [row if some is None else {**row, "label": some}
            for row, some in zip(rows, spans, strict=True)]  # fmt: skip


def is_task(row: Any) -> bool:
    """Return whether a value is a task of Label Studio with its annotations."""
    is_row = isinstance(row, dict) and isinstance(row.get("data"), dict)
    given = row.get("annotations") if is_row else None
    return isinstance(given, list) and all(isinstance(a, dict) and "result" in a for a in given)


def _spans(kinds: Any) -> list[Row] | None:
    """Return CLUENER's `{kind: {text: [[start, end], ...]}}`, whose ends are inclusive, as spans,
    whose texts are checked later; None for other labels."""
    try:
        return [
            {"start": start, "end": end + 1, "label": kind, "text": text}
            for kind, texts in kinds.items()
            for text, ranges in texts.items()
            for start, end in ranges
        ]
    except (AttributeError, TypeError, ValueError):
        return None


def _is_read(result: Any, row: Row) -> bool:
    """Return whether a result is choices for a text, or labels of a span of it. Where the data have
    several texts, the span's own tells which one is meant: it is checked later."""
    value = result.get("value") if isinstance(result, dict) else None
    kind = result["type"] if isinstance(value, dict) and "type" in result else None
    if not isinstance(value, dict) or kind not in [*_COLUMNS]:
        return False
    names = value.get(kind)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return False
    if kind == "choices":
        return "start" not in value
    is_clear = isinstance(value.get("text"), str)
    is_clear = is_clear or sum(isinstance(text, str) for text in row.values()) < 2
    return is_clear and type(value.get("start")) is type(value.get("end")) is int


def _rows_of_tasks(where: str, tasks: Sequence[Row], lines: Sequence[int]) -> list[Row]:
    """Return the data of Label Studio's tasks with a label and spans."""
    made, missing, controls = list[Row](), list[int](), dict[Any, Any]()
    for task, line in zip(tasks, lines, strict=True):
        row = {**task["data"]}
        given = [one for one in task["annotations"] if not one.get("was_cancelled")]
        results = given[0]["result"] if given else []
        is_read = len(given) < 2 and row.keys().isdisjoint(_COLUMNS.values())
        is_read = is_read and isinstance(results, list)
        is_read = is_read and all(_is_read(result, task["data"]) for result in results)
        for result in results if is_read else ():
            kind, value, control = result["type"], result["value"], result.get("from_name")
            column = _COLUMNS[kind]
            is_read = is_read and controls.setdefault(column, control) == control
            row.setdefault(column, []).extend([value] if kind == "labels" else value[kind])
        if not is_read:
            raise DataError(
                f"{where}{line} of Label Studio has not one annotation, by a control for choices "
                "or by one for labels of one text, or its data has a label.",
                "Export JSON-MIN from Label Studio instead, with one row for each text.",
            )
        made.append(row)
        missing += [] if given else [line]
    if not controls or ("entities" in controls and missing):
        raise DataError(
            f"{where}{[*missing, *lines][0]} has no annotation, "
            + ("and others in this export have entities." if controls else "nor has another task."),
            "Export annotated tasks only: one without entities has an empty annotation.",
        )
    if len(controls) > 1:
        raise DataError(
            f"{where}{lines[0]} is of an export of Label Studio with both choices and labels.",
            "Export JSON-MIN from Label Studio instead, with a column for each.",
        )
    is_single = all(len(row.get("label", ())) < 2 for row in made)
    for row in made:
        if "entities" in controls:
            row.setdefault("entities", [])
        else:
            row["label"] = [*row.get("label", ()), None][0] if is_single else row.get("label")
    return made
