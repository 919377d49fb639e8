"""JSON and JSON Lines to an Arrow table, row by row, so that an error names its line."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data.column_names import LABEL, SPLIT_COLUMN, TEXT, split_of
from recipe.data.files.part import Part, open_text, token_data
from recipe.errors import DataError

_METADATA = "-metadata"
_SURROGATE = re.compile("[\ud800-\udfff]")


def read_json(path: Path, encoding: str) -> Part:
    """The rows of one JSON document.

    Raises:
        DataError: it is no JSON, or no rows (with its line).
    """
    with open_text(path, encoding) as stream:
        text = stream.read()
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad_json(path, getattr(error, "lineno", 1), error) from error
    return _records(path, "json", _rows_of(path, document), lines=None)


def _rows_of(path: Path, document: Any) -> list[Any]:
    """The rows in [row ...], {"data": [row ...]}, {"train": [row ...], "test": [row ...]},
    {"column": [value ...]} or pandas' to_json."""
    if isinstance(document, list):
        return document
    values = list(document.values())
    tables = {
        key: value
        for key, value in document.items()
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
    }
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
    columns = [list(value.values()) if isinstance(value, dict) else value for value in values]
    if all(isinstance(column, list) for column in columns) and len(set(map(len, columns))) == 1:
        return [dict(zip(document, row, strict=True)) for row in zip(*columns, strict=True)]
    return [document]


def read_json_objects(path: Path, encoding: str) -> Part:
    """One object on each line, or one object that is the whole file.

    Raises:
        DataError: a line is no JSON object (with its number).
    """
    records, lines = [], []
    with open_text(path, encoding) as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                records.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                if not records and ".json" in path.suffixes:
                    return read_json(path, encoding)
                raise _bad_json(path, number, error) from error
            lines.append(number)
    if len(records) == 1 and len(rows := _rows_of(path, records[0])) > 1:
        return _records(path, "json", rows, lines=None)
    return _records(path, "jsonl", records, lines)


def _bad_json(path: Path, line: int, error: Exception) -> DataError:
    # Besides, a number may have too many digits, or lists may be nested too deeply.
    reason = str(error)
    if isinstance(error, json.JSONDecodeError):
        reason = f"{error.msg} at column {error.colno}"
    return DataError(
        f"{path} line {line} is no valid JSON: {reason}.", "Correct the line, or remove it."
    )


def _records(path: Path, name: str, records: list[Any], lines: list[int] | None) -> Part:
    part = Part(path=path, format=name, table=pa.table({}), lines=lines)
    # As spaCy's examples have it: a text and what is said of it.
    records = [
        {TEXT: each[0], **each[1]}
        if isinstance(each, list) and [type(item) for item in each] == [str, dict]
        else each
        for each in records
    ]
    for row, record in enumerate(records):
        if not isinstance(record, dict):
            raise DataError(
                f"{part.where(row)} is no object but {json.dumps(record)[:60]}.",
                'Write each row as {"text": "...", "label": "..."}.',
            )
    if any(_METADATA in key for key in (records or [{}])[0]) or ".manifest" in path.suffixes:
        records = _of_ground_truth(part, records)
        name = "Ground Truth manifest"
    names = list(dict.fromkeys(key for record in records for key in record))
    try:
        table = pa.table({key: _column([each.get(key) for each in records]) for key in names})
    except UnicodeEncodeError as error:
        row = next(
            row
            for row, record in enumerate(records)
            if _SURROGATE.search(json.dumps(record, ensure_ascii=False))
        )
        raise DataError(
            f"{part.where(row)} holds half of a surrogate pair (an escape such as \\ud83d alone).",
            "Write the character itself, or both escapes.",
        ) from error
    mixed = {
        key: part.where(containers[0])
        for key in names
        if pa.types.is_string(table.schema.field(key).type)
        and (
            containers := [
                at for at, each in enumerate(records) if isinstance(each.get(key), (list, dict))
            ]
        )
    }
    return Part(path=path, format=name, table=table, lines=lines, mixed=mixed)


def _of_ground_truth(part: Part, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of an augmented manifest: its source as `text`, each attribute by its class names.

    Where it has one attribute only, that is the label, too.
    """
    keys = dict.fromkeys(key for record in records for key in record)
    attributes = [key for key in keys if f"{key}{_METADATA}" in keys]
    rows = []
    for at, record in enumerate(records):
        if "source" not in record and "source-ref" in record:
            raise DataError(
                f"{part.where(at)} holds no text but where one lies: {record['source-ref']}.",
                "Write the texts themselves, as source.",
            )
        row = {
            key: value
            for key, value in record.items()
            if key != "source" and not key.endswith(_METADATA)
        }
        for attribute in attributes:
            about = record.get(f"{attribute}{_METADATA}") or {}
            if "text-span" in str(about.get("type")):
                raise token_data(part.where(at), f"{attribute} labels spans of the text")
            names = list((about.get("class-map") or {}).values())
            row[attribute] = about.get("class-name", names or record.get(attribute))
            if "failure-reason" in about:
                row[attribute] = None
        if len(attributes) == 1 and LABEL not in row:
            row[LABEL] = row[attributes[0]]
        rows.append({TEXT: record.get("source"), **row})
    return rows


def _column(values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        # Values of several types, such as 1 and "1": as text, they still compare.
        return pa.array(
            [
                value if value is None or isinstance(value, str) else json.dumps(value)
                for value in values
            ]
        )
