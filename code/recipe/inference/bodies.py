"""Bodies of requests to their inputs and parameters. No model here."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Mapping
from email.message import Message
from typing import Any

import numpy as np

from recipe.data.column_names import TEXT_NAMES, plain
from recipe.inference.parameters import OPTIONS
from recipe.inference.payloads import (
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


def read_request(body: bytes, content_type: str) -> Request:
    """The inputs of a JSON, JSON Lines, CSV or plain text body, of an NPY array of texts, or the
    bytes of an image or a sound.

    A text is in UTF-8, or in the charset that the content type names.

    Raises:
        BadRequest: the body is not of its type, or holds no input; of several records that is each
            record's own fault, unless all are wrong.
        UnsupportedContentType: the type is another one.
    """
    kind = media_type(content_type)
    if kind.startswith(("image/", "audio/", "video/")):
        if not body:
            raise BadRequest(f"The body is empty. Send the bytes of the {kind.partition('/')[0]}.")
        return Request(texts=[body], raw=body, single=True, content_type=kind)
    if kind not in _READERS:
        raise UnsupportedContentType(
            f"Content-Type {content_type!r} is not supported. Send {', '.join(_READERS)}, or an "
            "image or a sound where the model's task takes them."
        )
    request = _READERS[kind](_as_utf8(body, content_type))
    if not request.texts:
        raise BadRequest(f"The request holds no text. {EXAMPLE}")
    # Only escapes make half of a pair of what is UTF-8 otherwise, and an NPY array has it as it is.
    if kind == NPY or _ESCAPED_HALF.search(body):
        check_encodable([request.texts, dict(request.parameters)])
    return request


def _as_utf8(body: bytes, content_type: str) -> bytes:
    parameters = Message()
    parameters["content-type"] = content_type
    charset = str(parameters.get_param("charset", "") or "utf-8")
    if media_type(content_type) == NPY or charset.lower() in ("utf-8", "utf8"):
        return body
    try:
        return body.decode(charset).encode()
    except LookupError as error:
        raise UnsupportedContentType(
            f"The charset of Content-Type {content_type!r} is not known. Send utf-8."
        ) from error
    except UnicodeError as error:
        raise BadRequest(f"The body is no text in {charset}: {error}.") from error


_ESCAPED_HALF = re.compile(rb"\\u[dD]")


def check_encodable(value: Any) -> None:
    """Raises BadRequest where a text, at any depth, is none that can be written as UTF-8."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise BadRequest(f"A text holds half of a surrogate pair: {value[:60]!a}.") from error
    elif isinstance(value, (list, tuple, dict)):
        for each in value.items() if isinstance(value, dict) else value:
            check_encodable(each)


def _decoded(body: bytes) -> str:
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadRequest(f"The body is not UTF-8: {error.reason} at byte {error.start}.") from error


def _read_npy(body: bytes) -> Request:
    try:
        array = np.load(io.BytesIO(body), allow_pickle=False)
    except Exception as error:
        # A header made up to harm raises MemoryError, TokenError, BadZipFile, and what not.
        raise BadRequest(f"The body is no NPY array that may be read: {error}") from error
    # Of texts without characters, a few bytes would hold a billion.
    if not isinstance(array, np.ndarray) or array.dtype.kind != "U" or array.dtype.itemsize == 0:
        kind = getattr(array, "dtype", "no array")
        raise BadRequest(f"The NPY array holds {kind}, not texts (a dtype such as <U80).")
    return Request(texts=array.ravel().tolist())


