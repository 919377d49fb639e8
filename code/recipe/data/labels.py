"""Labels: one class, several classes, or numbers for each row; class names and their order."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from recipe.data.column_names import plain_name
from recipe.data.files.part import Part, is_list, is_number
from recipe.errors import DataError, HyperparameterError, did_you_mean, join_names
from recipe.settings import PROBLEMS, split_values

_WHOLE_FLOAT = re.compile(r"([-+]?\d+)\.0+")
_WHOLE = re.compile(r"[-+]?\d+")
_FRACTION = re.compile(r"[-+]?\d*\.\d+")
_PLAUSIBLE_CLASSES = 50
_ALPHABET = 10
_LARGEST_NUMBER = 3.4e38
"""Of 32 bits."""

SINGLE, SEVERAL, NUMBER = PROBLEMS


@dataclass(frozen=True)
class Labels:
    """The names of the classes; a class's id is its position. For numbers, the columns' names."""

    names: tuple[str, ...]
    problem: str = SINGLE

    def encode(self, label: Any) -> int | float | list[float]:
        """Encode a label of `LabelShape.spell`: a class id, 0 or 1 for each class, or numbers."""
        if self.problem == SINGLE:
            return self.ids[label]
        return label if self.problem == NUMBER else [float(name in label) for name in self.names]

    def unknown(self, label: Any) -> str | None:
        """Return a class of a label of `LabelShape.spell` that is not known, or None."""
        if self.problem == NUMBER:
            return None
        row_labels = [label] if self.problem == SINGLE else label
        return next((name for name in row_labels if name not in self.names), None)

    def show(self, encoded: Any) -> str:
        """Return the text of an encoded label, for messages."""
        if self.problem == SINGLE:
            return str(self.names[encoded])
        if self.problem == NUMBER:
            if len(self.names) == 1:
                return f"{encoded:g}"
            pairs = zip(self.names, encoded, strict=True)
            return ", ".join(f"{name} {number:g}" for name, number in pairs)
        pairs = zip(self.names, encoded, strict=True)
        return ", ".join(name for name, has in pairs if has) or "(none)"

    @functools.cached_property
    def ids(self) -> dict[str, int]:
        """Return the ids by name, as a model's label2id."""
        return {name: number for number, name in enumerate(self.names)}


@dataclass(frozen=True, kw_only=True)
class LabelShape:
    """The encoding of the label column."""

    problem: str = SINGLE
    separator: str | None = None
    """Separates the classes of a row in one string."""
    indicators: int = 0
    """How many classes there are, if a row's list has 0 or 1 for each one in place of its own."""
    missing: str | None = None
    """The hyperparameter missing_labels, for messages."""
    columns: Sequence[str] = ()
    """The columns of numbers, if there are several: the label column has a list for each row."""

    def check_filled(
        self, part: Part, column: str, empty: int | None = None, rows: int | None = None
    ) -> None:
        """Raise DataError if rows have no label, unless rows may have several.

        Args:
            empty: The rows without a label, and `rows` all rows, if `part` has only some of them.
        """
        if self.problem == SEVERAL or pa.types.is_nested(part.table.schema.field(column).type):
            return
        are_empty = empty_labels(part, column)
        empty = len(are_empty) if empty is None else empty
        if not empty:
            return
        rows = part.table.num_rows if rows is None else rows
        has = "has" if empty == 1 else "have"
        known = {str(label).strip() for label in part.distinct(column, part.table.num_rows) or ()}
        line = ",".join([*split_values(self.missing), EMPTY])
        remedy = f"Give missing_labels={line} to leave them out, or label them."
        raise DataError(
            f"{empty} of {rows} rows {has} no label in column {column!r}, the first at "
            f"{part.where(int(are_empty[0]))}.",
            remedy if EMPTY not in known else "Label them or remove them.",
        )

    def spell(self, part: Part, column: str) -> list[Any]:
        """Return the label of each row: the name of its class, a tuple of names, or a float (a list
        of floats if there are several columns of numbers).

        Raises:
            DataError: a row has no label, or an invalid one.
        """
        values: list[Any] = part.table[column].to_pylist()
        if self.columns:
            return values
        class_names = part.class_names.get(column)
        self.check_filled(part, column)
        if self.problem == SINGLE:
            # 1, 1.0 and "1.0" are the class `1`.
            classes_of_rows = [_spell(value, class_names) for value in values]
            if None in classes_of_rows:
                row = classes_of_rows.index(None)
                raise _no_class(part, row, values[row], column)
            return classes_of_rows
        if self.problem == NUMBER:
            for row, value in enumerate(values):
                if (
                    value is None
                    or not is_number(str(value))
                    or not abs(float(value)) <= _LARGEST_NUMBER
                ):
                    raise DataError(
                        f"{part.where(row)} has {value!r} in column {column!r}, and other rows "
                        "have numbers.",
                        f"Correct the row or remove it, or give missing_labels={value}.",
                    )
            return [float(value) for value in values]
        spelled = []
        for row, value in enumerate(values):
            if isinstance(value, str) and self.separator:
                value = [item for item in value.split(self.separator) if item.strip()]
            elif not isinstance(value, list):
                value = [] if value in (None, "") else [value]
            if self.indicators and (len(value) != self.indicators or {*value} - {0, 1}):
                raise DataError(
                    f"{part.where(row)} has {value} in column {column!r}, and other rows have 0 or "
                    f"1 for each of {self.indicators} classes.",
                    "Correct the row.",
                )
            if self.indicators:
                value = [number for number, has in enumerate(value) if has]
            names = [_spell(item, class_names) for item in value]
            if not all(names):
                raise _no_class(part, row, value, column)
            spelled.append(tuple(name or "" for name in names))
        return spelled


