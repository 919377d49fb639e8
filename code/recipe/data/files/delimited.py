"""Delimited text (CSV, TSV ...) to an Arrow table: quickly where it is plain, else row by row, so
that an error names its line."""

from __future__ import annotations

import contextlib
import csv
import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from recipe.data.column_names import LABEL_NAMES, PAIR_NAMES, TEXT_NAMES, plain
from recipe.data.files import quick_csv
from recipe.data.files.part import Part, is_number, open_text
from recipe.data.files.quick_csv import NotPlain
from recipe.data.files.spool import Spool
from recipe.errors import DataError

DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
_CHUNK_ROWS = 50_000
_SAMPLE_ROWS = 1_000
_LONGEST_FIELD = 100_000_000  # characters; the csv module's own limit of 131,072 is a long article
_TABLE_LINES = 5
_TABLE_SHARE = 0.95
_Row = tuple[int, list[str]]
_SEPARATOR = re.compile(r'"?sep=.?"?', re.IGNORECASE)


def read_delimited(path: Path, encoding: str, lone_column: bool, others: str) -> Part:
    """The rows of delimited text, with or without a header, quoted or not.

    Args:
        lone_column: Whether there may be one column only.
        others: The formats that it might have been, for the message.

    Raises:
        DataError: no delimiter makes columns of it, or a row cannot be read (with its line).
    """
    with open_text(path, encoding) as stream:
        sample = list(itertools.islice(stream, 200))
    if sample and _SEPARATOR.fullmatch(sample[0].strip("\r\n")):
        raise DataError(
            f"{path} begins with {sample[0].strip()!r}, which tells Excel how columns are cut and "
            "is no row.",
            "Remove the first line.",
        )
    # What cuts the first rows into the same number of fields most often; a text has commas rather
    # than tabs.
    tabs_first = sorted(DELIMITERS, key=lambda delimiter: delimiter != "\t")
    delimiter = max(tabs_first, key=lambda delimiter: _agreement(sample, delimiter))
    if _agreement(sample, delimiter) == 0:
        if not lone_column:
            raise DataError(
                f"{path} is of none of the formats {others}: no delimiter "
                f"({', '.join(DELIMITERS.values())}) cuts its lines into columns. It starts with "
                f"{''.join(sample[:1]).strip()[:60]!r}.",
                "Give each row a text and a label; plain texts are for task=causal-lm or "
                "task=masked-lm.",
            )
        delimiter = ","
    try:
        quoted = _read_rows(path, encoding, delimiter, csv.QUOTE_MINIMAL)
    except DataError:
        if delimiter != "\t":
            raise
        # Many tab-separated files are written without any quoting.
        return _read_rows(path, encoding, delimiter, csv.QUOTE_NONE)
    if delimiter != "\t" or (np.diff(np.asarray(quoted.lines)) == 1).all():
        return quoted
    # A quote at the start of a last field may have swallowed the lines up to the next one that ends
    # a field. Where a row spans lines by right, these alone have fewer fields.
    try:
        return _read_rows(path, encoding, delimiter, csv.QUOTE_NONE)
    except DataError:
        return quoted


def is_table(path: Path, encoding: str, by_names: bool = False) -> bool:
    """Whether some delimiter cuts five lines or more into the same number of cells, or the first
    line names a text and a label.

    Args:
        by_names: Only the first line counts, as lines of text may have equally many commas.
    """
    with open_text(path, encoding) as stream:
        sample = list(itertools.islice(stream, 200))
    for delimiter in DELIMITERS:
        names = {plain(cell) for cell in next(csv.reader(sample[:1], delimiter=delimiter), [])}
        if names & set(TEXT_NAMES) and names & set(LABEL_NAMES):
            return True
        if by_names or len(sample) < _TABLE_LINES:
            continue
        if _agreement(sample, delimiter) > _TABLE_SHARE:
            return True
    return False


def _agreement(sample: list[str], delimiter: str) -> float:
    header = len(next(csv.reader(sample, delimiter=delimiter), []))
    counts = Counter(len(row) for row in csv.reader(sample, delimiter=delimiter) if row)
    return counts[header] / counts.total() if header > 1 else 0.0


def _read_rows(path: Path, encoding: str, delimiter: str, quoting: int) -> Part:
    rows = _rows(path, encoding, delimiter, quoting)
    first = list(itertools.islice(rows, _SAMPLE_ROWS))
    kind = "tsv" if delimiter == "\t" else f"csv ({DELIMITERS[delimiter]})"
    if not first:
        return Part(path=path, format=kind, table=pa.table({}), lines=[])
    names = _header(path, [cells for _, cells in first])
    header, body = (first[0][1], first[1:]) if names else (None, first)
    names = names or [f"column_{index}" for index in range(len(first[0][1]))]
    schema = pa.schema([(name, pa.string()) for name in names])
    if len(first) == _SAMPLE_ROWS and encoding == "utf-8-sig":
        with contextlib.suppress(NotPlain):
            table, lines = _read_quickly(path, delimiter, quoting, names, first)
            # A header is the first row.
            body_only = slice(len(first) - len(body), None)
            table, lines = table[body_only], lines[body_only]
            return _once(Part(path=path, format=kind, table=table, lines=lines), header)
    kept, starts = Spool(), list[Any]()
    kept.add(schema.empty_table())
    chunk = body
    while chunk:
        starts.append(np.asarray([line for line, _ in chunk]))
        columns = zip(*(cells for _, cells in chunk), strict=True)
        of_chunk = {n: pa.array(c, pa.string()) for n, c in zip(names, columns, strict=True)}
        kept.add(pa.table(of_chunk))
        chunk = list(itertools.islice(rows, _CHUNK_ROWS))
    lines = np.concatenate(starts) if starts else np.empty(0, dtype=np.int64)
    return _once(Part(path=path, format=kind, table=kept.table(), lines=lines), header)


