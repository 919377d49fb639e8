"""Check and convert the values of columns: texts, labels, lists, indicators."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import xxhash

from recipe.column_words import ANSWERS, words_of
from recipe.data.column_names import MESSAGES, TOKEN_IDS
from recipe.data.column_settings import quote_value
from recipe.data.columns import ColumnSelection
from recipe.data.conversations import EXAMPLE
from recipe.data.files.part import (
    DATE,
    TAG,
    UNTAGGED,
    Part,
    RowGatherer,
    is_list,
    is_number,
    is_string,
    token_data,
)
from recipe.data.files.spool import spooled_column
from recipe.errors import DataError
from recipe.settings import DataSettings
from recipe.spec import CellKind, Column
from recipe.task_table import names_target

Hashes = npt.NDArray[np.uint64]
TRUE = {"true", "1", "1.0", "yes"}
FALSE = {"false", "0", "0.0", "no"}
CHUNK_ROWS = 10_000
"""Rows of a data set that are read together."""
_SAMPLE_ROWS = 1_000
_WHOLE = re.compile(r"[-+]?\d+(\.0+)?")
_FILE = re.compile(
    r"\S*\.(jpe?g|png|gif|bmp|webp|tiff?|wav|mp3|flac|ogg|m4a|mp4|avi|pdf|docx?|dcm|txt|html?|xml)",
    re.IGNORECASE,
)
_TURNS = "the texts of each list are turns, the user's first"
_FIRST = "the first text of each list is learned"
_JOINED = "the texts of each list are joined by spaces"
"""What lists of texts become: words, sentences or right answers, as only the user knows."""
_BYTES = re.compile(r"b(?P<quote>['\"]).*(?P=quote)", re.DOTALL)


def check_texts(part: Part, column: str) -> None:
    """Check that a column holds texts, or token ids.

    Raises:
        DataError: it holds something else; the message has the first value and the remedy.
    """
    if column == TOKEN_IDS:
        return
    values = part.table[column]
    if pa.types.is_null(values.type):
        raise DataError(f"Column {column!r} of {part.path} has no value in any row.", _NAME_TEXTS)
    sample = [value for value in values.slice(0, _SAMPLE_ROWS).to_pylist() if value]
    if not is_string(values.type):
        what = "holds lists" if is_list(values.type) else f"is of type {values.type}"
    elif sample and all(is_number(value) for value in sample):
        what = "holds numbers"
    elif sample and all(DATE.fullmatch(value.strip()) for value in sample):
        what = "holds dates"
    elif sample and all(container(value) for value in sample):
        what = "holds lists or records, written as strings"
    else:
        return
    first = next(iter(sample), None)
    shown = first if isinstance(first, str) else json.dumps(first, default=str)
    raise DataError(
        f"Column {column!r} of {part.path} is not text: it {what}, such as {shown[:60]!r}.",
        f"{_NAME_TEXTS.removesuffix('.')}, or write it as strings; the columns are "
        f"{', '.join(part.table.column_names)}.",
    )


_NAME_TEXTS = "Name a column of texts in the hyperparameter text_column."


def check_inputs(part: Part, columns: ColumnSelection) -> None:
    """Check that inputs are not lists in a few rows only, names of files, Python's repr of bytes or
    numbers in place of negatives.

    Raises:
        DataError: they are.
    """
    for column in columns.form.columns:
        for name in columns.columns.get(column.role, ()):
            if column.kind is CellKind.TEXT and name in part.mixed:
                raise DataError(
                    f"{part.mixed[name]} has a list or a record in column {name!r}, not a text.",
                    f"Give texts, or leave the column out by ignore_columns={quote_value(name)}.",
                )
            cells = part.table[name].slice(0, _SAMPLE_ROWS)
            is_input = column.kind in (CellKind.TEXT, CellKind.ANY) and not column.is_target
            is_paired = column.setting == "negative_columns"
            if not is_input or not (is_string(cells.type) or is_paired):
                continue
            texts = [str(value).strip() for value in cells.to_pylist() if value not in (None, "")]
            if is_paired and texts and all(map(is_number, texts)):
                what = "holds numbers"
            elif texts and all(map(_FILE.fullmatch, texts)):
                what = "names files"
            elif sum(map(bool, map(_BYTES.fullmatch, texts))) * 2 > len(texts):
                what = "holds Python's repr of bytes"
            else:
                continue
            raise DataError(
                f"Column {name!r} of {part.path} is not text: it {what}, such as "
                f"{texts[0][:60]!r}.",
                "Write the texts themselves into the column, or name another one.",
            )


def token_ids(part: Part, name: str = TOKEN_IDS) -> pa.ChunkedArray:
    """Return the column `input_ids` (or `token_type_ids`) without padding, by `attention_mask`."""
    columns_ = [name, "attention_mask"] if "attention_mask" in part.table.column_names else [name]

    def kept() -> Iterator[list[list[int]]]:
        for _, batch in part.batches(columns_):
            rows = batch[name].to_pylist()
            if len(columns_) > 1:
                masks = batch["attention_mask"].to_pylist()
                rows = [
                    [token for token, real in zip(ids, mask, strict=True) if real]
                    for ids, mask in zip(rows, masks, strict=True)
                ]
            yield rows

    return spooled_column(pa.large_list(pa.int64()), kept())


def texts(part: Part, column: str) -> pa.ChunkedArray:
    """Return a column as texts; a null is an empty one.

    Raises:
        DataError: a row has a list or a record.
    """
    cells = part.table[column]
    if is_string(cells.type):
        cells = pc.cast(cells, pa.large_string())
        if not cells.null_count:
            return cells
        return spooled_column(cells.type, (pc.fill_null(chunk, "") for chunk in cells.chunks))

    def written() -> Iterator[list[str]]:
        for first, batch in part.batches([column]):
            rows = batch[column].to_pylist()
            for row, value in enumerate(rows, first):
                if isinstance(value, (list, dict)):
                    raise DataError(
                        f"{part.where(row)} has no text in column {column!r}, but "
                        f"{json.dumps(value, default=str)[:60]}.",
                        f"Give texts, or conversations in a column called messages: {EXAMPLE}.",
                    )
            yield ["" if value is None else str(value) for value in rows]

    return spooled_column(pa.large_string(), written())


def empty_texts(part: Part, column: str) -> int:
    """Return how many strings of a column are null or blank."""
    cells = part.table[column]
    if not is_string(cells.type):
        return 0
    return len(cells) - int(pc.sum(has_text(cells)).as_py() or 0)


def has_text(cells: Any) -> Any:
    """Return which of some strings, an Arrow array, are neither null nor blank."""
    return pc.fill_null(pc.match_substring_regex(cells, r"\S"), False)


def container(value: str) -> list[Any] | dict[str, Any] | None:
    """Return the list or record in a string of JSON or Python; None for other strings.

    Lists printed by NumPy, whose items cannot be separated reliably, become [None].
    """
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
    return [None] if re.fullmatch(r"\[[\d\s.]*\]", text) else None


def check_labels(part: Part, column: str) -> None:
    """Raise DataError if labels belong to words or spans of a text, or are lists in strings."""
    kind = part.table.schema.field(column).type
    if is_list(kind):
        batches = (batch[column].to_pylist() for _, batch in part.batches([column]))
        first: list[Any] = next((row for rows in batches for row in rows if row), [])
        if UNTAGGED in first:
            raise DataError(
                f"Column {column!r} of {part.path} has a label of each token, with -100 where none "
                "is learned.",
                f"Give task=causal-lm ignore_columns={column} to learn all tokens, or texts in the "
                "columns prompt and completion to learn the completions only.",
            )
        if first and isinstance(first[0], (list, dict)):
            raise token_data(str(part.path), f"column {column!r} labels spans: {first[:1]}")
        return
    if not is_string(kind):
        return
    distinct = part.distinct(column, part.table.num_rows) or ()
    texts = [text for text in distinct if text and text.strip()]
    rows_of_tags = [text.split() for text in texts]
    are_of_words = any(len(row) > 1 for row in rows_of_tags) or ("O" in texts and len(texts) > 1)
    if are_of_words and all(TAG.fullmatch(tag) for row in rows_of_tags for tag in row):
        raise token_data(str(part.path), f"column {column!r} has tags such as {texts[:3]}")
    lists = [parsed for text in texts if (parsed := container(text)) is not None]
    for row in lists:
        if isinstance(row, list) and any(isinstance(item, (list, dict)) for item in row):
            raise token_data(str(part.path), f"column {column!r} labels spans: {row[:1]}")
    if lists:
        raise DataError(
            f"Column {column!r} of {part.path} has lists or records written as strings, or in some "
            f"rows only, such as {str(lists[0])[:60]}.",
            'Write lists of classes in all rows, as JSON does: ["a", "b"].',
        )


def integers(part: Part, column: str) -> set[int] | None:
    """Return the integers in a column of labels, or in its lists, which may be written as strings;
    None if it has other values."""
    cells = part.table[column]
    if is_list(cells.type) and not pa.types.is_nested(cells.type.value_type):
        cells = pc.list_flatten(cells)
    if pa.types.is_nested(cells.type):
        return None
    numbers: set[int] = set()
    for value in cells.unique().to_pylist():
        written = container(value) if isinstance(value, str) else None
        items = written if isinstance(written, list) else [value]
        texts = [str(item).strip() for item in items if item not in (None, "")]
        if not all(map(_WHOLE.fullmatch, texts)):
            return None
        numbers.update(int(float(text)) for text in texts)
    return numbers


def tables(split: datasets.Dataset, count: int | None = None) -> Iterator[pa.Table]:
    """Yield the rows of a data set in its order, `count` or CHUNK_ROWS at a time, as Arrow tables.

    After `Dataset.select`, `datasets` slices its table once for each row, in some 20 microseconds;
    this takes all rows of a chunk at once.
    """
    count = count or CHUNK_ROWS
    if split._indices is None:
        yield from split.with_format("arrow").iter(count)
        return
    chosen, rows = split._indices.column(0), RowGatherer(split.data.table)
    for first in range(0, len(chosen), count):
        yield rows.select(chosen.slice(first, count).to_numpy().astype(np.int64))


def read_column(split: datasets.Dataset, name: str) -> npt.NDArray[Any]:
    """Return a column of numbers [rows], or of lists of one length [rows, numbers]; fractions as
    float32."""
    if not len(split):
        return np.empty(0, np.int64)
    chunks = [table[name].combine_chunks() for table in tables(split.select_columns([name]))]
    is_nested = is_list(chunks[0].type)
    flat = [chunk.flatten() if is_nested else chunk for chunk in chunks]
    numbers = np.concatenate([chunk.to_numpy(zero_copy_only=False) for chunk in flat])
    numbers = numbers.astype(np.float32 if numbers.dtype.kind == "f" else np.int64, copy=False)
    return numbers.reshape(len(split), -1) if is_nested else numbers


def hash_rows(table: pa.Table) -> Hashes:
    """Return a hash of 64 bits of each row."""
    rows = np.zeros(table.num_rows, np.uint64)
    for column in table.columns:
        rows = chain_hashes(column.combine_chunks(), rows)
    return rows


def chain_hashes(column: pa.Array, seeds: Hashes) -> Hashes:
    """Return the hash of each cell, with the hash of the row's former cells as seed."""
    cells: Iterator[bytes]
    if is_list(column.type) and pa.types.is_primitive(column.type.value_type):
        # Token ids: a Python object for each would be slow.
        numbers = column.flatten().to_numpy(zero_copy_only=False)
        ends = np.cumsum(pc.fill_null(pc.list_value_length(column), 0)).tolist()
        cells = (numbers[a:b].tobytes() for a, b in zip([0, *ends[:-1]], ends, strict=True))
    elif is_string(column.type):
        cells = ((cell or "").encode() for cell in column.to_pylist())
    else:
        cells = (repr(cell).encode() for cell in column.to_pylist())
    hashes = map(xxhash.xxh3_64_intdigest, cells, seeds.tolist())
    return np.fromiter(hashes, np.uint64, len(seeds))


