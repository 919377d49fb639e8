"""Read JSON and JSON Lines into an Arrow table, some rows at a time; errors name the line."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recipe.data.column_names import TEXT, split_of
from recipe.data.files import records
from recipe.data.files.annotation_exports import is_task, plain_rows
from recipe.data.files.ground_truth import label_manifest, manifest_rows
from recipe.data.files.part import Part
from recipe.data.files.text_files import open_text
from recipe.errors import DataError, join_names
from recipe.spec import MESSAGES_NAMES, normalize_name
from recipe.task_table import names_of_samples

_SURROGATE = re.compile("[\ud800-\udfff]")
_LINES = (".jsonl", ".ndjson")
_OF_FILES = ("data", "rows", "records", "examples", "instances", "items", "samples")
"""Keys that hold a list of all rows."""
_OF_ROWS = (
    *MESSAGES_NAMES,
    *("entities", "spans", "annotations", "paragraphs", "qas", "answers", "chosen", "rejected"),
)
"""Keys whose lists of records belong to one row."""
_HEADS = {"version", "info", "meta", "metadata", "header", "config"}
"""First keys that hold a record about the rows after it."""
_KEY, _FEWEST_KEYS, _LEAST_ALIKE = re.compile(r"[!-~]+"), 2, 0.5
_CHUNK_ROWS, _CHUNK_CHARACTERS = 10_000, 1 << 22


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
        with contextlib.suppress(ValueError, RecursionError):
            json.loads(text.partition("\n")[0])
            return _part(path, "jsonl", lambda: _objects(path, encoding))
        raise _bad_json(path, getattr(error, "lineno", 1), error) from error
    rows = _rows_of(path, document)
    return _part(path, "json", lambda: iter([(rows, range(len(rows)))]))


def _rows_of(path: Path, document: Any) -> list[Any]:
    """Return the rows of [row ...] or {"data": [row ...]}; or the document as the only row, such as
    one conversation, or the only line of a .jsonl file.

    Raises:
        DataError: it has another shape, such as a list for each column, or for each split.
    """
    if isinstance(document, list):
        return document
    lists = {
        key: value
        for key, value in document.items()
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
    }
    is_line = path.suffix.lower() in _LINES
    if not is_line and (by_key := _rows_by_key(document)):
        return by_key
    if any(key in _OF_ROWS for key in lists) or (is_line and not {*_OF_FILES} & lists.keys()):
        return [document]
    if len(lists) == 1:
        (key,) = lists
        others = (name for name, value in document.items() if name != key and value)
        if split_of(key) in (None, "train") and not any(map(split_of, others)):
            return lists[key]
    if not is_line and (
        lists or all(isinstance(value, (list, dict)) for value in document.values())
    ):
        raise DataError(
            f"{path} is one object, not a list of rows. Its keys: "
            f"{join_names([*document]) or 'none'}.",
            'Write a list of rows, [{"text": "...", "label": "..."}, ...], for each split into a '
            "file of its own; pandas does by to_json(path, orient='records').",
        )
    return [document]


def _rows_by_key(document: dict[str, Any]) -> list[Any] | None:
    """Return the rows of `{key: row, ...}`, with the key as `id`; None for another object, such as
    one of columns, of splits or of parts of a row, by the names of its keys."""
    known, rows = {*_OF_FILES, *_OF_ROWS, *names_of_samples().single}, document.values()
    if len(rows) < _FEWEST_KEYS or not all(isinstance(row, dict) and row for row in rows):
        return None
    are_keys = all(map(_KEY.fullmatch, document)) and not any(map(split_of, document))
    names = {name for row in rows for name in row}
    are_names = known & {*map(normalize_name, names)} or len(names) < len(rows)
    are_names = are_names and not any(map(str.isdigit, names))
    are_alike = all(_LEAST_ALIKE * len(names) <= len(row) for row in rows)
    keys = [*map(normalize_name, document)]
    if known & {*keys} or keys[0] in _HEADS or not (are_keys and are_names and are_alike):
        return None
    return [{"id": key, **row} for key, row in document.items()]


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
    """Yield the values on the lines of a file, some thousands or some megabytes at a time; Label
    Studio's tasks at once, as their labels are checked together."""
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
            is_full = len(lines) >= _CHUNK_ROWS or size > _CHUNK_CHARACTERS
            if is_full and not is_task(values[0]):
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
    # Continue the pass that found the types; if types change, the rows are read again.
    passes = itertools.chain([itertools.chain([first], begun)], (read() for _ in itertools.count()))
    starts: list[Any] = [np.empty(0, np.int64)]

    def objects() -> Iterator[Sequence[dict[str, Any]]]:
        del starts[1:]
        for block in next(passes):
            yield _objects_of(where, block)
            starts.append(np.asarray(block[1], np.int64))

    try:
        table, mixed = records.concat_blocks(objects)
    except UnicodeEncodeError as error:
        line = next(
            line
            for block in read()
            for row, line in zip(_objects_of(where, block), block[1], strict=True)
            if _SURROGATE.search(json.dumps(row, ensure_ascii=False))
        )
        raise DataError(
            f"{where}{line} holds half of a surrogate pair (an escape such as \\ud83d alone).",
            "Write the character itself, or both escapes.",
        ) from error
    lines = None if name == "json" else np.concatenate(starts)
    part = Part(path=path, format=name, table=table, lines=lines)
    part = dataclasses.replace(part, mixed={k: part.where(row) for k, row in mixed.items()})
    return label_manifest(part)


def _objects_of(where: str, block: Block) -> Sequence[dict[str, Any]]:
    """Return the rows of a block. Raises DataError if one is not an object, or an annotation is of
    another kind than those that are read."""
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
    return manifest_rows(where, plain_rows(where, objects, block[1]), block[1])