_ONE_CLASS = LabelShape()


def shape_of(
    parts: Sequence[Part],
    column: str,
    separator: str | None = None,
    problem: str | None = None,
    missing: str | None = None,
    columns: Sequence[str] = (),
) -> LabelShape:
    """Return the encoding of the labels in a column of the training data.

    Lists, and strings if a separator is given, are several classes for each row; numbers, if one
    has a fraction, are numbers; anything else is one class for each row.

    Args:
        separator: The hyperparameter label_separator.
        problem: The hyperparameter problem_type, which decides if it is given.
        missing: The hyperparameter missing_labels.
        columns: The columns of numbers, if there are several.
    """
    if columns:
        return LabelShape(problem=NUMBER, columns=columns)
    all_cells = [part.table[column] for part in parts]
    nested = [cells for cells in all_cells if is_list(cells.type)]
    if problem in (None, SEVERAL) and (nested or separator or problem):
        rows = [row for cells in nested for row in cells.to_pylist() if row is not None]
        width = len(rows[0]) if rows else 0
        # Lists such as [0, 1, 1], all of one length, cannot be lists of classes.
        are_indicators = width > 1 and all(len(row) == width and set(row) <= {0, 1} for row in rows)
        indicators = width if are_indicators else 0
        return LabelShape(problem=SEVERAL, separator=separator, indicators=indicators)
    are_named = any(column in part.class_names for part in parts)
    values = {
        value
        for cells in (() if problem or are_named else all_cells)
        for value in cells.unique().to_pylist()
        if value is not None
    }
    if all(isinstance(value, (int, float, str)) and is_number(str(value)) for value in values):
        numbers = map(float, values)
        if any(math.isfinite(number) and not number.is_integer() for number in numbers):
            return LabelShape(problem=NUMBER, missing=missing)
    return LabelShape(problem=problem or SINGLE, missing=missing)


def _no_class(part: Part, row: int, value: Any, column: str) -> DataError:
    items = value if isinstance(value, list) else [value]
    shown = json.dumps(value, default=str) if isinstance(value, list) else repr(value)
    codes = " Write codes with a letter in front: c3.10." * any(is_fraction(str(i)) for i in items)
    return DataError(
        f"{part.where(row)} has {shown} in column {column!r}, which is not a class: a class is an "
        "integer or a string.",
        "Remove null from the list."
        if None in items
        else f"Name the column of the classes in the hyperparameter label_column.{codes}",
    )


EMPTY = "empty"
"""What stands in missing_labels for empty cells."""


def empty_labels(part: Part, column: str) -> npt.NDArray[np.int64]:
    """Return the rows without a label: null, blank, NaN, or -1 in a column of ClassLabels."""
    none = ["", "nan", *(["-1"] if column in part.class_names else [])]
    return _rows_with(part, column, none, or_null=True)


