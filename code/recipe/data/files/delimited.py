"""Read delimited text (CSV, TSV ...) into an Arrow table.

Well-formed text is read by Arrow, in a tenth of the time that `csv` takes. Arrow accepts invalid
rows (text after a closing quote, an open quote at the end), so blocks are checked first. Other text
is read row by row by `csv`, whose errors name the line.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import functools
import itertools
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from pyarrow import csv as arrow_csv

from recipe import column_words
from recipe.data.column_names import SPLIT_COLUMNS
from recipe.data.files.conll import has_sentences
from recipe.data.files.part import HeaderHint, Part, UnclearHeader, is_number, token_data
from recipe.data.files.spool import spool_tables
from recipe.data.files.text_files import first_lines, open_bytes, open_text
from recipe.errors import DataError
from recipe.spec import (
    IDENTIFIERS,
    LABEL,
    LABEL_NAMES,
    PAIRS,
    TEXT,
    TEXT_NAMES,
    Column,
    normalize_name,
)
from recipe.task_table import names_of_samples

DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
_CHUNK_ROWS = 50_000
_SAMPLE_ROWS, _SAMPLE_LINES = 1_000, 200
_BLOCK = 16 << 20  # bytes
_LONGEST_FIELD = 100_000_000  # characters; the csv module's own limit of 131,072 is a long article
_TABLE_LINES = 5
_TABLE_SHARE = 0.95
Bytes = npt.NDArray[Any]
Block = tuple[pa.Table, Bytes]
"""Some rows as strings, a header among them, and the line on which each starts."""
Row = tuple[int, list[str]]
"""The first line of a row, and its cells."""
_TEXTS, _LABELS, _SPLITS = (
    frozenset(map(normalize_name, names)) for names in (TEXT_NAMES, LABEL_NAMES, SPLIT_COLUMNS)
)
_IMPORTED = '{"ImportId"'
"""Begins the cells below names and questions in Qualtrics' exports, above the answers."""
_VALUES = {"positive", "negative", "pos", "neg"}
_SINGLE_QUOTED = re.compile(r"'.*'", re.DOTALL)
_MOST_CLASSES, _FEW_CELLS = 200, 2
_WORDS_OF_NAMES, _FEWEST_NAMES, _LETTERS = 3, 2, 2
_SEPARATOR = re.compile(r'"?sep=.?"?', re.IGNORECASE)


class NotPlain(Exception):
    """The file has to be read row by row."""


def read_delimited(
    path: Path, encoding: str, lone_column: bool, others: str, header: HeaderHint
) -> Part:
    """Return the rows of delimited text, with or without a header, quoted or not. Raise DataError
    if no delimiter divides it into columns, or a row cannot be read (with its line).

    Args:
        lone_column: Whether there may be one column only.
        others: The formats that it might have been, for the message.
        header: Whether the first row names the columns, or names by which it is known.
    """
    with open_text(path, encoding) as stream:
        lines = itertools.dropwhile(lambda line: not line.strip(), stream)
        sample = list(itertools.islice(lines, _SAMPLE_LINES))
    if sample and _SEPARATOR.fullmatch(sample[0].strip("\r\n")):
        raise DataError(
            f"{path} begins with {sample[0].strip()!r}, which names the delimiter for Excel and "
            "is not a row.",
            "Remove the first line.",
        )
    delimiter, quote = _find_delimiter(sample)
    begun = next(csv.reader(sample[:1], delimiter=delimiter), [])
    is_named = bool({*map(normalize_name, begun)} & _header_names())
    if delimiter == "\t" and not is_named and has_sentences(path):
        raise token_data(str(path), "it has a word on each line, and empty lines between sentences")
    if _agreement(sample, delimiter) == 0:
        names = {normalize_name(cell) for cell in sample[0].split(",")} if sample else set()
        if not lone_column and not names & _header_names():
            raise DataError(
                f"{path} is of none of the formats {others}: no delimiter "
                f"({', '.join(DELIMITERS.values())}) cuts its lines into columns. It starts with "
                f"{''.join(sample[:1]).strip()[:60]!r}.",
                "Remove lines above the names of the columns; give each row a text and a label. "
                "Plain texts are for task=causal-lm or task=masked-lm.",
            )
        delimiter = ","
    if quote == '"':
        _check_quotes(path, sample, delimiter)
    try:
        quoted = _read_rows(path, encoding, delimiter, quote, header)
    except DataError:
        if delimiter != "\t":
            raise
        # Many tab-separated files are written without any quoting.
        return _read_rows(path, encoding, delimiter, None, header)
    if delimiter != "\t":
        return quoted
    spans = np.zeros(quoted.table.num_rows, dtype=bool)
    for column in quoted.table.columns:
        spans |= pc.match_substring_regex(column, "[\r\n]").to_numpy()
    if not spans.any():
        return quoted
    # A quote at the start of a last field may have swallowed the lines up to the next quote that
    # ends a field. If a row really spans lines, these alone have fewer fields.
    try:
        unquoted = _read_rows(path, encoding, delimiter, None, header)
    except DataError:
        return quoted
    # In a quoted cell, a quote between other characters is written twice.
    for column in unquoted.table.columns:
        if pc.any(pc.match_substring_regex(column, r'[^"]"("")*[^"]')).as_py():
            return unquoted
    raise DataError(
        f"{quoted.where(int(spans.argmax()))} begins a cell of several lines in quotes, or several "
        "rows with quotes in their texts: the file can be read either way.",
        "Write it as CSV or JSON Lines.",
    )