def parsed(body: bytes) -> Any:
    """The value of a JSON body. Raises BadRequest where it is none."""
    try:
        return json.loads(_decoded(body), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        if isinstance(error, BadRequest):
            raise
        raise BadRequest(f"The body is no valid JSON: {error}. {EXAMPLE}") from error


def _read_json(body: bytes) -> Request:
    return of_document(parsed(body))


def _refuse_constant(name: str) -> None:
    raise BadRequest(f"The body is no valid JSON: it holds {name}, which is no number of JSON.")


def of_document(document: object) -> Request:
    """The request that a JSON document is. Raises BadRequest where it has no inputs."""
    parameters: dict[str, Any] = {}
    if isinstance(document, dict):
        document, parameters = _parts(document)
    is_list = isinstance(document, list) and not is_conversation(document)
    inputs: Any = document if is_list else [document]
    return Request(
        texts=[_input(each) for each in inputs],
        parameters=parameters,
        single=not is_list,
        raw=document,
    )


def _parts(document: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The inputs of a request's object, and its parameters: those of `parameters`, and what else
    stands beside the inputs."""
    rest = dict(document)
    nested, options = rest.pop("parameters", None), rest.pop("options", None)
    form = next((form for form in _FORMS if form <= set(rest)), None)
    inputs: Any
    if "inputs" in rest:
        inputs = rest.pop("inputs")
    elif form is not None:
        inputs = {name: rest.pop(name) for name in list(rest) if name in form}
    elif _MEDIA_KEYS & set(rest):
        inputs, rest = rest, {}
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
            f"'options' is {json.dumps(options)[:60]}: it may hold {', '.join(sorted(OPTIONS))}."
        )
    for name in set(rest) & set(nested or {}):
        if rest[name] != (nested or {})[name]:
            raise BadRequest(f"{name!r} stands in the request twice, with two values.")
    return inputs, {**rest, **(nested or {})}


def _input(value: Any) -> Any:
    """An input as it came, without a name around it that only says that it is one."""
    if isinstance(value, dict) and len(value) == 1:
        ((name, inner),) = value.items()
        if name == "inputs" or (name in _TEXT_KEYS and isinstance(inner, str)):
            return _input(inner)
    return value


def _read_json_lines(body: bytes) -> Request:
    records = _Records()
    for number, line in enumerate(body.splitlines(), 1):
        if line.strip():
            try:
                records.add(_read_json(line))
            except BadRequest as error:
                records.fail(f"Line {number}: {error}")
    return records.request()


class _Records:
    """What the records of one request add up to."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._faults: dict[int, str] = {}
        self._entries = 0

    def add(self, request: Request) -> None:
        """A record that was read."""
        self._requests.append(request)
        self._entries += len(request.texts)

    def fail(self, message: str) -> None:
        """A record that was not."""
        self._faults[self._entries] = message
        self._entries += 1

    def request(self) -> Request:
        """All of them. Raises BadRequest where none was read, or their parameters differ."""
        if self._faults and not self._requests:
            raise BadRequest(next(iter(self._faults.values())))
        parameters = self._requests[0].parameters if self._requests else {}
        if any(each.parameters != parameters for each in self._requests):
            raise BadRequest("The lines have different parameters. Send one request for each.")
        texts = [text for each in self._requests for text in each.texts]
        return Request(texts=texts, parameters=parameters, records=True, faults=self._faults)


def _read_csv(body: bytes) -> Request:
    stream = io.StringIO(_decoded(body), newline="")
    try:
        rows = [row for row in csv.reader(stream, strict=True) if any(row)]
    except csv.Error as error:
        raise BadRequest(f"The body is no valid CSV: {error}.") from error
    header = [plain(cell) for cell in rows[0]] if rows else []
    named = next((header.index(name) for name in _TEXT_KEYS if name in header), None)
    column, fields = (0, 1) if named is None else (named, len(header))
    form = next((form for form in _FORMS[:2] if form <= set(header)), None)
    records = _Records()
    for number, row in enumerate(rows, 1):
        if len(row) != fields:
            records.fail(
                f"CSV row {number} has {len(row)} fields: {','.join(row)[:60]!r}. Send one text "
                "in each row, in double quotes where it holds a comma, or a header row that "
                "names the column text."
            )
        elif number > 1 or named is None:
            parts = {name: row[header.index(name)] for name in sorted(form or ())}
            records.add(Request(texts=[parts or row[column]]))
    return records.request()


def _read_plain(body: bytes) -> Request:
    text = _decoded(body)
    return Request(texts=[text] if text.strip() else [], single=True)


_READERS: Mapping[str, Callable[[bytes], Request]] = {
    JSON: _read_json,
    JSON_LINES: _read_json_lines,
    CSV: _read_csv,
    TEXT: _read_plain,
    NPY: _read_npy,
}