def _rows_with(
    part: Part, column: str, values: Sequence[str], or_null: bool = False
) -> npt.NDArray[np.int64]:
    """Return the rows that have one of these values in a column, ascending."""
    known = pa.array(list(values), pa.large_string())
    rows = [np.empty(0, np.int64)]
    for first, batch in part.batches([column]):
        texts = pc.utf8_trim_whitespace(pc.cast(batch[column], pa.large_string()))
        has = pc.is_in(texts, known)
        has = pc.or_(has, pc.is_null(texts)) if or_null else has
        rows.append(first + np.flatnonzero(has.to_numpy(zero_copy_only=False)))
    return np.concatenate(rows)


def labelled(part: Part, column: str, missing: str | None) -> Part:
    """Return the part without rows that are marked as unlabelled: -1 in a column of ClassLabels,
    `-` in SNLI's gold_label, or values that the hyperparameter missing_labels lists (EMPTY for
    empty cells).

    `LabelShape.spell` refuses other rows without a label.
    """
    if pa.types.is_nested(part.table[column].type):
        return part
    none = split_values(missing)
    none += ["-1"] if column in part.class_names else []
    if plain_name(column) == "gold_label" and "+" not in (part.distinct(column, _ALPHABET) or []):
        none.append("-")
    left_out = _rows_with(part, column, none) if none else np.empty(0, np.int64)
    if EMPTY in none:
        left_out = np.union1d(left_out, empty_labels(part, column))
    if not len(left_out):
        return part
    return part.select(np.delete(np.arange(part.table.num_rows), left_out))


def _spell(value: Any, names: list[str] | None) -> str | None:
    """Return the name of a class; '' for no label, None for an invalid one."""
    if value is None or (names is not None and value == -1):
        return ""
    if names is not None:
        return names[value] if isinstance(value, int) and 0 <= value < len(names) else None
    if not isinstance(value, (str, int, float)):
        return None
    text = str(value).strip()
    if is_fraction(text):
        return None
    whole = _WHOLE_FLOAT.fullmatch(text)
    return "" if text == "nan" else whole[1] if whole else text


def is_fraction(text: str) -> bool:
    """Return whether a label is a number with a fraction, which cannot be a class."""
    text = text.strip()
    return bool(_FRACTION.fullmatch(text)) and not _WHOLE_FLOAT.fullmatch(text)


