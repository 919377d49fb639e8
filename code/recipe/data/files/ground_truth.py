"""Make rows of a text and its labels of the output manifests of Ground Truth's jobs on texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recipe.data.column_names import LABEL, TEXT
from recipe.data.files.part import Part
from recipe.errors import DataError

_SOURCE, _METADATA, _FAILURE = "source", "-metadata", "failure-reason"
_NAME, _NAMES, _ENTITIES = "class-name", "class-map", "entities"
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A manifest with the labels of one job."""

    job: str
    key: str
    """Where the labels are: class-name, class-map (several labels) or entities."""
    column: str
    """What the labels become."""

    def rows(self, where: str, rows: Sequence[Row], lines: Sequence[int]) -> list[Row]:
        """Return rows with a text, and with its labels or why it has none.

        Raises:
            DataError: One has no text, or other labels than the first row.
        """
        made, keys = list[Row](), {_SOURCE, self.job, self.job + _METADATA}
        for row, line in zip(rows, lines, strict=True):
            rest = {key: value for key, value in row.items() if key not in keys}
            try:
                failure = row[self.job + _METADATA].get(_FAILURE) or None
                labels = None if failure else self._labels(row[self.job], row[self.job + _METADATA])
                made.append({TEXT: row[_SOURCE], self.column: labels, _FAILURE: failure, **rest})
            except (AttributeError, KeyError, TypeError):
                rest[TEXT] = None
            if _jobs([rest]) or not rest.keys().isdisjoint((TEXT, self.column, _FAILURE)):
                raise DataError(
                    f"{where}{line} has not source and the {self.key} of Ground Truth's job "
                    f"{self.job!r} alone: other labels, none, or a column {TEXT} or {self.column}.",
                    "Remove the row, or what is not of this job.",
                )
        return made

    def _labels(self, given: Any, about: Row) -> Any:
        if self.key == _ENTITIES:
            return [
                {"start": one["startOffset"], "end": one["endOffset"], "label": one["label"]}
                for one in given["annotations"][_ENTITIES]
            ]
        names = about[self.key]
        return [names[str(index)] for index in given] if self.key == _NAMES else names

    def labelled(self, part: Part) -> Part:
        """Return the rows that have labels, with a note on what they are and how many are not."""
        failures = part.table[_FAILURE]
        note = (
            f"{part.path} is a manifest of Ground Truth: {TEXT!r} is its source, {self.column!r} "
            f"the {self.key} of its job {self.job!r}."
        )
        if failed := len(failures) - failures.null_count:
            part = part.select(np.flatnonzero(failures.is_null().to_numpy()))
            note += f" {failed} rows have a {_FAILURE} and are not used."
        return dataclasses.replace(part, table=part.table.drop_columns([_FAILURE]), note=note)


def find_manifest(path: Path, rows: Sequence[Row]) -> Manifest | None:
    """Return the manifest that rows are of, by the first ones; None for other JSON.

    Raises:
        DataError: It has several jobs, or labels of files elsewhere or of another kind.
    """
    if not (jobs := _jobs(rows)):
        return None
    job, about = next(iter(jobs.items()))
    kind, metadata = str(about.get("type")), f'.["{job}{_METADATA}"]'
    key = _ENTITIES if "text-span" in kind else _NAMES if _NAMES in about else _NAME
    command, remedy = "", 'Write rows: {"text": "...", "label": "..."}.'
    if "image-classification" in kind:
        label = f'[{metadata}["{key}"][]]' if key == _NAMES else f'{metadata}["{key}"]'
        command = f'select({metadata}["{_FAILURE}"] | not) | {{file_name: (.["source-ref"] | '
        command += f'split("/") | last), label: {label}}}'
    elif not any(_SOURCE in row for row in rows):
        remedy = "It has the locations of files. Write the texts themselves, as source."
    elif len(jobs) > 1:
        others = (f'.["{name}"], .["{name}{_METADATA}"]' for name in [*jobs][1:])
        command = f"del({', '.join(others)})"
    elif key == _ENTITIES or key in about:
        return Manifest(job=job, key=key, column=_ENTITIES if key == _ENTITIES else LABEL)
    if command:
        lines = f"{path.name} > {path.stem}-rows.jsonl"
        remedy = (
            f"Convert it, with the labels of {job!r}: jq -c '{command}' {lines}, and remove it."
        )
    raise DataError(
        f"{path} is a manifest of Ground Truth, which labels {', '.join(jobs)}.", remedy
    )


def _jobs(rows: Sequence[Row]) -> dict[str, Row]:
    """Return what the first labelled row of each job says about it."""
    jobs: dict[str, Row] = {}
    for row in rows:
        for key, about in row.items():
            job = key.removesuffix(_METADATA)
            is_job = job != key and job in row and isinstance(about, dict)
            if is_job and _FAILURE in jobs.get(job, {_FAILURE: ""}):
                jobs[job] = about
    return jobs
