"""What the values of a column are: texts, labels, lists written as strings, 0 and 1 for classes."""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from recipe.data.column_content import is_something_else, is_text
from recipe.data.column_names import LABEL_NAMES, TEXT_NAMES, TOKEN_IDS, plain
from recipe.data.files.part import TAG, Part, is_list, is_number, is_string, token_data
from recipe.data.files.spool import spooled
from recipe.errors import DataError

_SAMPLE_ROWS = 1_000
_AT_ONCE = 10_000
_DATE = re.compile(r"\d{4}[-/]\d{1,2}[-/]\d{1,2}([ T]\d{1,2}:\d{2}.*)?|\d{1,2}/\d{1,2}/\d{2,4}.*")
_JOINED_STRINGS = re.compile(r"""['"]\s+['"]""")
_PIECES = ("##", "\u2581", "\u0120")
"""What pieces of words start with, in the vocabularies of BERT, SentencePiece and GPT-2."""
_TAG_COLUMNS = re.compile(
    r"(ner|pos|chunk|iob|bio|entity|slot|dep)?_?(tags?|labels?|spans?|entities)"
)
_WORDS = ("tokens", "words")
_WHOLE = re.compile(r"[-+]?\d+(\.0+)?")
_COMMAS = re.compile(r"[-+]?\d+(,\d+)*")
_MOST_ATOMS = 200
_SEPARATORS = (";", "|", ",")
_IDENTIFIERS = ("id", "index", "idx", "guid", "uid", "uuid", "tweet_id", "text_id", "comment_id")


def with_words(part: Part) -> Part:
    """`part` with its column of words as texts, where it has no column of texts.

    Raises:
        DataError: the words have tags.
    """
    lists = []
    for name in part.table.column_names:
        kind = part.table.schema.field(name).type
        if is_list(kind) and is_string(kind.value_type):
            lists.append(name)
        elif is_string(kind) and plain(name) in _WORDS:
            sample = [cell for cell in part.table[name].slice(0, _SAMPLE_ROWS).to_pylist() if cell]
            if sample and all(isinstance(container(cell), list) for cell in sample):
                lists.append(name)
    for name in [name for name in lists if plain(name) in (*TEXT_NAMES, *_WORDS)]:
        _refuse_tagged(part, name)
    names = {plain(name): name for name in part.table.column_names}
    known = next((names[name] for name in (*TEXT_NAMES, *_WORDS) if name in names), None)
    return with_texts(part, known) if known is not None and known in lists else part


def with_texts(part: Part, column: str) -> Part:
    """`part` with a column of texts as strings: lists of words are joined by spaces.

    Raises:
        DataError: the column holds something else, which is named with a remedy.
    """
    if column == TOKEN_IDS:
        return part
    if column in part.mixed:
        raise DataError(
            f"{part.mixed[column]} has a list or a record in column {column!r}, where other rows "
            "have something else.",
            _NAME_TEXTS,
        )
    values = part.table[column]
    kind = values.type
    if pa.types.is_null(kind):
        raise DataError(f"Column {column!r} of {part.path} has no value in any row.", _NAME_TEXTS)
    are_lists = is_list(kind)
    if not are_lists:
        if not is_string(kind):
            raise _no_text(part, column, f"is of type {kind}", values)
        sample = [value for value in values.slice(0, _SAMPLE_ROWS).to_pylist() if value]
        if sample and all(is_number(value) for value in sample):
            raise _no_text(part, column, "holds numbers", values)
        if sample and all(_DATE.fullmatch(value.strip()) for value in sample):
            raise _no_text(part, column, "holds dates", values)
        if what := is_something_else(sample):
            raise _no_text(part, column, what, values)
        parsed = [container(value) for value in sample]
        if not sample or any(value is None for value in parsed):
            return part
        if not all(isinstance(value, list) for value in parsed):
            raise _no_text(part, column, "holds records written as strings", values)
    _refuse_tagged(part, column)

    def joined() -> Iterator[pa.Table]:
        for _, piece in part.pieces(column):
            rows = piece.table[column].to_pylist() if are_lists else _as_lists(piece, column)
            texts = [_of_words(piece, row, words, column) for row, words in enumerate(rows)]
            yield pa.table([pa.array(texts, pa.large_string())], schema=schema)

    schema = pa.schema([(column, pa.large_string())])
    return part.with_column(column, spooled(schema, joined())[column])


