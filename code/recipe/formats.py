"""One data file to one Arrow table, its format found by looking at its bytes.

Delimited text, JSON and JSON Lines are read row by row, so that an error names file and line.
"""

from __future__ import annotations

import csv
import functools
import gzip
import io
import itertools
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from recipe.errors import DataError
from recipe.names import LABEL_NAMES, TEXT, TEXT_NAMES, plain

DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
_CHUNK_ROWS = 50_000
_SAMPLE_ROWS = 1_000
_LONGEST_FIELD = 100_000_000  # characters; the csv module's own limit of 131,072 is a long article
_Row = tuple[int, list[str]]
_DELIMITED_SUFFIXES = (".csv", ".tsv", ".tab")


@dataclass(frozen=True, kw_only=True)
class Part:
    """The rows of one file or Arrow folder."""

    path: Path
    format: str
    """What it turned out to be, as shown to the user: `csv (semicolon)`, `parquet` ..."""
    table: pa.Table
    lines: Sequence[int] | None = None
    """Line of each row in the file, from 1; None for binary formats."""
    class_names: Mapping[str, list[str]] = field(default_factory=dict)
    """Names of the classes of each column of ClassLabels, or of lists of them."""

    def where(self, row: int) -> str:
        """The place of row number `row` (from 0), for messages: `train.csv line 7`."""
        if self.lines is None:
            return f"{self.path} row {row}"
        return f"{self.path} line {self.lines[row]}"


def is_arrow_folder(path: Path) -> bool:
    """Whether `path` is what `Dataset.save_to_disk` writes."""
    return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()


def read(path: Path, lone_column: bool = False) -> Part:
    """The rows of a file, or of a folder written by `Dataset.save_to_disk`.

    Args:
        lone_column: Whether delimited text may have one column only.

    Raises:
        DataError: the format is not known, or a row cannot be read (with its line).
    """
    if path.is_dir():
        return _read_arrow_folder(path)
    with path.open("rb") as stream:
        head = stream.read(8)
    if head.startswith(b"PAR1"):
        return _read_binary(path, "parquet", _read_parquet)
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return _read_binary(path, "arrow", _read_arrow)
    return _read_text(path, functools.partial(_read_decoded, lone_column=lone_column))


def read_texts(path: Path, sample_by: str) -> Part:
    """The texts of a plain text file as rows of the column `text`.

    Args:
        sample_by: `line` (empty ones left out), `paragraph` (between empty lines) or `document`
            (all of it).

    Raises:
        DataError: it cannot be read (with its line).
    """
    return _read_text(path, functools.partial(_read_plain, sample_by=sample_by))


def _read_plain(path: Path, encoding: str, sample_by: str) -> Part:
    with _open(path, encoding) as stream:
        lines = list(enumerate(stream.read().replace("\r\n", "\n").split("\n"), 1))
    groups = [lines] if sample_by == "document" else [[line] for line in lines]
    if sample_by == "paragraph":
        by_kind = itertools.groupby(lines, key=lambda line: bool(line[1].strip()))
        groups = [list(group) for _, group in by_kind]
    texts = ["\n".join(text for _, text in group) for group in groups]
    kept = [number for number, text in enumerate(texts) if text.strip()]
    column = pa.array([texts[number].strip("\n") for number in kept], pa.large_string())
    return Part(
        path=path,
        format=f"txt (a text is a {sample_by})",
        table=pa.table({TEXT: column}),
        lines=[groups[number][0][0] for number in kept],
    )


def _read_arrow_folder(path: Path) -> Part:
    try:
        dataset = datasets.load_from_disk(str(path))
        table = dataset.with_format("arrow")[:]
    except Exception as error:  # Of a damaged file, datasets and pyarrow raise all kinds.
        raise DataError(f"Data set {path} cannot be read: {error}.", _REWRITE) from error
    return Part(
        path=path, format="save_to_disk", table=table, class_names=_classes(dataset.features)
    )


_REWRITE = "Write it again, or check that the upload is complete."


def _read_binary(path: Path, name: str, reader: Callable[[Path], pa.Table]) -> Part:
    try:
        table = reader(path)
        table.validate(full=True)
        features = datasets.Features.from_arrow_schema(table.schema)
    except Exception as error:  # Of a damaged file, datasets and pyarrow raise all kinds.
        raise DataError(f"{path} is no readable {name} file: {error}.", _REWRITE) from error
    return Part(path=path, format=name, table=table, class_names=_classes(features))


def _read_parquet(path: Path) -> pa.Table:
    return pq.ParquetFile(path).read()


