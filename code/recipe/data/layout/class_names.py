"""Names of the classes that integers stand for, from the files that lie beside data."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe.data.column_names import plain

_STEMS = (
    *("classes", "class", "class_names", "classnames", "class_labels", "class_map", "target_names"),
    *("labels", "label", "label_names", "labelnames", "label_list", "labels_list", "label_map"),
    *("labelmap", "label_mapping", "label_dict", "label2id", "id2label", "label_to_id"),
    *("id_to_label", "mapping", "categories", "category", "category_names", "intents", "names"),
)
_MAYBE_ROWS = ("labels", "label", "names", "class", "category", "intents", "mapping")
_SUFFIXES = (".txt", ".json", ".csv", ".tsv", ".names", "")
_LARGEST = 1_000_000  # bytes
_NUMBERED = re.compile(r"\s*(\d+)\s*[\t,;:= ]\s*(\S.*?)\s*")


@dataclass(frozen=True, kw_only=True)
class ClassNames:
    """What some file says the classes are called."""

    source: str
    """Where that stands."""
    names: Mapping[int, str]
    """Name of each number."""
    column: str | None = None
    """The column that they are for; None for that of the labels."""
    numbered: bool = False
    """Whether the file gives the numbers, rather than names in their order."""

    def of(self, values: set[int]) -> Mapping[int, str] | str:
        """The name of each of `values` (-1 is no label), or why these are not their names.

        Names without numbers are for 0 to n - 1; or, as AG News and the like have it, for 1 to n
        where the data has exactly these.
        """
        values = values - {-1}
        if values <= set(self.names) and (self.numbered or 0 in values):
            return self.names
        count = len(self.names)
        if not self.numbered and values == set(range(1, count + 1)):
            return {number + 1: name for number, name in self.names.items()}
        values_shown = ", ".join(map(str, sorted(values)[:10]))
        return f"it has {count} names, and the labels are {values_shown}"


def is_candidate(path: Path) -> bool:
    """Whether a file's name says that it lists classes."""
    return (
        plain(path.stem).replace("-", "_") in _STEMS
        and path.suffix.lower() in _SUFFIXES
        and path.stat().st_size <= _LARGEST
    )


def is_sure(path: Path) -> bool:
    """Whether a file's name says that it lists classes, and holds no rows."""
    return is_candidate(path) and plain(path.stem) not in _MAYBE_ROWS


def read(path: Path) -> ClassNames | None:
    """The names in a file that lists classes; None where it holds something else."""
    try:
        text = path.read_text("utf-8-sig")
        if path.suffix.lower() == ".json":
            return _named(path, *_of_json(json.loads(text)))
    except (ValueError, RecursionError):
        return None
    lines = [line for line in text.splitlines() if line.strip()]
    if path.suffix.lower() in (".csv", ".tsv"):
        delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
        rows = [tuple(row) for row in csv.reader(lines, delimiter=delimiter)]
        numbered = [row for row in rows if len(row) == 2 and any(c.strip().isdigit() for c in row)]
        pairs = [row if row[0].strip().isdigit() else row[::-1] for row in numbered]
        if len(rows) - len(pairs) > 1:
            return None
        return _named(path, {int(number): name.strip() for number, name in pairs}, len(pairs), True)
    matches = [_NUMBERED.fullmatch(line) for line in lines]
    if all(matches):
        numbers = {int(each[1]): each[2] for each in matches if each}
        # `1 star` and `2 stars` are names, `0 negative` has a number and a name.
        is_marked = all(re.match(r"\s*\d+\s*[\t,;:=]", line) for line in lines)
        known = _named(path, numbers, len(lines), True)
        if known is not None and (is_marked or 0 in numbers):
            return known
    names = [line.strip() for line in lines]
    return _named(path, dict(enumerate(names)), len(names), False)


def _of_json(document: Any) -> tuple[dict[int, str], int, bool]:
    """Names by their numbers, how many there should be, and whether the numbers were given."""
    if isinstance(document, dict) and len(document) == 1:
        inner = next(iter(document.values()))
        document = inner if isinstance(inner, (list, dict)) else document
    if isinstance(document, list) and all(isinstance(name, str) for name in document):
        return dict(enumerate(document)), len(document), False
    pairs: Sequence[tuple[Any, Any]] = []
    if isinstance(document, dict):
        pairs = list(document.items())
    elif isinstance(document, list) and all(
        isinstance(row, dict) and "id" in row and {"name", "label"} & set(row) for row in document
    ):
        pairs = [(row["id"], row.get("name", row.get("label"))) for row in document]
    turned = [
        (name, number) if isinstance(number, int) else (number, name) for number, name in pairs
    ]
    names = {
        int(number): name
        for name, number in turned
        if isinstance(name, str) and str(number).isdigit()
    }
    return names, len(pairs), True


def _named(path: Path, names: dict[int, str], count: int, numbered: bool) -> ClassNames | None:
    """None where some line or item was no name, or two are the same."""
    if len(names) < 2 or len(names) != count or len(set(names.values())) != count:
        return None
    if any(not name.strip() or len(name) > 100 for name in names.values()):
        return None
    return ClassNames(source=str(path), names=names, numbered=numbered)