def _of_words(part: Part, row: int, words: list[Any] | None, column: str) -> str | None:
    if words is not None and not all(isinstance(word, str) for word in words):
        raise DataError(
            f"{part.where(row)} has no text in column {column!r}, but a list of something else "
            f"than words: {json.dumps(words, default=str)[:60]}.",
            _NAME_TEXTS,
        )
    if any(word.startswith(_PIECES) for word in words or ()):
        raise DataError(
            f"{part.where(row)} has pieces of words in column {column!r}: "
            f"{json.dumps(words)[:60]}.",
            "Give the texts, or their token ids in a column called input_ids.",
        )
    return None if words is None else " ".join(words)


_NAME_TEXTS = "Name a column of texts in the hyperparameter text_column."


def _no_text(part: Part, column: str, what: str, values: pa.ChunkedArray) -> DataError:
    first = next((value for value in values.slice(0, _SAMPLE_ROWS).to_pylist() if value), None)
    shown = first if isinstance(first, str) else json.dumps(first, default=str)
    return DataError(
        f"Column {column!r} of {part.path} is no text: it {what} (such as {shown[:60]!r}).",
        f"{_NAME_TEXTS.removesuffix('.')}, or write it as strings; the columns are "
        f"{', '.join(part.table.column_names)}.",
    )


def _refuse_tagged(part: Part, column: str) -> None:
    """Raises DataError where another column has a tag for each word."""
    rows = part.table[column].slice(0, _SAMPLE_ROWS).to_pylist()
    words = [container(row) if isinstance(row, str) else row for row in rows]
    lengths = [len(row) for row in words if isinstance(row, list)]
    for name in part.table.column_names:
        if name == column or not _TAG_COLUMNS.fullmatch(plain(name)):
            continue
        others = part.table[name].slice(0, _SAMPLE_ROWS).to_pylist()
        if others and isinstance(others[0], str):
            others = [container(other) for other in others if other]
        tagged = [len(row) for row in others if isinstance(row, list)]
        if tagged and tagged == lengths:
            what = f"column {name!r} has a tag for each word of column {column!r}"
            raise token_data(str(part.path), what)


def container(value: str) -> list[Any] | dict[str, Any] | None:
    """The list or record that a string is written from, by JSON or Python."""
    text = value.strip()
    if not (text.startswith("[") and text.endswith("]")) and not (
        text.startswith("{") and text.endswith("}")
    ):
        return None
    for read in (json.loads, ast.literal_eval):
        try:
            parsed = read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        return parsed if isinstance(parsed, (list, dict)) else None
    # numpy writes ['a' 'b'] and [0 1 1].
    return [None] if re.fullmatch(r"\[[\d\s.]*\]", text) else None


def _as_lists(part: Part, column: str) -> list[list[Any] | None]:
    """The lists that the strings of a column are written from.

    Raises:
        DataError: a row is no list, or one that numpy wrote, whose items cannot be told apart.
    """
    rows: list[list[Any] | None] = []
    for row, value in enumerate(part.table[column].to_pylist()):
        parsed = container(value) if value else None
        by_numpy = value and (_JOINED_STRINGS.search(value) or parsed == [None])
        if value and (by_numpy or not isinstance(parsed, list)):
            raise DataError(
                f"{part.where(row)} has {value[:60]!r} in column {column!r}, where other rows have "
                "lists written as strings" + (", in numpy's way." if by_numpy else "."),
                'Write lists as JSON: ["a", "b"].',
            )
        rows.append(parsed if isinstance(parsed, list) else None)
    return rows


