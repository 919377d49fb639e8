"""Read JSON and JSON Lines into an Arrow table, some rows at a time; errors name the line."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recipe.console import say
from recipe.data.column_names import LABEL, SPLIT_COLUMN, TEXT, split_of
from recipe.data.files import records
from recipe.data.files.part import Part, open_text, token_data
from recipe.errors import DataError
from recipe.runtime import memory
from recipe.spec import MESSAGES_NAMES

_METADATA = "-metadata"
_SURROGATE = re.compile("[\ud800-\udfff]")
_LINES = (".jsonl", ".ndjson")
_OF_FILES = ("data", "rows", "records", "examples", "instances", "items", "samples")
"""Keys that hold a list of all rows."""
_OF_ROWS = (
    *MESSAGES_NAMES,
    *("entities", "spans", "annotations", "paragraphs", "qas", "answers", "chosen", "rejected"),
)
"""Keys whose lists of records belong to one row."""
_ROWS_AT_ONCE, _CHARACTERS_AT_ONCE = 10_000, 1 << 22
_TIMES_CHARACTERS = 8
"""Bytes of memory for each character of a document that is read whole, rows included (measured)."""


@dataclass(frozen=True)
class _Block:
    """Some rows, as Python objects."""

    values: list[Any]
    lines: list[int] | None
    """The line of each; None where rows are not lines."""


Read = Callable[[], Iterator[_Block]]
"""Each call reads all rows from the first one on."""


def read_json(path: Path, encoding: str) -> Part:
    """Return the rows of one JSON document.

    Raises:
        DataError: it is not JSON, or does not hold rows (with its line).
    """
    with open_text(path, encoding) as stream:
        text = stream.read()
    _tell_if_short(path, len(text))
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad_json(path, getattr(error, "lineno", 1), error) from error
    rows = _rows_of(path, document)
    return _part(path, "json", lambda: iter([_Block(rows, None)]))


def _rows_of(path: Path, document: Any) -> list[Any]:
    """Return the rows of [row ...], {"data": [row ...]}, {"train": [row ...], "test": [row ...]},
    {"column": [value ...]} or pandas' to_json; or the document as the only row, such as one
    conversation, or the only line of a .jsonl file."""
    if isinstance(document, list):
        return document
    values = list(document.values())
    splits = {key: _columns_of_split(key, value) for key, value in document.items()}
    tables = {
        key: value
        for key, value in splits.items()
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
    }
    columns = [list(value.values()) if isinstance(value, dict) else value for value in values]
    are_columns = (
        all(isinstance(column, list) for column in columns) and len(set(map(len, columns))) == 1
    )
    is_line = path.suffix.lower() in _LINES
    if are_columns and not is_line and len(columns[0]) > 1 and len(tables) < len(columns):
        return _rows_of_columns(document, columns)
    if any(key in _OF_ROWS for key in tables) or (
        is_line and not any(key in _OF_FILES or split_of(key) is not None for key in tables)
    ):
        return [document]
    if len(tables) == 1:
        return next(iter(tables.values()))
    if tables:
        if unnamed := [key for key in tables if split_of(key) is None]:
            raise DataError(
                f"{path} holds several lists of rows, {', '.join(tables)}, and {unnamed[0]!r} "
                "names no split.",
                "Keep one list, or call them train, validation and test.",
            )
        return [{**row, SPLIT_COLUMN: key} for key, rows in tables.items() for row in rows]
    return _rows_of_columns(document, columns) if are_columns else [document]


def _columns_of_split(key: str, value: Any) -> Any:
    """Return the rows of {"train": {"column": [value ...]}}; other values unchanged."""
    if not isinstance(value, dict) or split_of(key) is None:
        return value
    columns = list(value.values())
    are_columns = all(isinstance(column, list) for column in columns)
    is_table = are_columns and len(set(map(len, columns))) == 1
    return _rows_of_columns(value, columns) if is_table else value


def _rows_of_columns(names: Iterable[str], columns: Sequence[list[Any]]) -> list[Any]:
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def read_json_objects(path: Path, encoding: str) -> Part:
    """Return the rows of a file with an object on each line, or of one object.

    Raises:
        DataError: a line is not a JSON object (with its number).
    """
    if ".json" in path.suffixes and not _is_on_a_line(path, encoding):
        return read_json(path, encoding)
    blocks = _objects(path, encoding)
    first = next(blocks, _Block([], []))
    is_only = len(first.values) == 1 and next(blocks, None) is None
    if is_only and len(rows := _rows_of(path, first.values[0])) > 1:
        return _part(path, "json", lambda: iter([_Block(rows, None)]))
    return _part(path, "jsonl", lambda: _objects(path, encoding))


def _is_on_a_line(path: Path, encoding: str) -> bool:
    """Return whether the first line that is not empty is JSON by itself."""
    with open_text(path, encoding) as stream:
        line = next((line for line in stream if line.strip()), "")
        _tell_if_short(path, len(line))  # it may be the whole document
        try:
            json.loads(line)
        except (ValueError, RecursionError):
            return False
    return True


def _tell_if_short(path: Path, characters: int) -> None:
    """Log a warning if a document, which is read whole, may need more memory than is free: a killed
    process cannot report it."""
    free, needed = memory.available(), _TIMES_CHARACTERS * characters
    if free is not None and needed > free:
        say(
            f"warning: {path} ({characters / 1e6:.0f} MB of characters), one JSON document, takes "
            f"about {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free. If the job "
            "is killed, use an instance with more memory, or write a row on each line."
        )


def _objects(path: Path, encoding: str) -> Iterator[_Block]:
    """Yield the values on the lines of a file, some thousands or some megabytes at a time.

    Raises:
        DataError: a line is not JSON (with its number).
    """
    values, lines, size = list[Any](), list[int](), 0
    with open_text(path, encoding) as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                values.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise _bad_json(path, number, error) from error
            lines.append(number)
            size += len(line)
            if len(lines) == _ROWS_AT_ONCE or size > _CHARACTERS_AT_ONCE:
                yield _Block(values, lines)
                values, lines, size = [], [], 0
    if lines:
        yield _Block(values, lines)


def _bad_json(path: Path, line: int, error: Exception) -> DataError:
    # Besides, a number may have too many digits, or lists may be nested too deeply.
    reason = str(error)
    if isinstance(error, json.JSONDecodeError):
        reason = f"{error.msg} at column {error.colno}"
    return DataError(
        f"{path} line {line} is not valid JSON: {reason}.", "Correct the line, or remove it."
    )


def _part(path: Path, name: str, read: Read) -> Part:
    """Return the rows that `read` yields."""
    begun = read()
    first = next(begun, _Block([], [] if name == "jsonl" else None))
    head = _objects_of(path, first, 0)[:1]
    if any(_METADATA in key for key in itertools.chain(*head)) or ".manifest" in path.suffixes:
        name, read = "Ground Truth manifest", _ground_truth_reader(path, read)
        begun = read()
        first = next(begun, first)
    # Continue the pass that found the types; if types change, the rows are read again.
    passes = itertools.chain([itertools.chain([first], begun)], (read() for _ in itertools.count()))
    starts: list[Any] = []

    def objects() -> Iterator[list[dict[str, Any]]]:
        row = 0
        starts.clear()
        for block in next(passes):
            yield _objects_of(path, block, row)
            row += len(block.values)
            if block.lines is not None:
                starts.append(np.asarray(block.lines, np.int64))

    try:
        made = records.concat_blocks(objects)
    except UnicodeEncodeError as error:
        of_rows = ((block, index) for block in read() for index in range(len(block.values)))
        where = next(
            f"row {row}" if block.lines is None else f"line {block.lines[index]}"
            for row, (block, index) in enumerate(of_rows)
            if _SURROGATE.search(json.dumps(block.values[index], ensure_ascii=False))
        )
        raise DataError(
            f"{path} {where} holds half of a surrogate pair (an escape such as \\ud83d alone).",
            "Write the character itself, or both escapes.",
        ) from error
    part = Part(
        path=path,
        format=name,
        table=made.table,
        lines=None if first.lines is None else np.concatenate([np.empty(0, np.int64), *starts]),
    )
    return dataclasses.replace(part, mixed={k: part.where(row) for k, row in made.mixed.items()})


def _objects_of(path: Path, block: _Block, first: int) -> list[dict[str, Any]]:
    """Return the rows of a block, whose first row has the number `first`.

    Raises:
        DataError: one is not an object.
    """
    objects = []
    for index, value in enumerate(block.values):
        # As in spaCy's examples: a text and its annotations.
        if isinstance(value, list) and [type(item) for item in value] == [str, dict]:
            value = {TEXT: value[0], **value[1]}
        if not isinstance(value, dict):
            raise DataError(
                f"{_row_location(path, block, index, first)} is not an object, but "
                f"{json.dumps(value)[:60]}.",
                'Write each row as {"text": "...", "label": "..."}.',
            )
        objects.append(value)
    return objects


def _row_location(path: Path, block: _Block, index: int, first: int) -> str:
    """Return the location of a row of a block whose first row has the number `first`, for
    messages."""
    return (
        f"{path} row {first + index}"
        if block.lines is None
        else f"{path} line {block.lines[index]}"
    )


def _ground_truth_reader(path: Path, read: Read) -> Read:
    """Return a reader of the rows of an augmented manifest: `source` becomes `text`, and each
    attribute its class names.

    If a row has one attribute, that is also its `label`.
    """

    def labelled() -> Iterator[_Block]:
        row = 0
        for block in read():
            yield _Block(_labelled(path, block, row), block.lines)
            row += len(block.values)

    return labelled


def _labelled(path: Path, block: _Block, first: int) -> list[Any]:
    """Return some rows of an augmented manifest; the first one has the number `first`.

    Raises:
        DataError: a row has no text, or labels of spans.
    """
    rows = []
    for index, record in enumerate(_objects_of(path, block, first)):
        where = _row_location(path, block, index, first)
        if "source" not in record and "source-ref" in record:
            raise DataError(
                f"{where} does not hold a text, but the location of one: {record['source-ref']}.",
                "Write the texts themselves, as source.",
            )
        row = {
            key: value
            for key, value in record.items()
            if key != "source" and not key.endswith(_METADATA)
        }
        attributes = [key for key in record if f"{key}{_METADATA}" in record]
        for attribute in attributes:
            about = record.get(f"{attribute}{_METADATA}") or {}
            if "text-span" in str(about.get("type")):
                raise token_data(where, f"{attribute} labels spans of the text")
            names = list((about.get("class-map") or {}).values())
            row[attribute] = about.get("class-name", names or record.get(attribute))
            if "failure-reason" in about:
                row[attribute] = None
        if len(attributes) == 1 and LABEL not in row:
            row[LABEL] = row[attributes[0]]
        rows.append({TEXT: record.get("source"), **row})
    return rows
