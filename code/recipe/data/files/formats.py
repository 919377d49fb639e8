"""Read one data file into one Arrow table; its content decides its format.

FORMATS has a row for each format: how to recognise it, and what reads it. Messages about formats
and docs/DATA.md are made from it.
"""

from __future__ import annotations

import codecs
import dataclasses
import functools
import gzip
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from recipe.data.column_names import TEXT, word_columns
from recipe.data.files.conll import SUFFIXES, has_sentences, is_conll, read_conll
from recipe.data.files.delimited import is_table, read_delimited
from recipe.data.files.json_rows import read_json, read_json_objects
from recipe.data.files.part import HeaderHint, Part, usual_types
from recipe.data.files.spool import Spool, spooled_column
from recipe.data.files.text_files import (
    check_encoding,
    decoding_error,
    encoding_of,
    first_lines,
    open_bytes,
    open_text,
)
from recipe.data.files.workbooks import is_workbook, read_workbook
from recipe.errors import DataError, OutputError
from recipe.runtime import memory

_DELIMITED_SUFFIXES = (".csv", ".tsv", ".tab")
_JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
_JSON = re.compile(
    r"""\{\s*["'}]|\[\s*([{\["'\]]|(-?\d[-+.\deE]*|true|false|null|-?Infinity|NaN)\s*[,\]])"""
)


@dataclass(frozen=True, kw_only=True)
class Format:
    """A row of the table of formats."""

    name: str
    """Its usual name."""
    suffixes: str
    """The usual suffixes of its files; the content decides."""
    what: str
    """What is read, for docs/DATA.md."""
    is_one: Callable[[Path], bool]
    """Returns whether a file or folder has this format; the first such row of FORMATS is used."""
    read: Callable[[Path], Part] | None = None
    """None for those whose first row may name the columns."""


def read(path: Path, lone_column: bool = False, header: HeaderHint = frozenset()) -> Part:
    """Return the rows of a file, or of a folder written by `Dataset.save_to_disk`.

    Structs become columns with dotted names; categories and UTF-8 bytes become strings.

    Args:
        lone_column: Whether delimited text may have one column only.
        header: Whether its first row names the columns, or names by which it is known.

    Raises:
        DataError: the format is not known, or a row cannot be read (with its line).
    """
    if (kept := _kept.pop(_key(path, header), None)) is not None:
        return kept
    with memory.bounded(path):
        file_format = format_of(path)
        if file_format.read is not None:
            return _flat(file_format.read(path))
        if file_format.name == _WORKBOOK:
            return read_workbook(path, header)
        reader = functools.partial(
            read_delimited, lone_column=lone_column, others=known_formats(), header=header
        )
        return _read_text(path, reader)


_kept: dict[object, Part] = {}


def keep(part: Part, header: HeaderHint) -> None:
    """Keep a part for the next call of `read` with the same file and header: detecting the task
    reads the first file, and loading the data reads all."""
    _kept[_key(part.path, header)] = part


def _key(path: Path, header: HeaderHint) -> object:
    status = path.stat()
    return path, status.st_mtime_ns, status.st_size, header


def format_of(path: Path) -> Format:
    """Return the format of a file or folder."""
    return next(file_format for file_format in FORMATS if file_format.is_one(path))


def is_structured(path: Path, by_names: bool = False) -> bool:
    """Return whether a file has more structure than lines of text: another format, or delimited
    cells in (nearly) all lines.

    Args:
        by_names: Cells count only if the first line names a text and a label column.
    """
    return not is_delimited(path) or is_table(path, by_names)


def known_formats() -> str:
    """Return the names of the formats, for messages."""
    return ", ".join(file_format.name for file_format in FORMATS)


def read_tagged(path: Path, header: HeaderHint = frozenset()) -> Part:
    """Return the rows of a file like `read`, but read more text files as CoNLL with any tags: those
    without a known suffix, or with groups of lines with equally many cells between empty lines."""
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    names = re.split(r"[,;|\t\r\n\"]+", "".join(first_lines(path, 1)))
    is_plain = suffix in (".txt", ".text", "") or has_sentences(path)
    if is_plain and word_columns(names)[0] is None and is_delimited(path):
        with memory.bounded(path):
            return _flat(_read_text(path, read_conll))
    return read(path, header=header)