def with_labels(part: Part, column: str) -> Part:
    """`part` with lists of labels that are written as strings as lists.

    Raises:
        DataError: the labels are of words or of spans of a text.
    """
    kind = part.table.schema.field(column).type
    if is_list(kind):
        pieces = (piece.table[column].to_pylist() for _, piece in part.pieces(column))
        first: list[Any] = next((row for rows in pieces for row in rows if row), [])
        if first and isinstance(first[0], (list, dict)):
            raise token_data(str(part.path), f"column {column!r} labels spans: {first[:1]}")
        return part
    if not is_string(kind):
        return part
    tags = list(dict.fromkeys(itertools.takewhile(TAG.fullmatch, _written(part, column))))
    if len(tags) > 1 and "O" in tags and all(map(TAG.fullmatch, _written(part, column))):
        raise token_data(str(part.path), f"column {column!r} has tags such as {tags[:3]}")
    rows_of_tags = [text.split() for text in _written(part, column)]
    if any(len(row) > 1 for row in rows_of_tags) and all(
        all(map(TAG.fullmatch, row)) for row in rows_of_tags
    ):
        example = " ".join(max(rows_of_tags, key=len)[:5])
        raise token_data(str(part.path), f"column {column!r} has tags of words: {example!r}")
    if next(_written(part, column), None) is None or any(
        container(text) is None for text in _written(part, column)
    ):
        return part

    def lists() -> Iterator[pa.Table]:
        for _, piece in part.pieces(column):
            rows = _as_lists(piece, column)
            if any(isinstance(item, (list, dict)) for row in rows for item in row or ()):
                spans = [item for row in rows for item in row or ()]
                raise token_data(str(part.path), f"column {column!r} labels spans: {spans[:1]}")
            # An integer may be too large for Arrow, or stand beside strings.
            items = [
                None if row is None else [None if item is None else str(item) for item in row]
                for row in rows
            ]
            yield pa.table([pa.array(items, schema.field(0).type)], schema=schema)

    schema = pa.schema([(column, pa.list_(pa.string()))])
    return part.with_column(column, spooled(schema, lists())[column])


def _written(part: Part, column: str) -> Iterator[str]:
    """The strings of a column that have more than spaces, each at least once."""
    for _, piece in part.pieces(column):
        yield from (
            text for text in piece.table[column].unique().to_pylist() if text and text.strip()
        )


def with_indicators(part: Part, label_column: str | None) -> tuple[Part, str | None]:
    """Columns of 0 and 1, one for each class, as one column of their names.

    They are those that label_column names with commas; or all columns but the texts and those of
    identifiers, where these are two or more with a single 1 in each row, or three or more.

    Args:
        asked: The hyperparameter label_column.

    Returns:
        The part, and the name of the new column; `asked` where there are no such columns.
    """
    names = part.table.column_names
    if label_column is not None:
        columns = [name.strip() for name in label_column.split(",")]
        if label_column in names or len(columns) < 2:
            return part, label_column
        if odd := [name for name in columns if _indicators(part, name) is None]:
            raise DataError(
                f"label_column has value {label_column!r}, but column {odd[0]!r} of {part.path} "
                "holds other values than 0 and 1.",
                "Name one column of classes, or columns of 0 and 1.",
            )
    else:
        if {plain(name) for name in names} & set(LABEL_NAMES):
            return part, None
        others = [
            name
            for name in names
            if plain(name) not in _IDENTIFIERS
            and plain(name).rpartition("_")[2] not in ("id", "ids")
            and not plain(name).startswith("unnamed")
        ]
        columns = [name for name in others if _indicators(part, name) is not None]
        no_texts = {name for name in others if not is_text(part, name)}
        if len(columns) < 2 or set(columns) != no_texts:
            return part, None
    of_columns = [_indicators(part, name) for name in columns]
    has = np.stack([each for each in of_columns if each is not None], axis=1)
    counts = has.sum(axis=1)
    single = bool((counts == 1).all())
    if label_column is None and not single and len(columns) < 3:
        return part, None
    numbers = pa.array(np.nonzero(has)[1], pa.int64())
    ends = pa.array(np.append(0, np.cumsum(counts)), pa.int32())
    values = numbers if single else pa.ListArray.from_arrays(ends, numbers)
    new = label_column or ",".join(columns)
    named = part.with_column(new, values)
    return named.named(new, columns), new


