"""Reads the inputs and parameters of requests from their bodies."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from email.message import Message
from typing import Any

import numpy as np

from recipe.backend.requests.parameters import OPTIONS
from recipe.backend.requests.payloads import (
    CSV,
    EXAMPLE,
    JSON,
    JSON_LINES,
    NPY,
    TEXT,
    BadRequest,
    Request,
    UnsupportedContentType,
    is_conversation,
    media_type,
)
from recipe.data.column_names import plain
from recipe.spec import TEXT_NAMES

_TEXT_KEYS = ("inputs", *TEXT_NAMES)
_FORMS: tuple[frozenset[str], ...] = (
    frozenset({"text", "text_pair"}),
    frozenset({"question", "context"}),
    frozenset({"source_sentence", "sentences"}),
    frozenset({"query", "texts"}),
    frozenset({"query", "table"}),
)
"""Inputs of several parts, which may stand in a request's body without the name `inputs`."""
_MEDIA_KEYS = {"image", "images", "audio", "raw", "array", "video", "videos"}
MEDIA_PARTS = _MEDIA_KEYS | {
    "text", "question", "word_boxes", "sampling_rate", "candidate_labels",
}  # fmt: skip
"""Parts of an input with an image or a sound; other keys are parameters."""
_DELIMITERS = (",", ";", "\t", "|")
"""Those of training data, whose module imports pyarrow."""
_SURE_HEADERS = ("inputs", "text")
"""A CSV of one column has a header if its first row is one of these names."""
_ESCAPED_HALF = re.compile(rb"\\u[dD]")


def read_request(body: bytes, content_type: str) -> Request:
    """Read the inputs of a JSON, JSON Lines or CSV body, a plain text, an NPY array of texts, or
    an image or audio file. Texts are in UTF-8, or in the charset of the content type.

    Raise BadRequest if the body is not of its type, or has no input; an invalid record of several
    is noted in the request's `faults` instead, unless all are. Raise UnsupportedContentType if the
    type or its charset is not supported.
    """
    kind = media_type(content_type)
    if kind.startswith(("image/", "audio/", "video/")):
        if not body:
            raise BadRequest(f"The body is empty. Send the bytes of the {kind.partition('/')[0]}.")
        return Request(inputs=[body], raw=body, single=True, content_type=kind)
    if kind not in _READERS:
        raise UnsupportedContentType(
            f"Content-Type {content_type!r} is not supported. Send {', '.join(_READERS)}, or an "
            "image or audio file if the model's task reads them."
        )
    header = Message()
    header["content-type"] = content_type
    charset = str(header.get_param("charset", "") or "utf-8")
    if kind != NPY and charset.lower() not in ("utf-8", "utf8"):
        try:
            body = body.decode(charset).encode()
        except LookupError as error:
            raise UnsupportedContentType(
                f"The charset of Content-Type {content_type!r} is not known. Send utf-8."
            ) from error
        except UnicodeError as error:
            raise BadRequest(f"The body is not text in {charset}: {error}.") from error
    named = header.get_param("header")
    request = _read_csv(body, named) if kind == CSV else _READERS[kind](body)
    if not request.inputs and not request.faults:
        raise BadRequest(f"The request holds no text. {EXAMPLE}")
    # In valid UTF-8 only JSON's escapes make half of a surrogate pair. NPY is not UTF-8.
    if kind == NPY or _ESCAPED_HALF.search(body):
        check_encodable([request.inputs, dict(request.parameters)])
    return request