def is_table(path: Path, by_names: bool = False) -> bool:
    """Return whether some delimiter cuts five lines or more into the same number of cells, or the
    first line names two columns of samples.

    Args:
        by_names: Only the first line counts, as lines of text may have equally many commas.
    """
    sample = first_lines(path, _SAMPLE_LINES)
    for delimiter in DELIMITERS:
        cells = next(csv.reader(sample[:1], delimiter=delimiter), [])
        if len({*map(normalize_name, cells)} & _header_names()) > 1:
            return True
        if by_names or len(sample) < _TABLE_LINES:
            continue
        if _agreement(sample, delimiter) > _TABLE_SHARE:
            return True
    return False


def _agreement(sample: Sequence[str], delimiter: str, quote: str | None = '"') -> float:
    widths = [len(row) for row in _cells(sample, delimiter, quote) if row]
    return widths.count(widths[0]) / len(widths) if max(widths[:1], default=0) > 1 else 0.0


def _find_delimiter(sample: list[str]) -> tuple[str, str]:
    """Return the delimiter that cuts most rows into the same number of fields, and the quote: the
    single one if it alone makes rows."""
    # Texts have commas rather than tabs.
    tabs_first = sorted(DELIMITERS, key=lambda delimiter: delimiter != "\t")
    delimiter = max(tabs_first, key=lambda delimiter: _agreement(sample, delimiter))
    single = [one for one in DELIMITERS if _is_single_quoted(sample, one)]
    if len(single) == 1 and _agreement(sample, delimiter) < 1:
        return single[0], "'"
    return delimiter, '"'


def _is_single_quoted(sample: Sequence[str], delimiter: str) -> bool:
    """Return whether single quotes, and nothing else, make each line a row of as many cells."""
    if delimiter == "\t" or _agreement(sample, delimiter, None) == 1:
        return False
    try:
        rows = [row for line in sample for row in _cells([line], delimiter, "'", strict=True)]
    except csv.Error:
        return False
    return len({*map(len, filter(None, rows))}) == 1 < len(rows[0])


def _cells(lines: Iterable[str], delimiter: str, quote: str | None, strict: bool = False) -> Any:
    """Return csv's reader; without a quote, none is special."""
    return csv.reader(
        lines, delimiter=delimiter, quotechar=quote, strict=strict,
        quoting=csv.QUOTE_MINIMAL if quote else csv.QUOTE_NONE,
    )  # fmt: skip


def _read_rows(
    path: Path, encoding: str, delimiter: str, quote: str | None, has_header: HeaderHint
) -> Part:
    quickly = None
    if encoding == "utf-8-sig" and quote != "'":
        quickly = functools.partial(_read_quickly, path, delimiter, quote is not None)
    kind = "tsv" if delimiter == "\t" else f"csv ({DELIMITERS[delimiter]})"
    with contextlib.closing(_rows(path, encoding, delimiter, quote)) as rows:
        part = read_cells(path, rows, kind, has_header, quickly)
    if len(part.table.column_names) > 1 and quote and delimiter != "\t":
        _check_no_swallowed_rows(part, delimiter)
    return part