def _indicators(part: Part, name: str) -> npt.NDArray[np.int8] | None:
    """The column as integers [rows], where all its values are 0 or 1."""
    values = part.table[name]
    if pa.types.is_nested(values.type) or pa.types.is_boolean(values.type):
        return None
    indicators = {"0", "1", "0.0", "1.0"}
    distinct = part.distinct(name, len(indicators))
    if distinct is None or not {str(value) for value in distinct} <= indicators:
        return None
    return np.asarray(pc.cast(values, pa.float64()).to_numpy().astype(np.int8))


def integers(part: Part, column: str) -> set[int] | None:
    """The integers in a column of labels, or in its lists; None where it holds other values."""
    flat = _flat(part, column)
    if any(isinstance(value, (list, dict)) for value in flat):
        return None
    texts = {str(value).strip() for value in flat if value not in (None, "")}
    if not all(_WHOLE.fullmatch(text) for text in texts):
        return None
    return {int(float(text)) for text in texts}


def strings(part: Part, column: str) -> set[str]:
    """The strings in a column of labels, or in its lists."""
    return {value.strip() for value in _flat(part, column) if isinstance(value, str)}


def _flat(part: Part, column: str) -> list[Any]:
    """The values of a column of labels, or of its lists, each at least once."""
    values = part.table[column]
    if not is_list(values.type):
        return [] if pa.types.is_nested(values.type) else list(values.unique().to_pylist())
    if not pa.types.is_nested(values.type.value_type):
        return list(pc.list_flatten(values).unique().to_pylist())
    return [item for row in values.to_pylist() for item in row or ()]


def with_positions(part: Part, column: str, codes: Sequence[int]) -> Part:
    """`part` with each integer of a column of labels, or of its lists, as its position in `codes`;
    -1 and nothing stay."""
    positions = {code: at for at, code in enumerate(codes)}

    def position(value: Any) -> int | None:
        if value is None or value == "":
            return None
        return positions.get(int(float(value)), -1)

    is_nested = is_list(part.table.schema.field(column).type)
    schema = pa.schema([(column, pa.list_(pa.int64()) if is_nested else pa.int64())])

    def positioned() -> Iterator[pa.Table]:
        for _, piece in part.pieces(column):
            rows = [
                [position(item) for item in row] if isinstance(row, list) else position(row)
                for row in piece.table[column].to_pylist()
            ]
            yield pa.table([pa.array(rows, schema.field(0).type)], schema=schema)

    return part.with_column(column, spooled(schema, positioned())[column])


def check_classes(parts: Sequence[tuple[Part, str]]) -> None:
    """See that strings that are taken for classes are not something else, where nobody said so.

    Raises:
        DataError: they are dates; or numbers with decimal commas; or several classes in a cell: of
            the labels with a separator, most pieces are labels elsewhere, too.
    """
    distinct: set[str] = set()
    for part, column in parts:
        values = part.table[column]
        if column in part.class_names or not is_string(values.type):
            return
        distinct |= {value.strip() for value in values.unique().to_pylist() if value}
    one_class = "or problem_type=single_label_classification if each of them is one class."
    part, column = parts[0]
    if distinct and all(_DATE.fullmatch(each) for each in distinct):
        raise DataError(
            f"Column {column!r} of {part.path} holds dates, such as {min(distinct)!r}.",
            f"Name the column of the classes in label_column, {one_class}",
        )
    if any("," in each for each in distinct) and all(map(_COMMAS.fullmatch, distinct)):
        raise DataError(
            f"Column {column!r} of {part.path} holds numbers with commas, such as "
            f"{next(each for each in sorted(distinct) if ',' in each)!r}.",
            "Write numbers with points; give label_separator=',' if these are several classes, "
            f"{one_class}",
        )
    for separator in _SEPARATORS:
        cut = {each: {piece.strip() for piece in each.split(separator)} for each in distinct}
        several = {each for each, pieces in cut.items() if len(pieces) > 1}
        atoms = {piece for text in several for piece in cut[text]}
        shared = [atom for atom in atoms if sum(atom in pieces for pieces in cut.values()) > 1]
        if several and len(atoms) <= _MOST_ATOMS and len(shared) * 2 >= len(atoms):
            example = min(several)
            raise DataError(
                f"Column {column!r} of {part.path} has labels such as {example!r}, which look like "
                f"several with {separator!r} between.",
                f"Give label_separator={separator!r}, {one_class}",
            )


