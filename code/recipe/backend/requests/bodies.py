"""Reads the inputs and parameters of requests from their bodies."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
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
from recipe.data.column_names import TEXT_NAMES, plain

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
_ESCAPED_HALF = re.compile(rb"\\u[dD]")


def read_request(body: bytes, content_type: str) -> Request:
    """Read the inputs of a JSON, JSON Lines, CSV or plain text body, of an NPY array of texts, or
    the bytes of an image or a sound.

    A text is in UTF-8, or in the charset that the content type names.

    Raises:
        BadRequest: The body is not of its type, or holds no input; of several records that is each
            record's own fault, unless all are wrong.
        UnsupportedContentType: The type is another one, or its charset is not known.
    """
    kind = media_type(content_type)
    if kind.startswith(("image/", "audio/", "video/")):
        if not body:
            raise BadRequest(f"The body is empty. Send the bytes of the {kind.partition('/')[0]}.")
        return Request(texts=[body], raw=body, single=True, content_type=kind)
    if kind not in _READERS:
        raise UnsupportedContentType(
            f"Content-Type {content_type!r} is not supported. Send {', '.join(_READERS)}, or an "
            "image or a sound if the model's task takes them."
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
    request = _READERS[kind](body)
    if not request.texts and not request.faults:
        raise BadRequest(f"The request holds no text. {EXAMPLE}")
    # In valid UTF-8 only escapes can be unpaired surrogates; an NPY array may contain them.
    if kind == NPY or _ESCAPED_HALF.search(body):
        check_encodable([request.texts, dict(request.parameters)])
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


def _decoded(body: bytes) -> str:
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadRequest(f"The body is not UTF-8: {error.reason} at byte {error.start}.") from error


def parsed(body: bytes) -> Any:
    """Return the value of a JSON body. Raise BadRequest if it is not JSON."""

    def refuse_constant(name: str) -> None:
        raise BadRequest(f"The body is not valid JSON: it holds {name}, which JSON does not have.")

    try:
        return json.loads(_decoded(body), parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        if isinstance(error, BadRequest):
            raise
        raise BadRequest(f"The body is not valid JSON: {error}. {EXAMPLE}") from error


def of_document(document: object) -> Request:
    """Read a JSON document: an input, a list of inputs, or an object with the inputs and their
    parameters, which are in `parameters` or next to the inputs.

    Raises:
        BadRequest: It has no inputs, or parameters that contradict each other.
    """
    parameters: dict[str, Any] = {}
    inputs: Any = document
    if isinstance(document, dict):
        rest = dict(document)
        nested, options = rest.pop("parameters", None), rest.pop("options", None)
        form = next((form for form in _FORMS if form <= set(rest)), None)
        if "inputs" in rest:
            inputs = rest.pop("inputs")
        elif form is not None:
            inputs = {name: rest.pop(name) for name in list(rest) if name in form}
        elif _MEDIA_KEYS & set(rest):
            inputs = {name: rest.pop(name) for name in list(rest) if name in MEDIA_PARTS}
        elif (key := next((key for key in _TEXT_KEYS if key in rest), None)) is not None:
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
    return Request(
        texts=[_unwrapped(value) for value in (inputs if is_list else [inputs])],
        parameters=parameters,
        single=not is_list,
        raw=inputs,
    )


def _unwrapped(value: Any) -> Any:
    """Return an input without an object around it that only names it."""
    while isinstance(value, dict) and len(value) == 1:
        ((name, inner),) = value.items()
        # A list is left in its object: it may be a pair or several inputs.
        if name not in _TEXT_KEYS or not isinstance(inner, (str, dict)):
            break
        value = inner
    return value


def _request_of(
    records: Sequence[Sequence[Any] | str], parameters: Mapping[str, Any] | None = None
) -> Request:
    """Return the request of several records.

    Args:
        records: The inputs of each record, or the message of a record that cannot be read.
        parameters: Their parameters.
    """
    texts: list[Any] = []
    faults: dict[int, str] = {}
    for record in records:
        if isinstance(record, str):
            faults[len(texts) + len(faults)] = record
        else:
            texts += record
    return Request(texts=texts, parameters=parameters or {}, records=True, faults=faults)


def _read_json_lines(body: bytes) -> Request:
    records: list[Sequence[Any] | str] = []
    first: tuple[int, Mapping[str, Any]] | None = None
    for number, line in enumerate(body.splitlines(), 1):
        if not line.strip():
            continue
        try:
            request = of_document(parsed(line))
        except BadRequest as error:
            records.append(f"Line {number}: {error}")
            continue
        first = first or (number, request.parameters)
        if request.parameters != first[1]:
            raise BadRequest(
                f"Lines {first[0]} and {number} have different parameters. Send lines of equal "
                "parameters in one request (batch transform: BatchStrategy=SingleRecord)."
            )
        records.append(request.texts)
    request = _request_of(records, first[1] if first else None)
    if request.faults and not request.texts:
        raise BadRequest(request.faults[0])
    return request


def _read_csv(body: bytes) -> Request:
    """Read the rows of a CSV body, with or without a header.

    Which columns are read is known for sure only by the model, if its configuration has the names
    of those that it was trained on: then `Request.by_columns` reads the rows again. So the refusal
    of rows that the usual names do not tell waits for `Request.read`.
    """
    stream = io.StringIO(_decoded(body), newline="")
    try:
        # A blank line is no row; a row of empty fields is one, and has its answer.
        rows = [row for row in csv.reader(stream, strict=True) if row]
    except csv.Error as error:
        raise BadRequest(f"The body is not valid CSV: {error}.") from error
    header = [plain(cell) for cell in rows[0]] if rows else []

    def by_columns(names: Sequence[str]) -> Request | None:
        columns = [plain(name) for name in names]
        if not set(columns) <= set(header) or len(columns) > 2:
            return None
        parts = dict(zip(("text", "text_pair"), columns, strict=False))
        return _of_rows(rows, parts if len(parts) > 1 else columns[0], header)

    form = next((form for form in _FORMS[:2] if form <= set(header)), None)
    name = next((name for name in _TEXT_KEYS if name in header), None)
    request = _of_rows(rows, {part: part for part in sorted(form)} if form else name, header)
    request.by_columns = by_columns
    return request


def _of_rows(
    rows: Sequence[Sequence[str]], columns: Mapping[str, str] | str | None, header: Sequence[str]
) -> Request:
    """Return the inputs of a table's rows.

    Args:
        rows: With the header, if there is one.
        columns: The column of texts; the names of an input's parts with their columns; None if
            there is no header, and one column.
        header: The names of the columns.
    """
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
        elif number > 1:
            text: Any
            if isinstance(columns, str):
                text = row[header.index(columns)]
            else:
                text = {part: row[header.index(name)] for part, name in columns.items()}
            records.append([text])
    return _request_of(records)


def _read_npy(body: bytes) -> Request:
    try:
        array = np.load(io.BytesIO(body), allow_pickle=False)
    except Exception as error:
        # A header made up to harm raises MemoryError, TokenError, BadZipFile, and what not.
        raise BadRequest(f"The body is not an NPY array that may be read: {error}") from error
    # Of texts without characters, a few bytes would hold a billion.
    if not isinstance(array, np.ndarray) or array.dtype.kind != "U" or array.dtype.itemsize == 0:
        kind = getattr(array, "dtype", "several arrays")
        raise BadRequest(f"The NPY array holds {kind}, not texts (a dtype such as <U80).")
    return Request(texts=array.ravel().tolist())


def _read_plain(body: bytes) -> Request:
    text = _decoded(body)
    return Request(texts=[text] if text.strip() else [], single=True)


_READERS: Mapping[str, Callable[[bytes], Request]] = {
    JSON: lambda body: of_document(parsed(body)),
    JSON_LINES: _read_json_lines,
    CSV: _read_csv,
    TEXT: _read_plain,
    NPY: _read_npy,
}