def read_texts(path: Path, sample_by: str) -> Part:
    """Return the texts of a plain text file as rows of the column `text`.

    Args:
        sample_by: `line` (without empty ones), `paragraph` (between empty lines) or `document`
            (the whole file).

    Raises:
        DataError: it cannot be read (with its line).
    """
    numbers: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]

    def texts(encoding: str) -> Iterator[list[str]]:
        # Other ends of lines, such as \\r, are characters of a text.
        with open_text(path, encoding, newline="\n") as stream:
            rows = (line.removesuffix("\n").removesuffix("\r") for line in stream)
            groups: Iterator[tuple[int, str]] = enumerate(rows, 1)
            if sample_by != "line":
                whole = sample_by == "document"
                by_text = itertools.groupby(groups, key=lambda line: whole or bool(line[1].strip()))
                joined = (tuple(zip(*group, strict=True)) for _, group in by_text)
                groups = ((lines[0], "\n".join(texts)) for lines, texts in joined)
            while some := list(itertools.islice(groups, _CHUNK_TEXTS)):
                kept = [(number, text) for number, text in some if text.strip()]
                numbers.append(np.array([number for number, _ in kept], np.int64))
                yield [text.strip("\n") for _, text in kept]

    def read_decoded(path: Path, encoding: str) -> Part:
        table = pa.table({TEXT: spooled_column(pa.large_string(), texts(encoding))})
        kind = f"txt (a text is a {sample_by})"
        return Part(path=path, format=kind, table=table, lines=np.concatenate(numbers))

    with memory.bounded(path):
        return _read_text(path, read_decoded)


_CHUNK_TEXTS = 10_000
_CHUNK_ROWS, _CHUNK_BYTES = 100_000, 1 << 26
_REWRITE = "Check that the upload is complete, or write the file again."


def _read_binary(path: Path, name: str) -> Part:
    try:
        if name == "save_to_disk":
            dataset = datasets.load_from_disk(str(path))
            table, features = dataset.with_format("arrow")[:], dataset.features
        elif name == "arrow":
            read_arrow = pa.ipc.open_file if _starts_with(b"ARROW1")(path) else pa.ipc.open_stream
            with pa.memory_map(str(path)) as source:
                table = usual_types(path, read_arrow(source).read_all())
        else:
            stored, run, size = pq.ParquetFile(path), list[int](), 0
            with Spool() as rows:
                rows.add(usual_types(path, stored.schema_arrow.empty_table()))
                for number in range(stored.num_row_groups):
                    run.append(number)
                    size += stored.metadata.row_group(number).total_byte_size
                    # Reading many row groups together keeps more of them in memory.
                    if size < _CHUNK_BYTES and number + 1 < stored.num_row_groups:
                        continue
                    for batch in stored.iter_batches(_CHUNK_ROWS, row_groups=run):
                        rows.add(usual_types(path, pa.Table.from_batches([batch])))
                    run, size = [], 0
                table = rows.table().replace_schema_metadata(stored.schema_arrow.metadata)
        if name != "save_to_disk":
            table.validate(full=True)
            features = datasets.Features.from_arrow_schema(table.schema)
    except (OutputError, DataError, MemoryError):
        raise
    except Exception as error:  # datasets and pyarrow raise any type of exception on damaged files.
        raise DataError(f"{path} cannot be read as {name}: {error}.", _REWRITE) from error
    return Part(path=path, format=name, table=table, class_names=class_names(features))