def tables(split: datasets.Dataset, at_once: int) -> Iterator[pa.Table]:
    """The rows of a data set in its order, `at_once` at a time, as its format `arrow` has them.

    Of chosen rows (`Dataset.select`) `datasets` cuts each out of its table by itself, which takes
    some 20 microseconds a row; here each piece of the table is asked once for all of its rows.
    """
    if split._indices is None:
        yield from split.with_format("arrow").iter(at_once)
        return
    chosen, rows = split._indices.column(0), Gathering(split.data.table)
    for first in range(0, len(chosen), at_once):
        yield rows.at(chosen.slice(first, at_once).to_numpy().astype(np.int64))


class Gathering:
    """Rows of a table by their numbers, in any order, each piece of it asked once for all of its
    rows: Arrow's own `take` would put the pieces together first, in memory."""

    def __init__(self, table: pa.Table) -> None:
        self._pieces = table.to_batches()
        self._ends = np.cumsum([piece.num_rows for piece in self._pieces], dtype=np.int64)

    def at(self, numbers: Any) -> pa.Table:
        """The rows of some numbers, int64 [rows], one at least."""
        order = np.argsort(numbers, kind="stable")
        ascending = numbers[order]
        owners = np.searchsorted(self._ends, ascending, side="right")
        cuts = np.flatnonzero(np.diff(owners)) + 1
        taken = []
        for of_piece, at in zip(np.split(ascending, cuts), owners[np.append(0, cuts)], strict=True):
            piece = self._pieces[at]
            taken.append(piece.take(pa.array(of_piece - (self._ends[at] - piece.num_rows))))
        table = pa.Table.from_batches(taken)
        is_ascending = bool((order[1:] > order[:-1]).all())
        return table if is_ascending else table.take(pa.array(np.argsort(order)))


def column(split: datasets.Dataset, name: str) -> Any:
    """A column of numbers [rows], or of as many numbers in each row [rows, numbers]; fractions as
    float32."""
    numbers = split.select_columns([name])
    kind = numbers.data.schema.field(name).type if len(split) else pa.null()
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        # As below, without a look at each number.
        chunks = [table[name].to_numpy() for table in tables(numbers, _AT_ONCE)]
        flat = np.concatenate(chunks)
        return flat.astype(np.float32 if flat.dtype.kind == "f" else np.int64, copy=False)
    if pa.types.is_list(kind) and pa.types.is_floating(kind.value_type):
        lists = [table[name].combine_chunks() for table in tables(numbers, _AT_ONCE)]
        widths = {n for each in lists for n in pc.unique(pc.list_value_length(each)).to_pylist()}
        if len(widths) == 1 and None not in widths and 0 not in widths:
            flat = np.concatenate([each.flatten().to_numpy(zero_copy_only=False) for each in lists])
            return flat.astype(np.float32, copy=False).reshape(len(split), *widths)
    batches = [np.asarray(batch[name]) for batch in numbers.with_format("numpy").iter(_AT_ONCE)]
    values = np.concatenate(batches) if batches else np.empty(0, dtype=np.int64)
    return values.astype(np.float32) if values.dtype.kind == "f" else values