def classes(
    part: Part,
    column: str,
    spelled: Sequence[Any],
    shape: LabelShape = _ONE_CLASS,
    rows: int | None = None,
    trains: bool = True,
) -> Labels:
    """Return the classes of the training data: ClassLabels in their order, others sorted.

    Args:
        spelled: The labels of all training rows by `LabelShape.spell`, or at least one row of each.
        rows: The number of training rows, if `spelled` has fewer.
        trains: Whether the classes are learned; if not, a model's labels decide which are right.

    Raises:
        DataError: there is one class only, or nearly as many as rows; a class is written in two
            ways; or all numbers are equal.
    """
    problem = shape.problem
    if problem == NUMBER:
        names = tuple(shape.columns) or (column,)
        for index, name in enumerate(names):
            if trains and len({row[index] if shape.columns else row for row in spelled}) < 2:
                raise DataError(f"Column {name!r} of {part.path} has the same number in every row.")
        return Labels(names, problem)
    counts = Counter(spelled if problem == SINGLE else itertools.chain(*spelled))
    if trains and len(counts) < 2:
        raise DataError(
            f"Column {column!r} of {part.path} has one class only: {next(iter(counts), '')!r}.",
            "Training needs rows of at least two classes.",
        )
    rows = len(spelled) if rows is None else rows
    if trains and len(counts) > max(_PLAUSIBLE_CLASSES, rows // 2):
        raise DataError(
            f"Column {column!r} of {part.path} has {len(counts)} different values in "
            f"{rows} rows: too many for classes.",
            "Name the column of the classes in the hyperparameter label_column.",
        )
    declared = part.class_names.get(column)
    if declared and set(counts) <= set(declared):
        return Labels(tuple(declared), problem)
    check_spellings(f"Column {column!r} of {part.path}", counts)
    numeric = all(_WHOLE.fullmatch(name) for name in counts)
    return Labels(tuple(sorted(counts, key=int) if numeric else sorted(counts)), problem)


def name_codes(
    parts: Sequence[Part], column: str, known: Labels, class_names: str
) -> tuple[Labels, Labels]:
    """Return integer classes as they are written, and with their names.

    Args:
        class_names: The hyperparameter: the names of the integers from 0 or from 1 on.

    Raises:
        DataError: The classes have names already, or there are more or fewer of them.
    """
    names = listed_names(class_names)
    for part in parts:
        if column in part.class_names or not all(map(_WHOLE.fullmatch, known.names)):
            raise DataError(
                f"class_names is given, and the labels in column {column!r} of {part.path} have "
                "names already.",
                "Leave class_names out: it names labels that are integers.",
            )
    codes = {int(name): name for name in known.names}
    first = 0 if 0 in codes else 1
    numbers = range(first, first + len(names))
    if not codes.keys() <= set(numbers) or (first and len(names) not in codes):
        raise DataError(
            f"class_names has {len(names)} names, and the training data has the labels "
            f"{join_names(known.names)}.",
            "Name the numbers from 0 to the largest if the training data has a 0, else those from "
            "1 to the largest. If -1 stands for no label, give missing_labels=-1.",
        )
    written = tuple(codes.get(number, str(number)) for number in numbers)
    return Labels(written, known.problem), Labels(tuple(names), known.problem)


def listed_names(given: str) -> list[str]:
    """Return the names in the hyperparameter class_names: with commas, or a JSON list.

    Raises:
        HyperparameterError: It begins with a bracket, but is not a JSON list.
    """
    try:
        names = json.loads(given) if given.startswith("[") else given.split(",")
    except ValueError as error:
        raise HyperparameterError(
            f"Hyperparameter class_names has value {given!r}, which is not a list.",
            'Give a,b or, for names with commas, ["a", "b, c"].',
        ) from error
    return [str(name).strip() for name in names]


def check_spellings(location: str, names: Iterable[str]) -> None:
    """Check that no class is written in two ways: case, blanks, Unicode forms, leading zeros.

    The letters of an alphabet are different classes.

    Args:
        location: What holds the names, for the message.

    Raises:
        DataError: two names differ only in these.
    """
    names = sorted(names)
    if len(names) > _ALPHABET and all(len(name) == 1 for name in names):
        return
    by_plain: dict[str, str] = {}
    for name in names:
        key = "".join(unicodedata.normalize("NFC", name).lower().split())
        other = by_plain.setdefault(key.lstrip("0") if key.isdigit() else key, name)
        if other != name:
            raise DataError(
                f"{location} has the classes {other!r} and {name!r}, which would be two.",
                "Write them alike. If they are two, give them names that differ in more than case, "
                "blanks and leading zeros.",
            )


BALANCED = "balanced"
"""The value of class_weight that stands for `balanced_weights`."""


def given_weights(requested: str, names: Sequence[str]) -> list[float]:
    """Return the weight of each class by the hyperparameter class_weight: `spam:5,ham:1` or a JSON
    object; 1 for classes that it leaves out.

    Raises:
        HyperparameterError: it has another form, an unknown class, or a weight that is no positive
            number.
    """
    given: dict[str, str] = {}
    try:
        if requested.lstrip().startswith("{"):
            given = {str(name): str(weight) for name, weight in json.loads(requested).items()}
        else:
            pairs = [pair.rpartition(":") for pair in requested.split(",")]
            given = {name.strip(): weight for name, _, weight in pairs}
        weights = {name: float(weight) for name, weight in given.items()}
    except ValueError:
        weights = {}
    if not weights or not all(0 < weight < math.inf for weight in weights.values()):
        raise HyperparameterError(
            f"Hyperparameter class_weight has value {requested!r}.",
            f"Give balanced, or a number above 0 for classes: {names[0]}:2,{names[-1]}:1.",
        )
    for name in weights.keys() - {*names}:
        raise HyperparameterError(
            f"Hyperparameter class_weight names the class {name!r}, and the data has "
            f"{join_names(names)}.",
            did_you_mean(name, names),
        )
    return [weights.get(name, 1.0) for name in names]


def balanced_weights(class_ids: Iterable[int], count: int) -> list[float]:
    """Return weights for `count` classes, by which each has the same weight in the data.

    rows / (classes * rows of the class), as scikit-learn's `class_weight="balanced"`.
    """
    rows = Counter(class_ids)
    return [rows.total() / (len(rows) * rows[id_]) if rows[id_] else 0.0 for id_ in range(count)]
