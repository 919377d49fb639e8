"""Read the files of a layout into parts, each of one split."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data.column_content import is_mark
from recipe.data.column_names import LABEL_NAMES, SPLIT_COLUMNS, plain, split_of
from recipe.data.files import formats
from recipe.data.files.part import Part, is_string
from recipe.data.layout.channels import ChannelLayout
from recipe.data.layout.splits import ORDER, TRAIN
from recipe.errors import DataError, Problems, listed

Unit = Callable[[], Part]
Units = Callable[[Sequence[Path]], Sequence[Unit]]
"""Returns a call for each part of the files of a split; a part may combine several files."""

_MOST_VALUES = 10
_LONGEST_VALUE = 30  # characters
_UNUSED = {"unsup", "unsupervised", "unlabeled", "unlabelled", "unassigned", "unused", "none", ""}
_FLAGS = {
    "is_train": "train",
    **dict.fromkeys(("is_valid", "is_validation", "is_val", "is_dev", "is_eval"), "validation"),
    "is_test": "test",
}
_OF_SPLITS = "has the split of each row"
TRUE = {"true", "1", "1.0", "yes"}
FALSE = {"false", "0", "0.0", "no"}


def read_parts(
    layout: ChannelLayout, notes: list[str], units: Units | None = None
) -> list[tuple[str, Part]]:
    """Return the parts that have rows with their splits, the training data first.

    A column that names the split of each row takes precedence over file names, so that a test row
    is never trained.

    Args:
        notes: Gets a sentence for each part that is left out.
        units: By default each file is a part.

    Raises:
        DataError: files cannot be read (all of them in one message), or the training data has no
            rows (which a host's part of a sharded channel need not have).
        OutputError: the disk of the cache is full.
    """
    parts: list[tuple[str, Part]] = []
    problems = Problems()
    for split in sorted(layout.files, key=ORDER.index):
        files = layout.files[split]
        one_each = [functools.partial(formats.read, path) for path in files]
        for read in one_each if units is None else units(files):
            with problems.noted():
                part = read()
                if part.table.num_rows == 0:
                    notes.append(f"{part.path} has no rows and is not used.")
                    continue
                parts += _by_column(split, part, layout, notes)
    problems.check()
    if not any(split == TRAIN for split, _ in parts) and not layout.sharded:
        files_of_train = ", ".join(map(str, layout.files[TRAIN]))
        why = "".join(f" {note}" for note in notes if _OF_SPLITS in note)
        raise DataError(
            f"The training data has no rows: {files_of_train}.{why}",
            "Give rows to train on" + (", or rename the column." if why else "."),
        )
    return sorted(parts, key=lambda split_and_part: ORDER.index(split_and_part[0]))


def describe(
    split: str, parts: Sequence[Part], count: str, read: str, columns_read: Collection[str]
) -> str:
    """Return a line about the data of a split: its files, and the columns that are read.

    Args:
        count: The amount of data, such as `12 rows`.
        read: The columns that are read, as text.
        columns_read: Their names, and names of others that need not be reported as unread.
    """
    where = str(parts[0].path) if len(parts) == 1 else f"{len(parts)} files"
    kinds = ", ".join(sorted({part.format for part in parts}))
    others = sorted(
        {name for part in parts for name in part.table.column_names} - set(columns_read)
    )
    unread = f"; not read: {listed(others)}" if others else ""
    return f"{split} data: {count} from {where}, {kinds}; {read}{unread}"


def accepted(part: Part, label: str | None, notes: list[str]) -> Part:
    """Return the part without rows that annotators rejected or ignored, and without the column that
    says so. If that column is the label, only ignored rows are left out.

    Args:
        label: The label column, if it is known.
        notes: Gets the number of rows that are left out.
    """
    column = next((name for name in part.table.column_names if is_mark(part, name)), None)
    if column is None:
        return part
    answers = part.table[column].to_pylist()
    if column == label:
        is_kept = [answer not in (None, "ignore") for answer in answers]
        return only(part, is_kept, f"were ignored in Prodigy (column {column!r})", notes)
    is_kept = [answer == "accept" for answer in answers]
    part = only(part, is_kept, f"were not accepted in Prodigy (column {column!r})", notes)
    return dataclasses.replace(part, table=part.table.drop_columns([column]))


def only(part: Part, is_kept: Sequence[bool], why: str, notes: list[str]) -> Part:
    """Return some rows of a part; a note says how many are left out, and why."""
    if all(is_kept):
        return part
    rows = np.flatnonzero(is_kept)
    notes.append(f"{len(is_kept) - len(rows)} rows of {part.path} {why} and are not used.")
    return part.select(rows)


def _by_column(
    split: str, part: Part, layout: ChannelLayout, notes: list[str]
) -> list[tuple[str, Part]]:
    """Divide a part by a column that names the split of each row; the column may come from the
    names of its folders."""
    for name, value in layout.partitions.get(part.path, {}).items():
        if name not in part.table.column_names:
            values = [None if value == "__HIVE_DEFAULT_PARTITION__" else value]
            part = part.with_column(name, pa.array(values * part.table.num_rows, pa.string()))
    return by_column(split, part, part.path in layout.unclear, notes)


def by_column(split: str, part: Part, is_unclear: bool, notes: list[str]) -> list[tuple[str, Part]]:
    """Divide a part by the column that names the split of each row, if there is one.

    Args:
        split: The split of the part by its name.
        is_unclear: Whether its name contains several splits.
        notes: Gets the number of rows of each split.
    """
    column = next((name for name in part.table.column_names if _names_splits(part, name)), None)
    if column is None:
        if is_unclear:
            raise DataError(
                f"The name of {part.path} contains several splits, and no column has the split of "
                "each row.",
                "Rename it to one split, or add a column called split.",
            )
        return [(split, part)]
    flagged = _FLAGS.get(plain(column))
    of_value: dict[Any, str | None] = {None: None}
    for value in part.table[column].unique().to_pylist():
        if flagged is not None:
            other = TRAIN if flagged != TRAIN else "test"
            of_value[value] = flagged if str(value).strip().lower() in TRUE else other
        elif value is not None:
            of_value[value] = split_of(str(value))
    found: dict[str | None, list[npt.NDArray[np.int64]]] = defaultdict(list)
    for first, piece in part.pieces(column):
        of_rows = np.array([of_value[value] for value in piece.table[column].to_pylist()], object)
        for name in dict.fromkeys(of_rows):
            found[name].append(first + np.flatnonzero(of_rows == name))
    rows = {name: np.concatenate(of_pieces) for name, of_pieces in found.items()}
    if set(rows) == {split}:
        return [(split, part)]
    groups = ", ".join(f"{len(of)} {name or 'of none'}" for name, of in rows.items())
    notes.append(f"{part.path}: column {column!r} {_OF_SPLITS}: {groups}.")
    if split != TRAIN and rows.pop(TRAIN, None) is not None:
        notes.append(f"Of {part.path}, which is {split} data, rows of train are not used.")
    rest = dataclasses.replace(part, table=part.table.drop_columns([column]))
    return [(name, rest.select(of)) for name, of in rows.items() if name is not None]


def _names_splits(part: Part, column: str) -> bool:
    """Return whether a column holds splits: by its name and some values, or by all its values."""
    kind = part.table.schema.field(column).type
    name = plain(column)
    if pa.types.is_nested(kind) or name in LABEL_NAMES:
        return False
    if name not in _FLAGS and not is_string(kind):
        return False
    values = part.distinct(column, _MOST_VALUES)
    if values is None:
        return False
    words = [str(value).strip() for value in values if value is not None]
    if not words or any(len(word) > _LONGEST_VALUE for word in words):
        return False
    if name in _FLAGS:
        return {word.lower() for word in words} <= TRUE | FALSE
    known = [split_of(word) for word in words if word.lower() not in _UNUSED]
    if name in SPLIT_COLUMNS:
        # `group` may hold test and control, and `dataset` "eval-harness" in all rows.
        is_certain = TRAIN in known or "split" in name or all(map(str.isalnum, words))
        return is_certain and (all(known) or (name in SPLIT_COLUMNS[:4] and TRAIN in known))
    return all(known) and TRAIN in known and len(set(known)) > 1