def check_encodable(value: Any) -> None:
    """Raise BadRequest if a text, at any depth, cannot be written as UTF-8."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise BadRequest(f"A text holds half of a surrogate pair: {value[:60]!a}.") from error
    elif isinstance(value, (list, tuple, dict)):
        for entry in value.items() if isinstance(value, dict) else value:
            check_encodable(entry)


def text_of(body: str | bytes) -> str:
    """Return a body as text without a byte order mark. Raise BadRequest if it is not UTF-8."""
    try:
        text = body if isinstance(body, str) else body.decode()
    except UnicodeDecodeError as error:
        raise BadRequest(f"The body is not UTF-8: {error.reason} at byte {error.start}.") from error
    return text.removeprefix("\ufeff")


def parsed(body: bytes) -> Any:
    """Return the value of a JSON body. Raise BadRequest if it is not JSON, or a key stands
    twice."""

    def refuse_constant(name: str) -> None:
        raise BadRequest(f"The body is not valid JSON: it contains {name}.")

    def as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # Of a key that stands twice, with two values, one would be ignored.
        document = dict(pairs)
        if len(document) < len(pairs):
            for name, value in pairs:
                if document[name] != value:
                    raise BadRequest(f"{name!r} stands in the body twice, with two values.")
        return document

    text = text_of(body)
    try:
        return json.loads(text, parse_constant=refuse_constant, object_pairs_hook=as_object)
    except BadRequest:
        raise
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The body is not valid JSON: {error}. {EXAMPLE}") from error


def read_document(document: object) -> Request:
    """Read a JSON document: an input, a list of inputs, or an object with the inputs and their
    parameters, which are in `parameters` or next to the inputs. Raise BadRequest if it has no
    inputs, or parameters that contradict each other.
    """
    parameters: dict[str, Any] = {}
    inputs: Any = document
    if isinstance(document, dict):
        rest = dict(document)
        nested, options = rest.pop("parameters", None), rest.pop("options", None)
        medium = MEDIA_PARTS if _MEDIA_KEYS & set(rest) else None
        form = next((form for form in _FORMS if form <= set(rest)), medium)
        key = next((key for key in _TEXT_KEYS if key in rest), None)
        if form is not None and key != "inputs":
            inputs = {name: rest.pop(name) for name in list(rest) if name in form}
        elif key is not None:
            inputs = rest.pop(key)
        else:
            raise BadRequest(
                f"The request has no 'inputs', but {', '.join(map(repr, document)) or 'nothing'}. "
                f"{EXAMPLE}"
            )
        if nested is not None and not isinstance(nested, dict):
            raise BadRequest(
                f"'parameters' is {json.dumps(nested)[:60]}: give an object, as in "
                '{"inputs": "a text", "parameters": {"top_k": 2}}.'
            )
        if options is not None and (not isinstance(options, dict) or set(options) - OPTIONS):
            raise BadRequest(
                f"'options' is {json.dumps(options)[:60]}: it may hold "
                f"{', '.join(sorted(OPTIONS))}."
            )
        for name in set(rest) & set(nested or {}):
            if rest[name] != (nested or {})[name]:
                raise BadRequest(f"{name!r} stands in the request twice, with two values.")
        parameters = {**rest, **(nested or {})}
    while isinstance(inputs, dict) and set(inputs) == {"inputs"}:
        inputs = inputs["inputs"]
    is_list = isinstance(inputs, list) and not is_conversation(inputs)
    values = []
    for value in inputs if is_list else [inputs]:
        # Objects that only name their input.
        while isinstance(value, dict) and len(value) == 1:
            ((name, inner),) = value.items()
            # A list is left in its object: it may be a pair or several inputs.
            if name not in _TEXT_KEYS or not isinstance(inner, (str, dict)):
                break
            value = inner
        values.append(value)
    return Request(inputs=values, parameters=parameters, single=not is_list, raw=inputs)


def _request_of(
    records: Sequence[Sequence[Any] | str],
    parameters: Mapping[str, Any] | None = None,
    groups: Sequence[int | None] = (),
) -> Request:
    """Return the request of records: of each the inputs, or the error message if it is invalid."""
    texts: list[Any] = []
    faults: dict[int, str] = {}
    for record in records:
        if isinstance(record, str):
            faults[len(texts) + len(faults)] = record
        else:
            texts += record
    return Request(
        inputs=texts, parameters=parameters or {}, records=True, faults=faults, groups=groups
    )


def _read_json_lines(body: bytes) -> Request:
    records: list[Sequence[Any] | str] = []
    groups: list[int | None] = []
    first: tuple[int, Mapping[str, Any]] | None = None
    for number, line in enumerate(body.splitlines(), 1):
        if not line.strip():
            continue
        groups.append(None)
        try:
            request = read_document(parsed(line))
            if not request.inputs:
                raise BadRequest("The list of inputs is empty.")
        except BadRequest as error:
            records.append(f"Line {number}: {error}")
            continue
        first = first or (number, request.parameters)
        if request.parameters != first[1]:
            raise BadRequest(
                f"Lines {first[0]} and {number} have different parameters. Send only lines with "
                "equal parameters in one request (batch transform: BatchStrategy=SingleRecord)."
            )
        records.append(request.inputs)
        groups[-1] = None if request.single else len(request.inputs)
    request = _request_of(records, first[1] if first else None, groups if any(groups) else ())
    if request.faults and not request.inputs:
        raise BadRequest(request.faults[0])
    return request


def _read_csv(body: bytes, header: Any = None) -> Request:
    """Read the rows of a CSV body, cut by any delimiter of training data.

    If the model's configuration names the columns that it was trained on, `Request.read_columns`
    reads the rows again by these names. So rows without a known column are refused later, by
    `Request.read`. `header` is the content type's parameter: `present`, `absent`, or None.
    """
    if header not in (None, "present", "absent"):
        raise UnsupportedContentType(f"header is {header!r}. Send header=present or header=absent.")
    text = text_of(body)
    tables: dict[str, list[list[str]]] = {}
    csv.field_size_limit(sys.maxsize)
    for mark in [mark for mark in _DELIMITERS if mark == "," or mark in text]:
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=mark, strict=True)
        try:
            # A blank line is not a row, but a row of empty fields is one, and gets an answer.
            tables[mark] = [row for row in lines if row]
        except csv.Error as error:
            if mark == ",":
                raise BadRequest(f"The body is not valid CSV: {error}.") from error

    def read_columns(names: Sequence[str]) -> Request | None:
        columns = [plain(name) for name in names]
        for rows in tables.values():
            cells = [plain(cell) for cell in rows[0]] if rows else []
            if header == "absent" or not set(columns) <= set(cells) or len(columns) > 2:
                continue
            if len(cells) == 1 and header is None and (rows[0] != list(names) or len(rows) == 1):
                continue  # It may be a text.
            parts = dict(zip(("text", "text_pair"), columns, strict=False))
            return _row_inputs(rows, parts if len(parts) > 1 else columns[0], cells)
        return None

    return replace(_read_usual_columns(tables, header), read_columns=read_columns)


def _read_usual_columns(tables: Mapping[str, list[list[str]]], header: Any) -> Request:
    """Read a CSV body, its rows by each delimiter, by the columns' names that every model knows."""
    rows = tables[","]
    for mark, others in tables.items() if header != "absent" else ():
        cells = [plain(cell) for cell in others[0]] if others else []
        form = next((form for form in _FORMS[:2] if form <= set(cells)), None)
        name = next((name for name in _TEXT_KEYS if name in cells), None)
        is_table = len(cells) > 1 and (mark == "," or {len(row) for row in others} == {len(cells)})
        if is_table and (form or name):
            parts = {part: part for part in sorted(form)} if form else name
            return _row_inputs(others, parts, cells)
        if is_table and mark != "," and header is None and len(others) > 1:
            message = (
                f"Each row has {len(cells)} fields between {mark!r}. Name the column of texts in a"
                " header (text), or send text/csv; header=absent if each line is a text."
            )
            return _request_of([message] * len(rows))
    first = rows[0][0] if rows and len(rows[0]) == 1 else ""
    is_known = plain(first) in _TEXT_KEYS and len(rows) > 1 and header is None
    if is_known and first not in _SURE_HEADERS:
        message = (
            f"The first row is {first!r}: a header or a text? Send Content-Type"
            " text/csv; header=present, or header=absent."
        )
    elif first and (is_known or header == "present"):
        return _row_inputs(rows, first, [first])
    elif header == "present" and rows:
        message = f"The header {','.join(rows[0])[:60]!r} names no column of texts: name it text."
    else:
        return _row_inputs(rows, None, [])
    return _request_of([message] * len(rows))


