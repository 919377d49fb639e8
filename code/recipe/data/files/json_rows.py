"""Read JSON and JSON Lines into an Arrow table, some rows at a time; errors name the line."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recipe.data.column_names import LABEL, SPLIT_COLUMN, TEXT, split_of
from recipe.data.files import records
from recipe.data.files.part import Part, open_text
from recipe.errors import DataError
from recipe.spec import MESSAGES_NAMES, normalized
from recipe.task_table import names_of_samples

_METADATA, ENTITIES = "-metadata", "entities"
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


Block = tuple[list[Any], Sequence[int]]
"""Some rows, as Python objects, and the line of each; or its number in a document."""
Read = Callable[[], Iterator[Block]]
"""Each call reads all rows from the first one on."""


def read_json(path: Path, encoding: str) -> Part:
    """Return the rows of one JSON document.

    Raises:
        DataError: it is not JSON, or does not hold rows (with its line).
    """
    with open_text(path, encoding) as stream:
        text = stream.read()
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad_json(path, getattr(error, "lineno", 1), error) from error
    rows = _rows_of(path, document)
    return _part(path, "json", lambda: iter([(rows, range(len(rows)))]))


def _rows_of(path: Path, document: Any) -> list[Any]:
    """Return the rows of [row ...], {"data": [row ...]}, {"train": [row ...], "test": [row ...]},
    {"column": [value ...]} or pandas' to_json; or the document as the only row, such as one
    conversation, or the only line of a .jsonl file."""
    if isinstance(document, list):
        return document
    if document.keys() == {"columns", "index", "data"}:
        names, rows = document["columns"], document["data"]
        are_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
        are_rows = isinstance(rows, list) and all(isinstance(row, list) for row in rows)
        if are_names and are_rows and {len(set(names)), *map(len, rows)} == {len(names)}:
            return [dict(zip(names, row, strict=True)) for row in rows]
        raise DataError(
            f"{path} has the keys columns, index and data, as pandas' orient='split', but not the "
            "names of different columns, and lists with a value for each.",
            "Write it by to_json(path, orient='records').",
        )
    if _are_rows_by_name(document):  # pandas, orient="index"
        return list(document.values())
    tables = {}
    for key, value in document.items():
        if isinstance(value, dict) and split_of(key) and _are_columns(value.values()):
            value = _rows_of_columns(value, value.values())
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            tables[key] = value
    columns = [
        list(value.values()) if isinstance(value, dict) else value for value in document.values()
    ]
    are_columns = _are_columns(columns)
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


def _are_rows_by_name(document: Mapping[str, Any]) -> bool:
    """Return whether the values are rows, whose columns have known names, and the keys have not."""
    records = list(document.values())
    if len(records) < 2 or not all(isinstance(record, dict) for record in records):
        return False
    known = names_of_samples().single.keys()
    if known & {*map(normalized, document)} or any(map(split_of, document)):
        return False
    return bool(known & {normalized(key) for record in records for key in record})


def _are_columns(values: Iterable[Any]) -> bool:
    columns = list(values)
    return all(isinstance(column, list) for column in columns) and len({*map(len, columns)}) == 1


def _rows_of_columns(names: Iterable[str], columns: Iterable[list[Any]]) -> list[Any]:
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def read_json_objects(path: Path, encoding: str) -> Part:
    """Return the rows of a file with an object on each line, or of one object.

    Raises:
        DataError: a line is not a JSON object (with its number).
    """
    if ".json" in path.suffixes:
        with open_text(path, encoding) as stream:
            line = next((line for line in stream if line.strip()), "")
        try:
            json.loads(line)
        except (ValueError, RecursionError):
            return read_json(path, encoding)
    blocks = _objects(path, encoding)
    first: Block = next(blocks, ([], []))
    is_only = len(first[0]) == 1 and next(blocks, None) is None
    if is_only and len(rows := _rows_of(path, first[0][0])) > 1:
        return _part(path, "json", lambda: iter([(rows, range(len(rows)))]))
    return _part(path, "jsonl", lambda: _objects(path, encoding))


def _objects(path: Path, encoding: str) -> Iterator[Block]:
    """Yield the values on the lines of a file, some thousands or some megabytes at a time."""
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
                yield values, lines
                values, lines, size = [], [], 0
    if lines:
        yield values, lines


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
    where = f"{path} {'line' if name == 'jsonl' else 'row'} "
    begun = read()
    first: Block = next(begun, ([], []))
    objects_of, head = _objects_of, _objects_of(where, first)[:1]
    if any(_METADATA in key for key in itertools.chain(*head)) or ".manifest" in path.suffixes:
        name, objects_of = "Ground Truth manifest", _labelled
    # Continue the pass that found the types; if types change, the rows are read again.
    passes = itertools.chain([itertools.chain([first], begun)], (read() for _ in itertools.count()))
    starts: list[Any] = [np.empty(0, np.int64)]

    def objects() -> Iterator[list[dict[str, Any]]]:
        del starts[1:]
        for block in next(passes):
            yield objects_of(where, block)
            starts.append(np.asarray(block[1], np.int64))

    try:
        table, mixed = records.concat_blocks(objects)
    except UnicodeEncodeError as error:
        line = next(
            line
            for block in read()
            for row, line in zip(objects_of(where, block), block[1], strict=True)
            if _SURROGATE.search(json.dumps(row, ensure_ascii=False))
        )
        raise DataError(
            f"{where}{line} holds half of a surrogate pair (an escape such as \\ud83d alone).",
            "Write the character itself, or both escapes.",
        ) from error
    lines = None if name == "json" else np.concatenate(starts)
    part = Part(path=path, format=name, table=table, lines=lines)
    return dataclasses.replace(part, mixed={k: part.where(row) for k, row in mixed.items()})


def _objects_of(where: str, block: Block) -> list[dict[str, Any]]:
    """Return the rows of a block. Raises DataError if one is not an object."""
    objects = []
    for value, line in zip(*block, strict=True):
        # As in spaCy's examples: a text and its annotations.
        if isinstance(value, list) and [type(item) for item in value] == [str, dict]:
            value = {TEXT: value[0], **value[1]}
        if not isinstance(value, dict):
            raise DataError(
                f"{where}{line} is not an object, but {json.dumps(value)[:60]}.",
                'Write each row as {"text": "...", "label": "..."}.',
            )
        objects.append(value)
    return objects


def _labelled(where: str, block: Block) -> list[dict[str, Any]]:
    """Return rows of an augmented manifest: `source` becomes `text`, and each attribute its class
    names; the only attribute of a row is also its `label`. Labelled spans become `entities`."""
    rows = []
    for record, line in zip(_objects_of(where, block), block[1], strict=True):
        if "source" not in record and "source-ref" in record:
            raise DataError(
                f"{where}{line} does not hold a text, but the location of one: "
                f"{record['source-ref']}.",
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
                row[ENTITIES] = _spans(f"{where}{line}", row.pop(attribute))
                continue
            names = list((about.get("class-map") or {}).values())
            row[attribute] = about.get("class-name", names or record.get(attribute))
            if "failure-reason" in about:
                row[attribute] = None
        if len(attributes) == 1 and ENTITIES not in row and LABEL not in row:
            row[LABEL] = row[attributes[0]]
        rows.append({TEXT: record.get("source"), **row})
    return rows


def _spans(where: str, attribute: Any) -> list[dict[str, Any]]:
    """Return the spans of a text that Ground Truth's workers labelled."""
    try:
        return [
            {"start": span["startOffset"], "end": span["endOffset"], "label": span["label"]}
            for span in attribute["annotations"]["entities"]
        ]
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{where} has no spans that can be read: {json.dumps(attribute)[:80]}.",
            'Write them as {"annotations": {"entities": [{"startOffset": 0, "endOffset": 3, '
            '"label": "PER"}]}}.',
        ) from error