def read_cells(
    path: Path,
    rows: Iterator[Row],
    kind: str,
    has_header: HeaderHint,
    read_quickly: Callable[[Sequence[str], list[Row]], Iterator[Block]] | None = None,
) -> Part:
    """Return rows of equally many cells as a table of strings.

    Args:
        kind: Their format, for the log.
        has_header: Whether the first row names the columns, or names by which it is known.
        read_quickly: Yields the rows again, given the names of the columns and the first rows; it
            may raise NotPlain.

    Raises:
        UnclearHeader: The first row may name the columns.
        DataError: The header is repeated below.
    """
    first = list(itertools.islice(rows, _SAMPLE_ROWS))
    if not first:
        return Part(path=path, format=kind, table=pa.table({}), lines=[])
    is_survey = has_header is not False and all(
        cell.startswith(_IMPORTED) for _, cells in first[2:3] or first for cell in cells
    )
    header = _header(path, [cells for _, cells in first], is_survey or has_header)
    names = header or [f"column_{index}" for index in range(len(first[0][1]))]
    schema = pa.schema([(name, pa.string()) for name in names])

    def blocks_of_rows() -> Iterator[Block]:
        chunk = first
        while chunk:
            columns = zip(*(cells for _, cells in chunk), strict=True)
            table = pa.table([pa.array(cells, pa.string()) for cells in columns], schema=schema)
            yield table, np.asarray([line for line, _ in chunk])
            chunk = list(itertools.islice(rows, _CHUNK_ROWS))

    def part_from(blocks: Iterator[Block]) -> Part:
        starts = [np.empty(0, np.int64)]

        def tables() -> Iterator[pa.Table]:
            for table, lines in blocks:
                starts.append(lines)
                yield table

        begin = 0 if header is None else 3 if is_survey else 1
        table = spool_tables(schema, tables())[begin:]
        return Part(path=path, format=kind, table=table, lines=np.concatenate(starts)[begin:])

    part = None
    if len(first) == _SAMPLE_ROWS and read_quickly is not None:
        with contextlib.suppress(NotPlain):
            part = part_from(read_quickly(names, first))
    part = part or part_from(blocks_of_rows())
    if len(names) > 1 and header is not None:
        _check_one_header(part, first[0][1])
    return part


def _check_one_header(part: Part, cells: Sequence[str]) -> None:
    """Raise DataError if the row that names the columns is repeated below."""
    columns = zip(cells, part.table.columns, strict=True)
    (name, narrow), *others = sorted(columns, key=lambda column: int(column[1].nbytes))
    again = np.flatnonzero(pc.equal(narrow, name).to_numpy(zero_copy_only=False))
    for name, column in others:
        is_same = [cell == name for cell in column.take(again).to_pylist()]
        again = again[np.asarray(is_same, bool)]
    if len(again):
        raise DataError(
            f"{part.where(int(again[0]))} repeats the header ({', '.join(cells)[:80]}), as do "
            f"{len(again)} rows in all: files with headers were concatenated.",
            "Remove these lines, or give the files as they were.",
        )