def class_names(features: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the class names of each column of ClassLabels, or of lists of them."""
    # `flatten` gives a feature within a struct the dotted name of its column.
    flat = datasets.Features(features).flatten()
    single = {name: getattr(feature, "feature", feature) for name, feature in flat.items()}
    return {
        name: list(feature.names)
        for name, feature in single.items()
        if isinstance(feature, datasets.ClassLabel)
    }


def _read_text(path: Path, read_decoded: Callable[[Path, str], Part]) -> Part:
    try:
        encoding = encoding_of(path)
        with open_bytes(path) as stream:
            head = stream.read(4096)
        begins = head.removeprefix(codecs.BOM_UTF8).lstrip()
        marks = (mark for mark in _NOT_READ if head.startswith(mark) or begins.startswith(mark))
        is_annotated = path.suffix in (".spacy", ".ann")
        kind = _ANNOTATED if is_annotated else _NOT_READ.get(next(marks, b""))
        kind = _PACKED if head[257:262] == b"ustar" else kind
        if kind or (b"\0" in head and not encoding.startswith(("utf-16", "utf-32"))):
            raise DataError(
                f"{path} is {kind or 'a binary file of a format that is not known'}.",
                _REMEDIES.get(kind or "")
                or f"Known formats are {known_formats()}. Write it in one of these formats, or "
                "remove it from the channel.",
            )
        check_encoding(path, encoding)
        try:
            return read_decoded(path, encoding)
        except UnicodeDecodeError as error:
            raise decoding_error(path, encoding, error) from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} cannot be read as gzip: {error}.", _REWRITE) from error


def _starts_with(*marks: bytes) -> Callable[[Path], bool]:
    def starts(path: Path) -> bool:
        if not path.is_file():
            return False
        with path.open("rb") as stream:
            return stream.read(8).startswith(marks)

    return starts


def _is_json(path: Path, character: str) -> bool:
    """Return whether a text file starts like JSON; a bracket may be a word of a text, or CoNLL."""
    suffixes = {suffix.lower() for suffix in path.suffixes}
    if suffixes & set(_DELIMITED_SUFFIXES):
        return False
    try:
        with open_text(path, encoding_of(path)) as stream:
            start = stream.read(4096).lstrip()
    except (UnicodeDecodeError, EOFError, OSError, zlib.error):
        return False
    if start[:1] != character or suffixes & set(_JSON_SUFFIXES):
        return start[:1] == character
    if not _JSON.match(start):
        return False
    try:
        json.loads(start.partition("\n")[0])
    except (ValueError, RecursionError):
        return not has_sentences(path)
    return True


def is_delimited(path: Path) -> bool:
    """Return whether a file has none of the formats before CSV in the table."""
    return format_of(path) is FORMATS[-1]


_PACKED, _ANNOTATED = "packed", "of annotations (spaCy, BRAT, WebAnno)"
_WORKBOOK = "Workbook"
_POINTER = "a pointer of Git LFS, not the file"
_MARKED = "of lines of fastText and BlazingText"
_NOT_READ = {
    **dict.fromkeys(
        (b"PK\x03\x04", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf", b"Rar!"), _PACKED
    ),
    b"#FORMAT=": _ANNOTATED,
    b"__label__": _MARKED,
    b"Obj\x01": "an Avro file",
    b"ORC": "an ORC file",
    b"\x0a\x23\xd7\xce": "a RecordIO file",
    b"SQLite format 3\0": "an SQLite database",
    b"\x89HDF": "an HDF5 file",
    b"%PDF": "a PDF file",
    b"\x93NUMPY": "a NumPy array",
    b"\x80\x04\x95": "a pickled Python object",
    b"\x1f\x8b": "packed by gzip twice",
    b"version https://git-lfs": _POINTER,
}
"""Files that are not read, by their first bytes."""
_REMEDIES = {
    _POINTER: "Fetch the file: git lfs pull",
    _PACKED: "Unpack it, or pack it by gzip.",
    _ANNOTATED: "Write a row for each text into a file with the suffix .jsonl: "
    '{"text": "Ada sat", "entities": [[0, 3, "PER"]]}',
    _MARKED: "For text-classification, write JSON Lines (and give label_separator=; if lines have "
    "several labels): python -c 'import json, re, sys; [print(json.dumps({"
    '"label": ";".join(re.findall(r"__label__([^\\s,]+)", line)), '
    '"text": re.sub(r"^\\W*(__label__\\S+[\\s,]*)+", "", line.strip())})) for line in sys.stdin]\' '
    "< train.txt > train.jsonl",
}

FORMATS: Sequence[Format] = (
    Format(
        name="save_to_disk",
        suffixes="a folder",
        what="`Dataset.save_to_disk`, `DatasetDict.save_to_disk`",
        is_one=Path.is_dir,
        read=functools.partial(_read_binary, name="save_to_disk"),
    ),
    Format(
        name="Parquet",
        suffixes=".parquet",
        what="with the class names of the `datasets` library",
        is_one=_starts_with(b"PAR1"),
        read=functools.partial(_read_binary, name="parquet"),
    ),
    Format(
        name="Arrow",
        suffixes=".arrow, .feather",
        what="files and streams, with the class names of the `datasets` library",
        is_one=_starts_with(b"ARROW1", b"\xff\xff\xff\xff"),
        read=functools.partial(_read_binary, name="arrow"),
    ),
    Format(
        name="JSON",
        suffixes=".json",
        what='`[row, ...]`, `{"data": [row, ...]}`, `{"id1": row, ...}`',
        is_one=lambda path: _is_json(path, "["),
        read=lambda path: _read_text(path, read_json),
    ),
    Format(
        name="JSON Lines",
        suffixes=".jsonl, .ndjson, .json",
        what="an object on each line",
        is_one=lambda path: _is_json(path, "{"),
        read=lambda path: _read_text(path, read_json_objects),
    ),
    Format(
        name="CoNLL",
        suffixes=", ".join(SUFFIXES),
        what="a word and its tags on each line, an empty line after each sentence; for "
        "`task=token-classification`",
        is_one=is_conll,
        read=lambda path: _read_text(path, read_conll),
    ),
    Format(
        name=_WORKBOOK,
        suffixes=".xlsx, .xls, .ods",
        what="its only sheet with rows",
        is_one=is_workbook,
    ),
    Format(
        name="CSV",
        suffixes=".csv, .tsv, .txt, none",
        what="comma, semicolon, tab or bar; with a header or without; quoted or not; UTF-8, "
        "UTF-16 or `encoding=`; text may be packed by gzip",
        is_one=lambda path: True,
    ),
)


def _decimals(numbers: pa.Array) -> pa.Array:
    """Return floats of 16 or 32 bits as the shortest decimals that round to them: a class 3.1 would
    become 3.0999999. Whole numbers stay as they are."""
    exact = pc.cast(numbers, pa.float64())
    if pa.types.is_float16(numbers.type):
        texts = numbers.to_numpy(zero_copy_only=False).astype(str)
        numbers = pa.array(texts, mask=numbers.is_null().to_numpy(zero_copy_only=False))
    shortest = pc.cast(pc.cast(numbers, pa.string()), pa.float64())
    return pc.if_else(pc.equal(pc.floor(exact), exact), exact, shortest)


def _flat(part: Part) -> Part:
    """Return the part without structs, short floats and bytes that are UTF-8."""
    table = part.table
    while any(pa.types.is_struct(kind) for kind in table.schema.types):
        flat = table.flatten()
        # A column that exists already keeps its name.
        kept = [
            position
            for position, name in enumerate(flat.column_names)
            if name not in flat.column_names[:position]
        ]
        table = flat.select(kept)
    for index, field in enumerate(table.schema):
        column = table.column(index)
        if pa.types.is_float32(column.type) or pa.types.is_float16(column.type):
            column = spooled_column(pa.float64(), map(_decimals, column.chunks))
        if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
            try:
                column = pc.cast(column, pa.large_string())
            except pa.ArrowInvalid:
                continue
        if column is not table.column(index):
            table = table.set_column(index, field.name, column)
    return part if table is part.table else dataclasses.replace(part, table=table)