def _read_arrow(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as source:
        try:
            return pa.ipc.open_stream(source).read_all()
        except pa.ArrowInvalid:
            return pa.ipc.open_file(source).read_all()


def _classes(features: Mapping[str, Any]) -> dict[str, list[str]]:
    single = {name: getattr(feature, "feature", feature) for name, feature in features.items()}
    return {
        name: list(feature.names)
        for name, feature in single.items()
        if isinstance(feature, datasets.ClassLabel)
    }


def _read_text(path: Path, read_decoded: Callable[[Path, str], Part]) -> Part:
    try:
        return _read_encoded(path, read_decoded)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is no readable gzip file: {error}.", _REWRITE) from error


def _read_encoded(path: Path, read_decoded: Callable[[Path, str], Part]) -> Part:
    encoding = _encoding(path)
    try:
        return read_decoded(path, encoding)
    except UnicodeDecodeError as error:
        line = _undecodable_line(path, encoding)
        raise DataError(
            f"{path} line {line} is not {encoding.removesuffix('-sig')}: {error.reason}.",
            "Convert the file, for example by iconv -f WINDOWS-1252 -t UTF-8.",
        ) from error


def _read_decoded(path: Path, encoding: str, lone_column: bool) -> Part:
    with _open(path, encoding) as stream:
        start = stream.read(4096).lstrip()[:1]
    suffixes = [suffix.lower() for suffix in path.suffixes]
    delimited = any(suffix in _DELIMITED_SUFFIXES for suffix in suffixes)
    if start == "[" and not delimited:
        return _read_json(path, encoding)
    if start == "{" and not delimited:
        return _read_json_objects(path, encoding)
    return _read_delimited(path, encoding, lone_column)


def _open(path: Path, encoding: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(_open_bytes(path), encoding=encoding, newline="")


def _open_bytes(path: Path) -> io.BufferedReader:
    with path.open("rb") as stream:
        packed = stream.read(2) == b"\x1f\x8b"
    # GzipFile has what TextIOWrapper and a reader need of a BufferedReader.
    return gzip.open(path, "rb") if packed else path.open("rb")  # type: ignore[return-value]


def _encoding(path: Path) -> str:
    with _open_bytes(path) as stream:
        head = stream.read(2)
    return "utf-16" if head in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"


def _undecodable_line(path: Path, encoding: str) -> int:
    with _open_bytes(path) as stream:
        for number, line in enumerate(stream, 1):
            try:
                line.decode(encoding)
            except UnicodeDecodeError:
                return number
    return 1


def _read_json(path: Path, encoding: str) -> Part:
    with _open(path, encoding) as stream:
        text = stream.read()
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad_json(path, getattr(error, "lineno", 1), error) from error
    return _records(path, "json", _rows_of(document), lines=None)


def _rows_of(document: Any) -> list[Any]:
    """The rows in [row ...], {"data": [row ...]}, {"column": [value ...]} or pandas' to_json."""
    if isinstance(document, list):
        return document
    values = list(document.values())
    for value in values:
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            return value
    columns = [list(value.values()) if isinstance(value, dict) else value for value in values]
    if all(isinstance(column, list) for column in columns) and len(set(map(len, columns))) == 1:
        return [dict(zip(document, row, strict=True)) for row in zip(*columns, strict=True)]
    return [document]


def _read_json_objects(path: Path, encoding: str) -> Part:
    """One object on each line, or one object that is the whole file."""
    records, lines = [], []
    with _open(path, encoding) as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                records.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                if not records and ".json" in path.suffixes:
                    return _read_json(path, encoding)
                raise _bad_json(path, number, error) from error
            lines.append(number)
    if len(records) == 1 and len(_rows_of(records[0])) > 1:
        return _records(path, "json", _rows_of(records[0]), lines=None)
    return _records(path, "jsonl", records, lines)


def _bad_json(path: Path, line: int, error: Exception) -> DataError:
    # Besides, a number may have too many digits, or lists may be nested too deeply.
    said = str(error)
    if isinstance(error, json.JSONDecodeError):
        said = f"{error.msg} at column {error.colno}"
    return DataError(
        f"{path} line {line} is no valid JSON: {said}.", "Correct the line, or remove it."
    )


def _records(path: Path, name: str, records: list[Any], lines: list[int] | None) -> Part:
    part = Part(path=path, format=name, table=pa.table({}), lines=lines)
    for row, record in enumerate(records):
        if not isinstance(record, dict):
            raise DataError(
                f"{part.where(row)} is no object but {json.dumps(record)[:60]}.",
                'Write each row as {"text": "...", "label": "..."}.',
            )
    names = list(dict.fromkeys(key for record in records for key in record))
    try:
        table = pa.table({key: _column([each.get(key) for each in records]) for key in names})
    except UnicodeEncodeError as error:
        row = next(row for row, record in enumerate(records) if not _is_text(record))
        raise DataError(
            f"{part.where(row)} holds half of a surrogate pair (an escape such as \\ud83d alone).",
            "Write the character itself, or both escapes.",
        ) from error
    return Part(path=path, format=name, table=table, lines=lines)


def _is_text(record: Any) -> bool:
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _column(values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        # Values of several types, such as 1 and "1": as text, they still compare.
        return pa.array([value if value is None else _plain(value) for value in values])


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _read_delimited(path: Path, encoding: str, lone_column: bool) -> Part:
    delimiter = _delimiter(path, encoding, lone_column)
    try:
        return _read_rows(path, encoding, delimiter, csv.QUOTE_MINIMAL)
    except DataError:
        if delimiter != "\t":
            raise
        # Many tab-separated files are written without any quoting.
        return _read_rows(path, encoding, delimiter, csv.QUOTE_NONE)


def _delimiter(path: Path, encoding: str, lone_column: bool) -> str:
    """The delimiter that cuts the first rows into the same number (> 1) of fields most often."""
    with _open(path, encoding) as stream:
        sample = list(itertools.islice(stream, 200))
    best = max(DELIMITERS, key=lambda delimiter: _agreement(sample, delimiter))
    if _agreement(sample, best) > 0:
        return best
    if lone_column:
        return ","
    raise DataError(
        f"{path} is no CSV, TSV, JSON, JSON Lines, Parquet or Arrow file: no delimiter "
        f"({', '.join(DELIMITERS.values())}) cuts its lines into columns. It starts with "
        f"{''.join(sample[:1]).strip()[:60]!r}.",
        "Give each row a text and a label.",
    )


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
    for chunk in _chunks(body, rows):
        lines += [line for line, _ in chunk]
        columns = zip(*(cells for _, cells in chunk), strict=True)
        tables.append(pa.table({n: pa.array(c) for n, c in zip(names, columns, strict=True)}))
    schema = pa.schema([(name, pa.string()) for name in names])
    table = pa.concat_tables(tables) if tables else schema.empty_table()
    return Part(path=path, format=kind, table=table, lines=lines)


def _chunks(first: list[_Row], rest: Iterator[_Row]) -> Iterator[list[_Row]]:
    if first:
        yield first
    while chunk := list(itertools.islice(rest, _CHUNK_ROWS)):
        yield chunk


def _rows(path: Path, encoding: str, delimiter: str, quoting: int) -> Iterator[_Row]:
    """(line on which it starts, cells) for each row; all have as many cells as the first."""
    width = None
    csv.field_size_limit(_LONGEST_FIELD)
    with _open(path, encoding) as stream:
        reader = csv.reader(stream, delimiter=delimiter, quoting=quoting, strict=True)  # type: ignore[arg-type]
        line = 1
        try:
            for cells in reader:
                if any(cells):
                    width = width or len(cells)
                    _check_width(path, line, cells, width)
                    yield line, cells
                line = reader.line_num + 1
        except csv.Error as error:
            raise DataError(
                f"{path}: the row that starts on line {line} cannot be read: {error}.",
                'Close its quote; a quote inside a quoted field is written twice ("").',
            ) from error


def _check_width(path: Path, line: int, cells: list[str], width: int) -> None:
    if len(cells) != width:
        raise DataError(
            f"{path} line {line} has {len(cells)} fields where the first row has {width}: "
            f"{' | '.join(cells)[:80]!r}.",
            "Put a text that holds the delimiter in double quotes.",
        )


def _header(path: Path, rows: list[list[str]]) -> list[str] | None:
    """The first row, if it names columns: known names, or words that are no values further down."""
    names = [cell.strip() for cell in rows[0]]
    known = {plain(name) for name in names}
    if len(names) == 1:
        return names if known & set(TEXT_NAMES) else None
    if not (known & set(TEXT_NAMES) and known & set(LABEL_NAMES)):
        below = [set(column) for column in zip(*rows[1:], strict=True)]
        repeated = any(name in values for name, values in zip(names, below, strict=False))
        if repeated or len(set(names)) < len(names) or any(map(is_number, names)):
            return None
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(f"{path} has two columns called {twice[0]!r}.", "Rename one.")
    return names


def is_number(cell: str) -> bool:
    """Whether a cell of a text file is a number."""
    try:
        float(cell)
    except ValueError:
        return False
    return True
