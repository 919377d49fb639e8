"""The classes: one spelling for ints, strings, bools and ClassLabels, and their order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from recipe.errors import DataError
from recipe.formats import Part

_WHOLE_FLOAT = re.compile(r"([-+]?\d+)\.0+")
_WHOLE = re.compile(r"[-+]?\d+")
_FRACTION = re.compile(r"[-+]?\d*\.\d+")
_PLAUSIBLE_CLASSES = 50


@dataclass(frozen=True)
class Labels:
    """Names of the classes; a class's id is its position."""

    names: tuple[str, ...]

    @property
    def ids(self) -> dict[str, int]:
        """Name to id, as a model's label2id."""
        return {name: number for number, name in enumerate(self.names)}

    @property
    def by_id(self) -> dict[int, str]:
        """Id to name, as a model's id2label."""
        return dict(enumerate(self.names))


def spell(part: Part, column: str) -> list[str]:
    """The name of each row's class: `1` for 1, 1.0 and "1.0", a ClassLabel's own name.

    Raises:
        DataError: a row has no label, or one that is no class; with file and line.
    """
    values = part.table[column].to_pylist()
    names = part.class_names.get(column)
    spelled = [_spell(value, names) for value in values]
    missing = [row for row, name in enumerate(spelled) if name == ""]
    if missing:
        raise DataError(
            f"{part.where(missing[0])} has no label in column {column!r}"
            + (f", nor have {len(missing) - 1} other rows." if len(missing) > 1 else "."),
            "Label the rows or remove them.",
        )
    odd = next((row for row, name in enumerate(spelled) if name is None), None)
    if odd is not None:
        raise DataError(
            f"{part.where(odd)} has {values[odd]!r} in column {column!r}, which is no class: a "
            "class is an integer or a string.",
            "Name the column of the classes in the hyperparameter label_column.",
        )
    return [name or "" for name in spelled]


def is_unlabelled(part: Part, column: str) -> bool:
    """Whether every row has -1 or nothing: how public test splits hide their answers."""
    values = part.table[column]
    return not pa.types.is_nested(values.type) and set(values.unique().to_pylist()) <= {-1, None}


def _spell(value: Any, names: list[str] | None) -> str | None:
    """'' for no label, None for one that is no class."""
    if value is None or (names is not None and value == -1):
        return ""
    if names is not None:
        return names[value] if 0 <= value < len(names) else None
    if not isinstance(value, (str, int, float)):
        return None
    text = str(value).strip()
    if _FRACTION.fullmatch(text) and not _WHOLE_FLOAT.fullmatch(text):
        return None
    if text == "nan":
        return ""
    return _WHOLE_FLOAT.sub(r"\1", text) if _WHOLE_FLOAT.fullmatch(text) else text


def classes(part: Part, column: str, spelled: Sequence[str]) -> Labels:
    """The classes of the training data, ClassLabels in their order, numbers by size, else sorted.

    Raises:
        DataError: there is one class only, or nearly as many as rows.
    """
    counts = Counter(spelled)
    if len(counts) < 2:
        raise DataError(
            f"Column {column!r} of {part.path} has one class only: {next(iter(counts))!r}.",
            "Training needs rows of at least two classes.",
        )
    if len(counts) > max(_PLAUSIBLE_CLASSES, len(spelled) // 2):
        raise DataError(
            f"Column {column!r} of {part.path} has {len(counts)} different values in "
            f"{len(spelled)} rows: these are no classes.",
            "Name the column of the classes in the hyperparameter label_column.",
        )
    declared = part.class_names.get(column)
    if declared and set(counts) <= set(declared):
        return Labels(tuple(declared))
    numeric = all(_WHOLE.fullmatch(name) for name in counts)
    return Labels(tuple(sorted(counts, key=int) if numeric else sorted(counts)))