def _row_inputs(
    rows: Sequence[Sequence[str]], columns: Mapping[str, str] | str | None, header: Sequence[str]
) -> Request:
    """Return the inputs of a table's rows: by the name of the column of texts, or by part of an
    input the name of its column; None if there is one column without a header."""
    records: list[Sequence[Any] | str] = []
    fields = 1 if columns is None else len(header)
    for number, row in enumerate(rows, 1):
        if len(row) != fields:
            records.append(
                f"CSV row {number} has {len(row)} fields: {','.join(row)[:60]!r}. Send one text "
                "in each row, in double quotes if it holds a comma, or a header row that names the "
                "column text, or the columns that the model was trained on."
            )
        elif columns is None:
            records.append([row[0]])
        elif number == 1:
            continue
        elif isinstance(columns, str):
            records.append([row[header.index(columns)]])
        else:
            parts = {part: row[header.index(name)] for part, name in columns.items()}
            records.append([parts])
    return _request_of(records)


def array_of(body: bytes) -> np.ndarray[Any, Any]:
    """Return the array of an NPY body. Raise BadRequest if it has none, or one of objects, since
    pickle would run code."""
    try:
        array = np.load(io.BytesIO(body), allow_pickle=False)
    except Exception as error:
        # A malicious header raises MemoryError, TokenError, BadZipFile and others.
        raise BadRequest(f"The body is not a valid NPY array: {error}") from error
    if not isinstance(array, np.ndarray):
        raise BadRequest("The body is an NPZ archive, not an NPY array.")
    return array


def _read_npy(body: bytes) -> Request:
    array = array_of(body)
    # A few bytes could declare a billion empty texts.
    if array.dtype.kind != "U" or array.dtype.itemsize == 0:
        raise BadRequest(f"The NPY array holds {array.dtype}, not texts (a dtype such as <U80).")
    if array.ndim > 2:
        raise BadRequest(
            f"The NPY array has {array.ndim} dimensions. Send a text or pair in a row."
        )
    # A row is a record: of two columns a pair.
    rows = array.reshape(-1) if array.ndim < 2 or array.shape[1] == 1 else array
    return Request(inputs=rows.tolist())


_READERS: Mapping[str, Callable[[bytes], Request]] = {
    JSON: lambda body: read_document(parsed(body)),
    JSON_LINES: _read_json_lines,
    CSV: _read_csv,
    TEXT: lambda body: Request(
        inputs=[text] if (text := text_of(body)).strip() else [], single=True
    ),
    NPY: _read_npy,
}
