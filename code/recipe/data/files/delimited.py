"""Delimited text (CSV, TSV ...) to an Arrow table, row by row, so that an error names its line."""

from __future__ import annotations

import csv
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data.column_names import LABEL_NAMES, PAIR_NAMES, TEXT_NAMES, plain
from recipe.data.files.part import Part, is_number, open_text
from recipe.errors import DataError

DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
_CHUNK_ROWS = 50_000
_SAMPLE_ROWS = 1_000
_LONGEST_FIELD = 100_000_000  # characters; the csv module's own limit of 131,072 is a long article
_TABLE_LINES = 5
_TABLE_SHARE = 0.95
_Row = tuple[int, list[str]]


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
                "Give each row a text and a label.",
            )
        delimiter = ","
    try:
        quoted = _read_rows(path, encoding, delimiter, csv.QUOTE_MINIMAL)
    except DataError:
        if delimiter != "\t":
            raise
        # Many tab-separated files are written without any quoting.
        return _read_rows(path, encoding, delimiter, csv.QUOTE_NONE)
    lines = quoted.lines or ()
    if delimiter != "\t" or all(after - line == 1 for line, after in itertools.pairwise(lines)):
        return quoted
    # A quote at the start of a last field may have swallowed the lines up to the next one that ends
    # a field. Where a row spans lines by right, these alone have fewer fields.
    try:
        return _read_rows(path, encoding, delimiter, csv.QUOTE_NONE)
    except DataError:
        return quoted


def is_table(path: Path, encoding: str) -> bool:
    """Whether some delimiter cuts five lines or more into the same number of cells, or the first
    line names a text and a label."""
    with open_text(path, encoding) as stream:
        sample = list(itertools.islice(stream, 200))
    for delimiter in DELIMITERS:
        names = {plain(cell) for cell in next(csv.reader(sample[:1], delimiter=delimiter), [])}
        if names & set(TEXT_NAMES) and names & set(LABEL_NAMES):
            return True
        if len(sample) >= _TABLE_LINES and _agreement(sample, delimiter) > _TABLE_SHARE:
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
    body = first[1:] if names else first
    names = names or [f"column_{index}" for index in range(len(first[0][1]))]
    tables, lines = [], []
    chunk = body
    while chunk:
        lines += [line for line, _ in chunk]
        columns = zip(*(cells for _, cells in chunk), strict=True)
        tables.append(pa.table({n: pa.array(c) for n, c in zip(names, columns, strict=True)}))
        chunk = list(itertools.islice(rows, _CHUNK_ROWS))
    schema = pa.schema([(name, pa.string()) for name in names])
    table = pa.concat_tables(tables) if tables else schema.empty_table()
    return Part(path=path, format=kind, table=table, lines=lines)


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
    names = [cell.strip() for cell in rows[0]]
    known = {plain(name) for name in names}
    if len(names) == 1:
        return names if known & set(TEXT_NAMES) else None
    has_texts = known & set(TEXT_NAMES) or any(set(pair) <= known for pair in PAIR_NAMES)
    if not (has_texts and known & set(LABEL_NAMES)):
        below = [set(column) for column in zip(*rows[1:], strict=True)]
        repeated = any(name in values for name, values in zip(names, below, strict=False))
        if repeated or len(set(names)) < len(names) or any(map(is_number, names)):
            return None
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(f"{path} has two columns called {twice[0]!r}.", "Rename one.")
    return names
