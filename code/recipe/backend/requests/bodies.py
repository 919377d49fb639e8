"""Reads the inputs and parameters of requests from their bodies."""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from email.message import Message
from typing import Any

from recipe.backend.requests.payloads import (
    ANY_EXAMPLE,
    CSV,
    JSON,
    JSON_LINES,
    TEXT,
    TEXT_KEYS,
    BadRequest,
    Request,
    UnsupportedContentType,
    is_conversation,
    media_type,
)
from recipe.data.column_names import plain
from recipe.spec import PAIRS

_FORMS: tuple[frozenset[str], ...] = (
    frozenset({"text", "text_pair"}),
    frozenset({"question", "context"}),
    frozenset({"source_sentence", "sentences"}),
    frozenset({"query", "texts"}),
    *map(frozenset, PAIRS),
)
"""Inputs of several parts, which may stand in a request's body without the name `inputs`."""
_OPTIONS = {"use_cache", "use_gpu", "wait_for_model"}
"""The `options` of Hugging Face's Inference API, which have no effect here."""
_OTHER_DELIMITERS = (";", "\t", "|")
_SURE_HEADERS = ("inputs", "text")
"""A CSV of one column has a header if its first row is one of these names."""
_CHARSETS = ("utf-8", "utf8", "us-ascii")
_ESCAPED_HALF = re.compile(rb"\\u[dD]")


def read_request(body: bytes, content_type: str) -> Request:
    """Read the inputs of a JSON, JSON Lines or CSV body, a plain text in UTF-8, or an image.

    Raise BadRequest if the body is not of its type, or has no input; an invalid record of several
    is noted in the request's `faults` instead, unless all are. Raise UnsupportedContentType if the
    type or a parameter of it is not supported.
    """
    kind = media_type(content_type)
    if kind.startswith("image/"):
        if not body:
            raise BadRequest("The body is empty. Send the bytes of the image.")
        return Request(inputs=[body], single=True)
    if kind not in _READERS:
        raise UnsupportedContentType(
            f"Content-Type {content_type!r} is not supported. Send {', '.join(_READERS)}, or an "
            "image if the model's task reads them."
        )
    header = Message()
    header["content-type"] = content_type
    if str(header.get_param("charset", "utf-8")).lower() not in _CHARSETS:
        raise UnsupportedContentType(f"Content-Type is {content_type!r}. Send the body in utf-8.")
    if header.get_param("header") is not None:
        raise UnsupportedContentType(
            f"Content-Type is {content_type!r}. Leave header out: a first row that names the "
            "column text is a header."
        )
    request = _READERS[kind](body)
    if not request.inputs and not request.faults:
        raise BadRequest(f"The request holds no inputs. {ANY_EXAMPLE}")
    # In valid UTF-8 only JSON's escapes make half of a surrogate pair.
    if _ESCAPED_HALF.search(body):
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
        raise BadRequest(f"The body is not valid JSON: {error}. {ANY_EXAMPLE}") from error


def read_document(document: object) -> Request:
    """Read a JSON document: an input, a list of inputs, or an object with the inputs and their
    parameters, which are in `parameters` or next to the inputs. Raise BadRequest if it has no
    inputs, or parameters that contradict each other.
    """
    parameters: dict[str, Any] = {}
    inputs: Any = document
    if isinstance(document, dict):
        rest = dict(document)
        nested, options = rest.pop("parameters", None), rest.get("options")
        if isinstance(options, dict) and set(options) <= _OPTIONS:
            del rest["options"]
        form = next((form for form in _FORMS if form <= set(rest)), None)
        key = next((key for key in TEXT_KEYS if key in rest), None)
        if form is not None and key != "inputs":
            inputs = {name: rest.pop(name) for name in list(rest) if name in form}
        elif key is not None:
            inputs = rest.pop(key)
        else:
            raise BadRequest(
                f"The request has no 'inputs', but {', '.join(map(repr, document)) or 'nothing'}. "
                f"{ANY_EXAMPLE}"
            )
        if nested is not None and not isinstance(nested, dict):
            raise BadRequest(
                f"'parameters' is {json.dumps(nested)[:60]}: give an object, as in "
                '{"inputs": ..., "parameters": {"top_k": 2}}.'
            )
        for name in set(rest) & set(nested or {}):
            if rest[name] != (nested or {})[name]:
                raise BadRequest(f"{name!r} stands in the request twice, with two values.")
        parameters = {**rest, **(nested or {})}
    is_list = isinstance(inputs, list) and not is_conversation(inputs)
    values = inputs if is_list else [inputs]
    return Request(inputs=values, parameters=parameters, single=not is_list)