def _check_no_swallowed_rows(part: Part, delimiter: str) -> None:
    """Raise DataError if a cell of several lines holds rows: a quote at the start of a text opened
    it, and one at the end of another text closed it."""
    names = part.table.column_names
    # The values of the first and of the last column, if they are few.
    few = min(_MOST_CLASSES, part.table.num_rows // 2)
    begins, ends = (
        {*(part.distinct(name, few) or ())} - {"", None} for name in (names[0], names[-1])
    )
    for index, name in enumerate(names):
        spans = np.flatnonzero(pc.match_substring(part.table[name], "\n").to_numpy())
        for row in spans[:_SAMPLE_ROWS].tolist():
            pieces = part.table[name][row].as_py().split("\n")
            cells = [piece.split(delimiter) for piece in pieces]
            widths = [len(names) - index, *[len(names)] * (len(cells) - 2), index + 1]
            if [len(piece) for piece in cells] != widths:
                continue
            is_begun = index > 0 and all(piece[0] in begins for piece in cells[1:])
            is_ended = index < len(names) - 1 and all(piece[-1] in ends for piece in cells[:-1])
            if is_begun or is_ended:
                raise DataError(
                    f"{part.where(row)} begins a cell of several lines in quotes, and these lines "
                    f"look like rows: {pieces[1][:60]!r}. The file can be read either way.",
                    'Put texts that begin or end with a quote in quotes, and write it twice ("").',
                )


def _check_quotes(path: Path, sample: Sequence[str], delimiter: str) -> None:
    """Raise DataError if cells are in single quotes, or in quotes after a blank: these would be
    parts of texts and labels."""
    rows, others = (
        [row for row in csv.reader(sample, delimiter=delimiter, skipinitialspace=skips) if row]
        for skips in (False, True)
    )
    columns, unquoted_columns = (zip(*parsed[1:], strict=False) for parsed in (rows, others))
    for cells, unquoted in zip(columns, unquoted_columns, strict=False):
        filled = [cell for cell in cells if cell]
        if len(filled) > _FEW_CELLS and all(map(_SINGLE_QUOTED.fullmatch, filled)):
            raise DataError(
                f"{path} has cells in single quotes, such as {filled[0][:60]}.",
                "Write it with double quotes.",
            )
        pairs = zip(cells, unquoted, strict=False)
        changed = [cell for cell, other in pairs if cell != other and cell.strip() == f'"{other}"']
        if changed and len(changed) == len(filled):
            raise DataError(
                f"{path} has a blank between a delimiter and a quote, as in {changed[0][:60]!r}.",
                "Write it without blanks after the delimiters.",
            )


def _read_quickly(
    path: Path, delimiter: str, quoted: bool, names: Sequence[str], first: list[Row]
) -> Iterator[Block]:
    """Yield all rows as `_rows` reads them, some megabytes at a time.

    Args:
        quoted: Whether a field may be in double quotes.
        first: Some rows that were read row by row, to compare with.

    Raises:
        NotPlain: The text has to be read row by row.
    """
    rest, line, expected = b"", 1, first
    with open_bytes(path) as stream:
        while True:
            read = stream.read(_BLOCK)
            block = rest + read
            if line == 1:
                block = block.removeprefix(codecs.BOM_UTF8)
            if not read and block and not block.endswith(b"\n"):
                block += b"\n"
            if not block:
                break
            ends, breaks = _row_ends(block, delimiter, quoted)
            if not len(ends):
                if not read or len(block) > 8 * _BLOCK:
                    raise NotPlain
                rest = block
                continue
            whole, rest = block[: ends[-1] + 1], block[ends[-1] + 1 :]
            try:
                table = arrow_csv.read_csv(
                    pa.BufferReader(whole),
                    arrow_csv.ReadOptions(column_names=list(names), block_size=len(whole) + 1),
                    arrow_csv.ParseOptions(
                        delimiter=delimiter, quote_char='"' if quoted else False,
                        newlines_in_values=quoted, ignore_empty_lines=False,
                    ),
                    arrow_csv.ConvertOptions(
                        column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
                    ),
                )  # fmt: skip
            except (pa.ArrowInvalid, pa.ArrowKeyError) as error:
                raise NotPlain from error
            if table.num_rows != len(ends):
                raise NotPlain
            lines = line + np.searchsorted(breaks, np.append(0, ends[:-1] + 1))
            line += int(np.searchsorted(breaks, len(whole)))
            lengths = [pc.equal(pc.binary_length(column), 0) for column in table.columns]
            is_row = pc.invert(functools.reduce(pc.and_, lengths))
            if not pc.all(is_row).as_py():
                table, lines = table.filter(is_row), lines[is_row.to_numpy()]
            columns = (column.to_pylist() for column in table.slice(0, len(expected)).columns)
            cells = map(list, zip(*columns, strict=True))
            compared = list(zip(lines.tolist(), cells, strict=False))
            if compared != expected[: len(compared)]:
                raise NotPlain
            expected = expected[len(compared) :]
            yield table, lines
            if not read:
                break
    if expected:
        raise NotPlain


def _row_ends(block: bytes, delimiter: str, quoted: bool) -> tuple[Bytes, Bytes]:
    """Return the ends of the rows and of the lines of a block, which begins with a row."""
    # The end of a block may cut \\r\\n in two.
    if b"\0" in block or block.count(b"\r") != block.count(b"\r\n") + block.endswith(b"\r"):
        raise NotPlain
    # Arrow counts an empty line as a row, which it is not.
    if block.startswith((b"\n", b"\r")) or b"\n\n" in block or b"\n\r" in block:
        raise NotPlain
    octets = np.frombuffer(block, np.uint8)
    breaks = np.flatnonzero(octets == ord("\n"))
    if not quoted or b'"' not in block:
        return breaks, breaks
    quotes = np.flatnonzero(octets == ord('"'))
    opening, closing = quotes[::2], quotes[1::2]
    # The characters before an opening quote and after a closing one; a doubled quote counts as
    # both.
    around = np.zeros(256, dtype=bool)
    around[[ord(delimiter), ord("\n"), ord("\r"), ord('"')]] = True
    before = octets[opening[opening > 0] - 1]
    behind = octets[closing[closing < len(octets) - 1] + 1]
    if not around[before].all() or not around[behind].all() or (before == ord("\r")).any():
        raise NotPlain
    # A row ends where all quotes are closed.
    return breaks[np.searchsorted(quotes, breaks) % 2 == 0], breaks


def _rows(path: Path, encoding: str, delimiter: str, quote: str | None) -> Generator[Row]:
    """Yield each row's first line and its cells; all rows have as many cells as the first."""
    width = None
    csv.field_size_limit(_LONGEST_FIELD)
    with open_text(path, encoding) as stream:
        reader = _cells(stream, delimiter, quote, strict=True)
        while True:
            line = reader.line_num + 1
            try:
                cells = next(reader, None)
                if quote == "'" and cells and reader.line_num > line:
                    raise csv.Error("it has several lines in single quotes")
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
                    "Put a text that holds the delimiter in double quotes, and give the first row "
                    "as many names as the others have fields.",
                )
            yield line, cells