def listed_as(part: Part, column: Column, name: str) -> str:
    """Return what the lists of strings in a column become, if the user names it; "" for others."""
    kind = part.table.schema.field(name).type
    is_one = column.setting and not column.is_repeated
    if not is_one or not is_list(kind) or not is_string(kind.value_type):
        return ""
    if column.kind is CellKind.TEXT:
        return _FIRST if column.is_target else _JOINED
    return _TURNS if column.role == MESSAGES else ""


def unlisted(
    part: Part, columns: ColumnSelection, settings: DataSettings, notes: list[str]
) -> Part:
    """Return a part whose lists of texts are texts, or conversations; a note says how.

    Raises:
        DataError: The user does not name such a column, or each text has a value of its own.
    """
    whole = part
    for column in columns.form.columns:
        name = columns.get(column.role)
        if name is None or not (how := listed_as(part, column, name)):
            continue
        if name not in settings.named_columns:
            raise DataError(
                f"Column {name!r} of {part.path} holds lists of texts.",
                f"Give {column.setting}={quote_value(name)} if {how}.",
            )
        for field in whole.table.schema if how != _TURNS else ():
            other, is_read = field.name, field.name in columns.names
            may_belong = names_target(other) and ANSWERS.isdisjoint(words_of(other))
            if is_read:  # a label, or the questions of answers
                may_belong = how == _FIRST or other not in settings.named_columns
            is_other = is_list(field.type) and other not in (name, *settings.ignored_columns)
            if is_other and may_belong and _have_equal_lengths(whole, name, other):
                raise DataError(
                    f"Column {other!r} of {part.path} has a value for each text in the lists of "
                    f"{name!r}.",
                    f"Write a row for each text, give ignore_columns={quote_value(other)} if it is "
                    "not learned, or, if it has tags of words, task=token-classification.",
                )
        notes.append(f"{part.path}: {how}, in column {name!r}")
        part = part.with_column(name, spooled_column(pa.large_string(), _made(part, name, how)))
    return part


def _have_equal_lengths(part: Part, name: str, other: str) -> bool:
    """Return whether the lists of two columns have equally many items, and some more than one."""
    both = [pc.list_value_length(part.table[one].slice(0, CHUNK_ROWS)) for one in (name, other)]
    return bool((pc.max(both[0]).as_py() or 0) > 1 and pc.all(pc.equal(*both)).as_py())


def _made(part: Part, name: str, how: str) -> Iterator[list[str]]:
    """Yield what is read of the lists of some rows at a time."""
    for _, batch in part.batches([name]):
        lists = [cell or [] for cell in batch[name].to_pylist()]
        if how == _TURNS:
            turns = ([{"role": ("user", "assistant")[number % 2], "content": text}
                      for number, text in enumerate(some)] for some in lists)  # fmt: skip
            yield list(map(json.dumps, turns))
            continue
        texts = [[text for text in some if text and text.strip()] for some in lists]
        yield [" ".join(some[:1] if how == _FIRST else some) for some in texts]