def _read_json_lines(body: bytes) -> Request:
    inputs: list[Any] = []
    faults: dict[int, str] = {}
    groups: list[int | None] = []
    first: tuple[int, Mapping[str, Any]] | None = None
    for number, line in enumerate(body.splitlines(), 1):
        if not line.strip():
            continue
        try:
            request = read_document(parsed(line))
            if not request.inputs:
                raise BadRequest("The list of inputs is empty.")
        except BadRequest as error:
            faults[len(inputs) + len(faults)] = f"Line {number}: {error}"
            groups.append(None)
            continue
        first = first or (number, request.parameters)
        if request.parameters != first[1]:
            raise BadRequest(
                f"Lines {first[0]} and {number} have different parameters. Send only lines with "
                "equal parameters in one request (batch transform: BatchStrategy=SingleRecord)."
            )
        inputs += request.inputs
        groups.append(None if request.single else len(request.inputs))
    if faults and not inputs:
        raise BadRequest(faults[0])
    return Request(
        inputs=inputs,
        parameters=first[1] if first else {},
        records=True,
        faults=faults,
        groups=groups if any(groups) else (),
    )


def _read_csv(body: bytes) -> Request:
    """Read the rows of a CSV body. `Request.read_columns` reads them again by the names of the
    columns that the model was trained on, so rows without a known column are refused later, by
    `Request.read`. Raise BadRequest for fields that other marks than commas separate."""
    text = text_of(body)
    csv.field_size_limit(sys.maxsize)

    def rows_by(mark: str) -> list[list[str]]:
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=mark, strict=True)
        # A blank line is not a row, but a row of empty fields is one, and gets an answer.
        return [row for row in lines if row]

    try:
        rows = rows_by(",")
    except csv.Error as error:
        raise BadRequest(f"The body is not valid CSV: {error}.") from error
    for mark in _OTHER_DELIMITERS if len(rows) > 1 and len(rows[0]) == 1 else ():
        with contextlib.suppress(csv.Error):
            lengths = {len(row) for row in rows_by(mark)} if mark in text else {1}
            if len(lengths) == 1 and lengths != {1}:
                raise BadRequest(
                    f"Each row has {lengths.pop()} fields between {mark!r}. Separate fields by "
                    "commas; if each row is a text, put it in double quotes."
                )
    return replace(_read_rows(rows), read_columns=functools.partial(_read_rows, rows))


def _read_rows(rows: Sequence[Sequence[str]], columns: Sequence[str] = ()) -> Request:
    """Return the request of a CSV's rows, given the text columns that the model was trained on.
    Its header names these columns, or those that every model knows; otherwise each row is a
    text."""
    header = [plain(cell) for cell in rows[0]] if rows else []
    forms = [{name: name for name in sorted(form)} for form in _FORMS[:2]]
    forms += [{"text": name} for name in TEXT_KEYS if len(columns) < 2]
    forms += [{"text": first, "text_pair": second} for first, second in PAIRS]
    if len(columns) in (1, 2):
        parts = zip(("text", "text_pair"), map(plain, columns), strict=False)
        forms.insert(0, dict(parts))
    form = next((form for form in forms if set(form.values()) <= set(header)), None)
    if form is not None and len(header) == 1:
        if len(rows) == 1:
            form = None  # It may be a text.
        elif rows[0][0] not in (*_SURE_HEADERS, *columns):
            message = (
                f"The first row is {rows[0][0]!r}: a header or a text? Name the column text, or "
                "send texts as JSON."
            )
            faults = dict.fromkeys(range(len(rows)), message)
            return Request(inputs=[], records=True, faults=faults)
    indices = {part: header.index(name) for part, name in (form or {}).items()}
    fields, first = (len(header), 1) if indices else (1, 0)
    column, is_pair = indices.get("text", 0), len(indices) > 1
    inputs: list[Any] = []
    faults = {}
    for number, row in enumerate(rows[first:]):
        if len(row) != fields:
            faults[number] = (
                f"CSV row {number + first + 1} has {len(row)} fields: {','.join(row)[:60]!r}. Send "
                "one text in each row, in double quotes if it holds a comma, or a header row that "
                "names the column text, or the columns that the model was trained on."
            )
        elif is_pair:
            inputs.append({part: row[index] for part, index in indices.items()})
        else:
            inputs.append(row[column])
    return Request(inputs=inputs, records=True, faults=faults)


_READERS: Mapping[str, Callable[[bytes], Request]] = {
    JSON: lambda body: read_document(parsed(body)),
    JSON_LINES: _read_json_lines,
    CSV: _read_csv,
    TEXT: lambda body: Request(
        inputs=[text] if (text := text_of(body)).strip() else [], single=True
    ),
}
