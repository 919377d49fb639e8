"""Make rows of a text and its labels of the output manifests of Ground Truth's jobs on texts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from recipe.data.column_names import LABEL, TEXT
from recipe.data.files.part import Part
from recipe.errors import DataError

_SOURCE, _METADATA, _FAILURE = "source", "-metadata", "failure-reason"
_FAILED, _READ = "\0failed", "\0read"
"""Columns of why a row has no labels, and of which are read: no file has such names."""
_NAME, _NAMES, _ENTITIES = "class-name", "class-map", "entities"
_JQ = "jq -c '{}' output.manifest > rows.jsonl, and remove it."
Row = dict[str, Any]


def manifest_rows(where: str, rows: Sequence[Row], lines: Sequence[int]) -> Sequence[Row]:
    """Return rows of texts with their labels or why they have none; those of other JSON unchanged.

    Raises:
        DataError: A row has not a source and the labels of one job alone.
    """
    if not any(map(_jobs, rows)):
        return rows
    return [_labelled(f"{where}{line}", row) for row, line in zip(rows, lines, strict=True)]


def label_manifest(part: Part) -> Part:
    """Return the rows of a manifest that have labels, with a note; other parts unchanged.

    Raises:
        DataError: They are of several jobs.
    """
    if _READ not in part.table.column_names:
        return part
    failures, kinds = part.table[_FAILED], part.distinct(_READ, 3) or []
    part = dataclasses.replace(part, table=part.table.drop_columns([_FAILED, _READ]))
    if failed := len(failures) - failures.null_count:
        part = part.select(np.flatnonzero(failures.is_null().to_numpy()))
    if len(read := [kind for kind in kinds if kind is not None]) != 1:
        raise DataError(f"{part.path} has no labels, or several: {read}.", "Keep those of one job.")
    note = f"{part.path} is a manifest of Ground Truth: {TEXT!r} is its source, {read[0]}."
    note += f" {failed} rows have a {_FAILURE} and are not used." * bool(failed)
    return dataclasses.replace(part, note=note)


def _jobs(row: Row) -> list[str]:
    dicts = {key.removesuffix(_METADATA): about for key, about in row.items()
             if key.endswith(_METADATA) and isinstance(about, dict)}  # fmt: skip
    return [job for job, about in dicts.items() if job in row or _FAILURE in about]


def _labelled(where: str, row: Row) -> Row:
    job, *others = _jobs(row) or [""]
    about, metadata = row.get(job + _METADATA) or {}, f'.["{job}{_METADATA}"]'
    key = next((k for k in (_NAMES, _NAME) if k in about), _ENTITIES)
    remedy = f"Write its text as {_SOURCE}, without a column {TEXT} or {LABEL}, or remove the row."
    if "image-classification" in str(about.get("type")):
        label = f'[{metadata}["{key}"][]]' if key == _NAMES else f'{metadata}["{key}"]'
        file = f'{{file_name: (.["source-ref"] | split("/") | last), label: {label}}}'
        remedy = "Convert it: " + _JQ.format(f'select({metadata}["{_FAILURE}"] | not) | {file}')
    elif others:
        left_out = ", ".join(f'.["{name}"], .["{name}{_METADATA}"]' for name in others)
        remedy = f"Keep {job!r} alone, or another: " + _JQ.format(f"del({left_out})")
    else:
        rest = {k: v for k, v in row.items() if k not in (_SOURCE, job, job + _METADATA)}
        column, failure = _ENTITIES if key == _ENTITIES else LABEL, about.get(_FAILURE) or None
        made = {TEXT: row.get(_SOURCE), _FAILED: failure, _READ: None, **rest}
        with contextlib.suppress(AttributeError, KeyError, TypeError):
            if failure is None:
                made[column] = _labels(key, row[job], about)
                made[_READ] = f"{column!r} the {key} of its job {job!r}"
            if made[TEXT] is not None and rest.keys().isdisjoint((TEXT, column)):
                return made
    what = f"{where} is of a manifest of Ground Truth, with the labels {[job, *others]}."
    raise DataError(what, remedy)


def _labels(key: str, given: Any, about: Row) -> Any:
    if key == _ENTITIES:
        return [{"start": one["startOffset"], "end": one["endOffset"], "label": one["label"]}
                for one in given["annotations"][_ENTITIES]]  # fmt: skip
    return [about[key][str(index)] for index in given] if key == _NAMES else about[key]
