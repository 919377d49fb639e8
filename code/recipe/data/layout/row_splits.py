"""Find the column that names the split of each row."""

from __future__ import annotations

from collections.abc import Collection

import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data.column_names import SPLIT_COLUMNS, SPLITS, split_of, splits_in
from recipe.data.column_settings import quote_value
from recipe.data.files.part import Part, is_string
from recipe.data.layout.splits import TRAIN
from recipe.data.values import FALSE, TRUE
from recipe.errors import DataError, join_names
from recipe.spec import normalize_name

_MOST_VALUES = 10
_UNUSED = {"unsup", "unsupervised", "unlabeled", "unlabelled", "unassigned", "unused", "none", ""}
_SPLIT_NAMES = tuple(map(normalize_name, SPLIT_COLUMNS))
_FLAGS = {
    f"{verb}{word}" for words in SPLITS.values() for word in words for verb in ("is", "in", "")
} - {"train"}
"""Normalized names of columns that may hold whether a row belongs to a split."""
_SURELY_SPLITS = {"split", "splits", "datasetsplit", "datasplit", "partition"}


class SplitColumnError(DataError):
    """A column may hold the split of each row.

    Args:
        unread: Its name: what ignore_columns may leave out.
    """

    def __init__(self, unread: str, message: str, advice: str) -> None:
        super().__init__(message, advice)
        self.unread = [unread]


def split_column(part: Part, named: Collection[str]) -> str | None:
    """Return the column that holds the split of each row, by its name and its values.

    Args:
        named: Columns that hyperparameters name, and which hold something else.

    Raises:
        SplitColumnError: Only the name, or only the values, say so.
    """
    for field in part.table.schema:
        name, key, is_text = field.name, normalize_name(field.name), is_string(field.type)
        is_known = key in _SPLIT_NAMES or len(splits_in(name)) > 1  # `Train/Dev/Test`
        if name in named or pa.types.is_nested(field.type) or not (
            is_text or is_known or key in _FLAGS
        ):  # fmt: skip
            continue
        values = part.class_names.get(name) or part.distinct(name, _MOST_VALUES) or ()
        words = sorted({str(value).strip() for value in values if value is not None} - {""})
        flags = {word.lower() for word in words}
        splits = {split_of(word) for word in words if word.lower() not in _UNUSED}
        are_splits = bool(splits) and None not in splits
        # `group` may hold test and control, and `dataset` "eval-harness" in all rows.
        is_certain = TRAIN in splits or "split" in key or all(map(str.isalnum, words))
        if is_known and is_text and are_splits and is_certain:
            return str(name)
        if (
            (is_text and TRAIN in splits and len(splits - {None}) > 1)
            or (is_known and TRAIN in splits)
            or (key in _SURELY_SPLITS and len(words) > 1)
            or (key in _FLAGS and flags <= TRUE | FALSE and (len(words) > 1 or flags & TRUE))
        ):
            raise SplitColumnError(
                name,
                f"Column {name!r} of {part.path} may hold the split of each row: "
                f"{join_names(words)}.",
                "Write train, validation and test into a column called split, give "
                f"ignore_columns={quote_value(name)} to train on all rows, or "
                f"label_column={quote_value(name)} if it is the label.",
            )
    return None