def _once(part: Part, header: list[str] | None) -> Part:
    """`part`, where its header does not stand among its rows again.

    Args:
        header: The cells of the first row, if these name the columns.

    Raises:
        DataError: it does, as where files were put end to end.
    """
    if header is None or len(header) < 2:
        return part
    columns = zip(header, part.table.columns, strict=True)
    (name, narrow), *others = sorted(columns, key=lambda each: int(each[1].nbytes))
    again = np.flatnonzero(pc.equal(narrow, name).to_numpy(zero_copy_only=False))
    for name, column in others:
        again = again[np.asarray([each == name for each in column.take(again).to_pylist()], bool)]
    if len(again):
        raise DataError(
            f"{part.where(int(again[0]))} repeats the header ({', '.join(header)[:80]}), as do "
            f"{len(again)} rows in all: files with headers were put end to end.",
            "Remove these lines, or give the files as they were.",
        )
    return part


def _read_quickly(
    path: Path, delimiter: str, quoting: int, names: list[str], first: list[_Row]
) -> tuple[pa.Table, Any]:
    """All rows, with a header among them, and the line of each; as `_rows` reads them.

    Args:
        first: Some that were read row by row, to compare with.

    Raises:
        NotPlain: they cannot be, or would be others.
    """
    rows, starts = Spool(), list[Any]()
    try:
        for table, lines in quick_csv.tables(path, delimiter, quoting != csv.QUOTE_NONE, names):
            is_empty = functools.reduce(
                pc.and_, (pc.equal(pc.binary_length(column), 0) for column in table.columns)
            )
            if pc.any(is_empty).as_py():
                is_row = pc.invert(is_empty)
                table, lines = table.filter(is_row), lines[is_row.to_numpy()]
            if not starts:
                some = table.slice(0, len(first))
                cells = list(map(list, zip(*(column.to_pylist() for column in some.columns),
                                           strict=True)))  # fmt: skip
                read = list(zip(lines.tolist(), cells, strict=False))
                # The first block may have fewer rows.
                if not read or read != first[: len(read)]:
                    raise NotPlain
            rows.add(table)
            starts.append(lines)
        if not starts:
            raise NotPlain
        return rows.table(), np.concatenate(starts)
    finally:
        rows.close()


def _rows(path: Path, encoding: str, delimiter: str, quoting: int) -> Iterator[_Row]:
    """(line on which it starts, cells) for each row; all have as many cells as the first."""
    width = None
    csv.field_size_limit(_LONGEST_FIELD)
    with open_text(path, encoding) as stream:
        reader = csv.reader(stream, delimiter=delimiter, quoting=quoting, strict=True)  # type: ignore[arg-type]
        while True:
            line = reader.line_num + 1
            try:
                cells = next(reader, None)
            except csv.Error as error:
                raise DataError(
                    f"{path}: the row that starts on line {line} cannot be read: {error}.",
                    'Close its quote; a quote inside a quoted field is written twice ("").',
                ) from error
            if cells is None:
                return
            if not any(cells):
                continue
            width = width or len(cells)
            if len(cells) != width:
                raise DataError(
                    f"{path} line {line} has {len(cells)} fields where the first row has {width}: "
                    f"{' | '.join(cells)[:80]!r}.",
                    "Put a text that holds the delimiter in double quotes.",
                )
            yield line, cells


def _header(path: Path, rows: list[list[str]]) -> list[str] | None:
    """The first row, if it names columns: known names, or words that are no values further down."""
    # Columns without a name are called as pandas has them.
    names = [cell.strip() or f"Unnamed: {at}" for at, cell in enumerate(rows[0])]
    known = {plain(name) for name in names}
    if len(names) == 1:
        return names if known & set(TEXT_NAMES) else None
    has_texts = known & set(TEXT_NAMES) or any(set(pair) <= known for pair in PAIR_NAMES)
    if not (has_texts and known & set(LABEL_NAMES)):
        # Where files were put end to end, the header stands further down, too (see `_once`).
        others = [row for row in rows[1:] if row != rows[0]]
        below = [set(column) for column in zip(*others, strict=True)]
        repeated = any(name in values for name, values in zip(names, below, strict=False))
        if repeated or len(set(names)) < len(names) or any(map(is_number, names)):
            return None
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(f"{path} has two columns called {twice[0]!r}.", "Rename one.")
    return names