@functools.cache
def _header_names() -> frozenset[str]:
    """Return normalized names of columns that make a row the header.

    Names of one letter, and some others, are more likely values of a row.
    """
    known_names = names_of_samples()
    single = {name for name in known_names.single if len(name) > 1}
    return frozenset(single.union(*known_names.pairs, IDENTIFIERS, _SPLITS) - _VALUES)


def names_columns(cells: Sequence[str]) -> bool:
    """Return whether one of the cells is a name by which a row is known as a header."""
    return not _header_names().isdisjoint(map(normalize_name, cells))


def _header(path: Path, rows: list[list[str]], has_header: HeaderHint) -> list[str] | None:
    """Return the first row if it names columns: by known names, or because the user says so."""
    # Columns without a name get the names that pandas gives them, and further ones of a name, too.
    cells = [cell.strip() or f"Unnamed: {index}" for index, cell in enumerate(rows[0])]
    names: list[str] = []
    for cell in cells:
        further = (f"{cell}.{number}" for number in itertools.count(1))
        names.append(next(name for name in itertools.chain([cell], further) if name not in names))
    if not isinstance(has_header, bool) and has_header & {*names}:
        return names
    known = set(map(normalize_name, names))
    has_texts = any(set(map(normalize_name, pair)) <= known for pair in PAIRS)
    has_texts = has_texts or bool(known & _TEXTS) or _resemble(TEXT, names)
    is_certain = has_texts and (bool(known & _LABELS) or _resemble(LABEL, names))
    words = {name.lower() for name in names}
    is_certain |= bool(words & column_words.QUESTIONS and words & column_words.ANSWERS)
    is_certain |= len(known & _header_names()) > 1 and not any(map(is_number, cells))
    if has_header is False:
        if is_certain:
            raise DataError(
                f"The first row of {path} names columns, and header=false is given.",
                "Give all files such a row, and leave out header.",
            )
        return None
    if has_header is True or (is_certain and len(names) > 1):
        return names
    if len(names) == 1:
        return names if known & _header_names() else None
    # If files were concatenated, the header is repeated further down (see `_read_rows`).
    others = [row for row in rows[1:] if row != rows[0]]
    below = [set(column) for column in zip(*others, strict=True)]
    repeated = any(name in values for name, values in zip(names, below, strict=False))
    # pandas calls columns without names 0, 1, 2.
    positions = [cell for cell in rows[0] if cell.strip()]
    are_positions = positions == [str(index) for index in range(len(positions))] and not all(
        is_number(cell) for row in others[:1] for cell in row
    )
    if any(map(is_number, cells)) and not are_positions:
        return None
    # pandas writes indices without a name, and called Unnamed: 0 when it has read them.
    is_row = repeated or len({*map(str.strip, positions)}) < len(positions)
    numbered = {f"column_{index}" for index in range(len(names))}
    if is_row and not isinstance(has_header, bool) and has_header & numbered:
        return None  # the user names columns of a file without a header
    plain = {*map(column_words.plain_word, names)} & column_words.KNOWN
    nouns = {name: column_words.words_of(name)[-1] for name in names}
    count = sum(
        noun in column_words.KNOWN and (len(name.split()) <= _WORDS_OF_NAMES or "_" in noun)
        for name, noun in nouns.items()
    )
    is_header = (
        bool(known & _header_names())
        or sum(len(name) > _LETTERS or not name.isascii() for name in plain) >= _FEWEST_NAMES
        or max(_FEWEST_NAMES, len(names) / 2) <= count
    )
    if is_row or are_positions or not is_header:
        raise UnclearHeader(path, names)
    return names


def _resemble(column: Column, names: Sequence[str]) -> bool:
    return any(len(name.split()) <= _WORDS_OF_NAMES and column.is_like(name) for name in names)
