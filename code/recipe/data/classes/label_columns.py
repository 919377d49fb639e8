"""Make one column of labels of several columns, or of lists that are written as strings."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from recipe.data import labels, values
from recipe.data.classes import class_checks
from recipe.data.column_settings import is_flag
from recipe.data.files.part import Part, is_list, is_number, is_string, token_data
from recipe.data.files.spool import spooled_column
from recipe.errors import DataError
from recipe.settings import DataSettings, split_values

_SPACED_ITEMS = re.compile(r"['\"]\s+['\"]")
"""What NumPy prints between the items of a list; Python would read them as one."""
_LARGEST = 1 << 63
_INDICATORS = {0, 1, "0", "1"}
_FLAGS = {"0", "1", "0.0", "1.0", "true", "false"}
_LOOKED_AT = 1_000


def listed_labels(part: Part, column: str) -> Part:
    """Return a part whose labels are lists where all are written as such in strings, by JSON, by
    Python or as Label Studio's choices, of which some may be a single one.

    Others are returned unchanged, as are lists that hold an item twice, orders of all items, and 0
    and 1 for classes in lists of several lengths.
    """
    cells = part.table[column]
    if not is_string(cells.type):
        return part
    encoded = cells.combine_chunks().dictionary_encode()
    texts: list[str] = encoded.dictionary.to_pylist()
    lists: list[list[Any] | None] = []
    has_choices = False
    for text in texts:
        parsed: Any = None if _SPACED_ITEMS.search(text) else values.container(text)
        if isinstance(parsed, dict) and [*parsed] == ["choices"]:
            parsed, has_choices = parsed["choices"], True
        are_classes = isinstance(parsed, list) and all(map(_is_class, parsed))
        if (parsed is not None and not are_classes) or text in class_checks.MISSING:
            return part
        lists.append(parsed if text.strip() else [])
    if not any(lists) or (None in lists and not has_choices):
        return part
    rows = [[text] if labels_here is None else labels_here
            for text, labels_here in zip(texts, lists, strict=True)]  # fmt: skip
    items = {item for row in rows for item in row}
    are_marks = items <= _INDICATORS and any(len(row) > 1 for row in rows)
    if len({*map(type, items)}) > 1 or (are_marks and len({*map(len, rows)}) > 1):
        return part
    sets = {frozenset(row) for row in rows if row}
    are_orders = len(sets) == 1 < len({tuple(row) for row in rows if row})
    if not are_marks and (are_orders or any(len({*row}) < len(row) for row in rows)):
        return part
    if are_marks:
        rows = [list(map(int, row)) for row in rows]
    return part.with_column(column, pa.array(rows).take(encoded.indices))


def _is_class(item: object) -> bool:
    return isinstance(item, str) or (
        isinstance(item, int) and not isinstance(item, bool) and abs(item) < _LARGEST
    )


def check_not_of_words(part: Part, column: str, texts: Collection[str]) -> None:
    """Raise DataError if lists of labels have one for each word of the texts, in all rows."""
    if not is_list(part.table.schema.field(column).type):
        return
    lists = part.table[column].slice(0, _LOOKED_AT).to_pylist()
    for text in texts:
        cells = part.table[text].slice(0, _LOOKED_AT).to_pylist()
        counts = [
            (len(some), len(str(cell or "").split()))
            for some, cell in zip(lists, cells, strict=True)
            if some
        ]
        if len({*counts}) > 1 and all(here == words for here, words in counts):
            raise token_data(str(part.path), f"column {column!r} has a label for each word")


def one_label_column(
    part: Part, names: Sequence[str], settings: DataSettings, is_trained: bool = True
) -> tuple[Part, str]:
    """Replace several columns of labels by one: columns of 0 and 1 are a class each; of others,
    each value is a class `column: value`, or a number by problem_type.

    Args:
        names: The columns of labels; a single one is returned unchanged.
        is_trained: Whether the rows are training data, whose classes are checked.

    Returns:
        The part, and the name of its column of labels: lists of numbers or classes, or one class
        if each row has a single 1.

    Raises:
        DataError: One of several columns holds no classes, or what is a number or a class only if
            problem_type says so.
    """
    if len(names) == 1:
        return part, names[0]
    new, classes, codes = ",".join(names), list[str](), []
    if settings.problem_type == labels.NUMBER:
        return _with_numbers(part, names, new, settings.missing_labels), new
    are_flags = all(is_flag(part, name) for name in names)
    for name in names:
        cells = part.table[name]
        if are_flags:
            true = pa.array(["1", "1.0", "true"])
            written = pc.utf8_trim_whitespace(pc.utf8_lower(pc.cast(cells, pa.string())))
            is_true = pc.is_in(written, true)
            codes.append(np.where(is_true.to_numpy(), len(classes), -1))
            classes.append(name)
            continue
        _check_values(part, name, new, settings, is_trained)
        encoded = cells.combine_chunks().dictionary_encode(null_encoding="encode")
        numbers = encoded.indices.to_numpy(zero_copy_only=False)
        firsts = part.select(np.unique(numbers, return_index=True)[1])
        spelled = labels.LabelShape(problem=labels.SEVERAL).spell(firsts, name)
        known = sorted({*itertools.chain(*spelled)})
        ids = [len(classes) + known.index(*label) if label else -1 for label in spelled]
        codes.append(np.array(ids)[numbers])
        classes += [f"{name}: {label}" for label in known]
    of_rows = np.stack(codes, axis=1)
    numbers = pa.array(of_rows[of_rows >= 0], pa.int64())
    counts = (of_rows >= 0).sum(axis=1)
    ends = pa.array(np.append(0, np.cumsum(counts)), pa.int32())
    if are_flags:
        is_single = bool((counts == 1).all())
        rows = numbers if is_single else pa.ListArray.from_arrays(ends, numbers)
        return part.with_column(new, rows).named(new, names), new
    # Other files may have other values.
    written = pa.array(classes, pa.large_string()).take(numbers)
    return part.with_column(new, pa.ListArray.from_arrays(ends, written)), new


def _check_values(
    part: Part, name: str, new: str, settings: DataSettings, is_trained: bool
) -> None:
    """Raise DataError if a column cannot be one of several columns of classes."""
    what = f"label_column has value {new!r}, and column {name!r} of {part.path}"
    if pa.types.is_nested(part.table[name].type):
        raise DataError(
            f"{what} holds lists.", "Name one column of lists, or several without lists."
        )
    values.check_labels(part, name)
    distinct = {str(cell).strip() for cell in part.table[name].unique().to_pylist()}
    filled = {text.lower() for text in distinct} - {"", "none", "nan"}
    has_gaps = bool({text.lower() for text in distinct} & {"", "none", "nan"})
    if has_gaps and filled and filled <= _FLAGS:
        raise DataError(
            f"{what} holds 0 and 1, and nothing in some rows.",
            "Give missing_labels=empty to leave these rows out, or 0 where the class is not there.",
        )
    numbers = values.integers(part, name)
    if settings.problem_type != labels.SEVERAL and numbers and not is_flag(part, name):
        missing = "missing_labels=-1 to leave out rows with -1, " if -1 in numbers else ""
        raise DataError(
            f"{what} holds numbers.",
            f"Give {missing}problem_type=regression to learn the numbers, problem_type="
            "multi_label_classification if each number is a class, or name one column.",
        )
    if any(map(labels.is_fraction, distinct)):
        raise DataError(f"{what} holds numbers with fractions.", "Name columns of one kind.")
    if is_trained and settings.problem_type is None:
        try:
            rows = part.table.num_rows
            class_checks.check_classes([part], name, rows, settings.missing_labels)
        except DataError as error:
            line, _, rest = error.remedy.partition(", or problem_type")
            is_line = line.startswith("Give missing_labels=") and bool(rest)
            remedy = f"{line}." if is_line else "Name columns of a class in each row."
            raise DataError(error.message, remedy) from error


def check_alike(parts: Sequence[Part], column: str) -> None:
    """Raise DataError if some files have columns of 0 and 1, and others columns of other values,
    which would be other classes."""
    flags = [part for part in parts if column in part.class_names]
    others = [part for part in parts if column not in part.class_names]
    if flags and others:
        raise DataError(
            f"The columns {column} hold 0 and 1 in {flags[0].path}, and other values in "
            f"{others[0].path}.",
            "Give them the same kind of values in all files.",
        )


def _with_numbers(part: Part, names: Sequence[str], new: str, missing: str | None) -> Part:
    """Return a part with lists of the numbers in several columns."""
    shape, kind = labels.LabelShape(problem=labels.NUMBER, missing=missing), pa.list_(pa.float64())
    for name in names:
        shape.check_filled(part, name)

    def rows() -> Iterator[list[tuple[float, ...]]]:
        for first, batch in part.batches(names):
            some = part.select(np.arange(first, first + batch.num_rows))
            yield list(zip(*(shape.spell(some, name) for name in names), strict=True))

    return part.with_column(new, spooled_column(kind, rows()))


WORDS, FRACTIONS = "words", "fractions"


def kinds_of_labels(part: Part, names: Sequence[str], settings: DataSettings) -> set[str]:
    """Return what columns of labels hold besides whole numbers and marks of missing values."""
    kinds = set[str]()
    marks = {"", "None", *class_checks.MISSING, *split_values(settings.missing_labels)}
    for name in names:
        if name in part.class_names or pa.types.is_nested(part.table[name].type):
            return {WORDS}
        for _, batch in part.batches([name]):
            texts = {str(cell).strip() for cell in batch[name].unique().to_pylist()} - marks
            if not all(map(is_number, texts)):
                return {WORDS}
            if any(math.isfinite(value) and not value.is_integer() for value in map(float, texts)):
                kinds.add(FRACTIONS)
                break  # with which it cannot be a column of classes
    return kinds
