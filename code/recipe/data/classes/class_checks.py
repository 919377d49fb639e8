"""Check that the values of a label column are classes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from recipe.data import labels
from recipe.data.files.part import DATE, Part, is_list, is_number, is_string
from recipe.errors import DataError
from recipe.settings import split_values

_COMMAS = re.compile(r"[-+]?\d+(,\d+)*")
_PADDED = re.compile(r"[-+]?\d*\.\d+0")
_MOST_ATOMS = 200
_SEPARATORS = (";", "|", ",")
_FEW_ROWS = 10
MISSING = {"NA", "N/A", "n/a", "#N/A", "<NA>", "NULL", "Null", "null", "\\N", "None", "NaN"}
"""What pandas reads as no value."""


def check_classes(
    parts: Sequence[Part], column: str, rows: int, left_out: str | None = None
) -> None:
    """Check that values are classes, unless problem_type is given.

    Args:
        parts: Files of training data, possibly reduced to one row of each value.
        rows: The number of training rows.
        left_out: The hyperparameter missing_labels.

    Raises:
        DataError: some may stand for a missing label; each row has a different one; the files have
            none in common; they are dates, numbers with decimal commas, or several classes in one
            cell (most pieces between separators are labels of other rows).
    """
    one_class = "or problem_type=single_label_classification if each of them is one class."
    _check_all_have_names(parts, column, one_class)
    distinct: set[str] = set()
    are_strings = True
    for part in parts:
        values = part.table[column]
        if column in part.class_names or is_list(values.type):
            return
        are_strings = are_strings and is_string(values.type)
        distinct |= {str(v).strip() for v in values.unique().to_pylist() if v not in (None, "")}
    if all(map(is_number, distinct)):
        one_class = f"problem_type=regression if they are numbers, {one_class}"
    path = parts[0].path
    missing = distinct & MISSING
    if "-1" in distinct and "0" in distinct and all(map(str.isdigit, distinct - {"-1"})):
        missing.add("-1")
    if missing:
        values_shown = ",".join(sorted(missing))
        has_empty = any(len(labels.empty_labels(part, column)) for part in parts)
        given = ",".join(
            [*split_values(left_out), values_shown, *([labels.EMPTY] if has_empty else ())]
        )
        raise DataError(
            f"Column {column!r} of {path} has {values_shown}, which may be a class or stand "
            "for no label.",
            f"Give missing_labels={given} to leave these rows out, {one_class}",
        )
    if len(distinct) == rows >= _FEW_ROWS:
        raise DataError(
            f"Column {column!r} of {path} has a different value in each of {rows} rows, "
            f"such as {min(distinct)[:60]!r}.",
            f"Name the column of the classes in label_column, {one_class}",
        )
    _check_files_share_classes(parts, column, one_class)
    if not are_strings:
        return
    if distinct and all(map(DATE.fullmatch, distinct)):
        raise DataError(
            f"Column {column!r} of {path} holds dates, such as {min(distinct)!r}.",
            f"Name the column of the classes in label_column, {one_class}",
        )
    if any("," in label for label in distinct) and all(map(_COMMAS.fullmatch, distinct)):
        raise DataError(
            f"Column {column!r} of {path} holds numbers with commas, such as "
            f"{next(label for label in sorted(distinct) if ',' in label)!r}.",
            "Write numbers with points; give label_separator=',' if these are several classes, "
            f"{one_class}",
        )
    _check_one_class_a_cell(path, column, distinct, one_class)


def _check_one_class_a_cell(path: Path, column: str, distinct: set[str], one_class: str) -> None:
    """Raise DataError if a cell has several classes."""
    if (separated := find_separator(distinct)) is not None:
        separator, example = separated
        raise DataError(
            f"Column {column!r} of {path} has labels such as {example!r}, which look like "
            f"several separated by {separator!r}.",
            f"Give label_separator={separator!r}, {one_class}",
        )


def find_separator(distinct: Collection[str]) -> tuple[str, str] | None:
    """Return the separator between most labels that other rows have, too, and a label with it."""
    for separator in _SEPARATORS:
        cut = {label: {atom.strip() for atom in label.split(separator)} for label in distinct}
        several = {label for label, atoms in cut.items() if len(atoms) > 1}
        atoms = {atom for label in several for atom in cut[label]}
        shared = [atom for atom in atoms if sum(atom in others for others in cut.values()) > 1]
        if several and len(atoms) <= _MOST_ATOMS and len(shared) * 2 >= len(atoms):
            return separator, min(several)
    return None


def check_numbers(
    parts: Sequence[Part], column: str, rows: int, left_out: str | None = None
) -> None:
    """Check that numbers with fractions are not codes, unless problem_type is given.

    Raises:
        DataError: one ends with a zero, and others have fewer or more digits: 3.10 and 401.9.
    """
    path = parts[0].path
    texts = {str(v).strip() for part in parts for v in part.table[column].unique().to_pylist()}
    zeros = sorted(text for text in texts if _PADDED.fullmatch(text))
    if zeros and len({len(text.partition(".")[2]) for text in texts}) > 1:
        raise DataError(
            f"Column {column!r} of {path} has {zeros[0]}, and others with more or fewer "
            "digits: they may be numbers or codes.",
            "Give problem_type=regression if they are numbers, or write codes with a letter in "
            f"front: c{zeros[0]}.",
        )


def check_lists(
    parts: Sequence[Part], column: str, row_count: int, left_out: str | None = None
) -> None:
    """Check that lists hold classes, unless problem_type is given.

    Raises:
        DataError: they are pairs of ascending numbers, as starts and ends are, a truth value for
            each part of a text, or classes that no two lists share.
    """
    parts = [
        part
        for part in parts
        if column not in part.class_names and is_list(part.table[column].type)
    ]
    rows = [row for part in parts for row in part.table[column].to_pylist() if row]
    if not rows:
        return
    path = parts[0].path
    if all(isinstance(item, bool) for row in rows for item in row):
        what = "a truth value for each part of a text"
    elif all(len(row) == 2 and isinstance(row[0], int) and row[0] < row[1] for row in rows):
        what = "pairs of numbers such as the start and end of a span"
    elif (
        len({str(item) for row in rows for item in row})
        == sum(map(len, rows))
        >= max(row_count // 2, _FEW_ROWS)
    ):
        what = "classes that no two lists share"
    else:
        return
    raise DataError(
        f"Column {column!r} of {path} holds {what}, such as {rows[0]}.",
        "Name the column of the classes in label_column, or give "
        "problem_type=multi_label_classification if each item is a class.",
    )


def _check_all_have_names(parts: Sequence[Part], column: str, one_class: str) -> None:
    """Raise DataError if some files have class names and others other values: 0 may be the first
    of these names."""
    named = next((part for part in parts if column in part.class_names), None)
    if named is None:
        return
    names = named.class_names[column]
    values: dict[str, Part] = {}
    for part in parts:
        if column not in part.class_names and not is_list(part.table[column].type):
            labels_here = part.table[column].unique().to_pylist()
            values |= {str(value): part for value in labels_here if value not in (None, "")}
    if values and not values.keys() & {*names}:
        value, part = min(values.items(), key=lambda item: item[0])
        raise DataError(
            f"Column {column!r} has the class names {', '.join(names[:5])} in {named.path}, and "
            f"others in {part.path}, such as {value!r}.",
            f"Write these names into all files, {one_class}",
        )


def _check_files_share_classes(parts: Sequence[Part], column: str, one_class: str) -> None:
    """Raise DataError if no two files have a class in common, and one has several: the class may be
    in the names of the files."""
    file_classes: dict[str, set[str]] = {}
    for part in parts:
        classes = {str(v) for v in part.table[column].unique().to_pylist()}
        file_classes.setdefault(part.path.name, set()).update(classes)
    values = list(file_classes.values())
    is_apart = sum(map(len, values)) == len(set().union(*values))
    if len(values) > 1 and is_apart and max(map(len, values)) > 1:
        shown = ", ".join(f"{name} ({min(known)!r} ...)" for name, known in file_classes.items())
        raise DataError(
            f"The files of the training data have no label of column {column!r} in common: "
            f"{shown}. The class of a row may be in the name of its file.",
            f"Write it into a column of all files and name it in label_column, {one_class}",
        )


CHECKS: Mapping[str, Callable[[Sequence[Part], str, int, str | None], None]] = {
    labels.SINGLE: check_classes,
    labels.NUMBER: check_numbers,
    labels.SEVERAL: check_lists,
}
"""The check of each problem, if problem_type is not given."""
