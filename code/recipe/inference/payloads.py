"""Requests and answers: bytes to texts, predictions to bytes. No model here."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from email.message import Message
from typing import Any

import numpy as np

from recipe.data.column_names import TEXT_NAMES, plain

JSON, JSON_LINES, CSV = "application/json", "application/jsonlines", "text/csv"
NPY, TEXT, EVENTS = "application/x-npy", "text/plain", "text/event-stream"
_SPELLINGS = {
    "application/jsonlines": JSON_LINES,
    "application/x-jsonlines": JSON_LINES,
    "application/jsonl": JSON_LINES,
    "application/x-ndjson": JSON_LINES,
}
_EXAMPLE = 'Send for example {"inputs": ["a text", "another"]}.'
_TEXT_KEYS = ("inputs", *TEXT_NAMES)

Label = dict[str, Any]
"""{"label": name, "score": float}"""


class UnsupportedContentType(TypeError):
    """The request's Content-Type, or every type in its Accept, is one this handler cannot do."""


class BadRequest(ValueError):
    """The request's body cannot be read as texts; the message says what would be right."""

    status_code = 400


@dataclass(kw_only=True)
class Request:
    """What a request asks."""

    texts: Sequence[str]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    token_ids: list[list[int]] | None = None
    """The texts' token ids, once they are known."""
    truncated: Sequence[int] = ()
    """Places of the texts that were longer than the model can read, and were cut."""
    faults: Mapping[int, str] = field(default_factory=dict)
    """Records of JSON Lines or CSV that hold no text: their places in the answer, and why."""

    def only(self, known: Set[str], task: str) -> None:
        """Raises BadRequest where there is another parameter than the `known` ones of the task."""
        for name in self.parameters:
            if name not in known:
                takes = f"takes {', '.join(sorted(known))}" if known else "takes none"
                raise BadRequest(f"The parameter {name!r} is not one of {task}, which {takes}.")


class Answers(list[Any]):
    """An answer for each text of a request."""

    def __init__(self, answers: Sequence[Any], truncated: Sequence[int] = ()) -> None:
        super().__init__(answers)
        self.truncated = truncated
        """Places of the texts that were cut."""
        self.failed: Sequence[int] = ()
        """Places of the records that could not be read."""


def with_faults(prediction: Any, request: Request) -> Any:
    """`prediction` with an error in the place of each record that could not be read, so that an
    answer has as many entries as its request has records."""
    if not request.faults:
        return prediction
    entries, answered = iter(prediction), len(prediction) + len(request.faults)
    places = [place for place in range(answered) if place not in request.faults]
    woven = Answers(
        [
            _fault(request.faults[place]) if place in request.faults else next(entries)
            for place in range(answered)
        ],
        [places[each] for each in prediction.truncated],
    )
    woven.failed = sorted(request.faults)
    return woven


def _fault(message: str) -> dict[str, Any]:
    return {"error": {"code": "bad_request", "message": message}}


# Each parameter of some task: whether a value is one, and how that is said.
_PARAMETERS: Mapping[str, tuple[Any, str]] = {
    "top_k": (lambda value: type(value) is int and value >= 1, "1 or more"),
    "normalize": (lambda value: type(value) is bool, "true or false"),
    "max_new_tokens": (lambda value: type(value) is int and value >= 1, "1 or more"),
    "temperature": (lambda value: type(value) in (int, float) and value > 0, "more than 0"),
    "top_p": (lambda value: type(value) in (int, float) and 0 < value <= 1, "0 to 1"),
    "do_sample": (lambda value: type(value) is bool, "true or false"),
    "stream": (lambda value: type(value) is bool, "true or false"),
}


def media_type(header: str) -> str:
    """`text/csv` of `Text/CSV; charset=utf-8`, in the spelling this module uses."""
    plain_type = header.partition(";")[0].strip().lower()
    return _SPELLINGS.get(plain_type, plain_type)


def read_request(body: bytes, content_type: str) -> Request:
    """The texts of a JSON, JSON Lines, CSV or plain text body, or of an NPY array.

    A text is in UTF-8, or in the charset that the content type names.

    Raises:
        BadRequest: the body is not of its type, or holds no texts; of several records that is each
            record's own fault, unless all are wrong.
        UnsupportedContentType: the type is another one.
    """
    kind = media_type(content_type)
    if kind not in _READERS:
        raise UnsupportedContentType(
            f"Content-Type {content_type!r} is not supported. Send {', '.join(_READERS)}."
        )
    request = _READERS[kind](_as_utf8(body, content_type))
    if not request.texts:
        raise BadRequest(f"The request holds no text. {_EXAMPLE}")
    for number, text in enumerate(request.texts, 1):
        if not _is_encodable(text):
            raise BadRequest(f"Text {number} holds half of a surrogate pair: {text[:60]!a}.")
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


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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


def _read_json(body: bytes) -> Request:
    try:
        document = json.loads(_decoded(body))
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The body is no valid JSON: {error}. {_EXAMPLE}") from error
    return _of_document(document)


def _of_document(document: object) -> Request:
    if not isinstance(document, dict):
        return Request(texts=_texts(document))
    if "inputs" not in document and _text_key(document) is None:
        raise BadRequest(
            f"The request has no 'inputs', but {', '.join(map(repr, document)) or 'nothing'}. "
            f"{_EXAMPLE}"
        )
    return Request(
        texts=_texts(document[_text_key(document)]),
        parameters=_parameters(document.get("parameters")),
    )


def _text_key(document: dict[str, Any]) -> str | None:
    return next((key for key in _TEXT_KEYS if key in document), None)


def _texts(value: object) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [_text(item) for item in values]


def _text(item: object) -> str:
    if isinstance(item, dict):
        item = item.get(_text_key(item) or "", item)
    if not isinstance(item, str):
        raise BadRequest(f"An input is {json.dumps(item)[:60]}, not a text. {_EXAMPLE}")
    return item


def _parameters(value: object) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict) or set(value) - set(_PARAMETERS):
        raise BadRequest(
            f"'parameters' is {json.dumps(value)[:60]}: it may hold {', '.join(_PARAMETERS)}, as "
            'in {"inputs": "a text", "parameters": {"top_k": 2}}.'
        )
    given = {name: each for name, each in value.items() if each is not None}
    for name, each in given.items():
        is_right, range_ = _PARAMETERS[name]
        if not is_right(each):
            raise BadRequest(f"{name} is {json.dumps(each)[:60]}. Give {range_}, or leave it out.")
    return given


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
        return Request(texts=texts, parameters=parameters, faults=self._faults)


def _read_csv(body: bytes) -> Request:
    stream = io.StringIO(_decoded(body), newline="")
    try:
        rows = [row for row in csv.reader(stream, strict=True) if any(row)]
    except csv.Error as error:
        raise BadRequest(f"The body is no valid CSV: {error}.") from error
    header = [plain(cell) for cell in rows[0]] if rows else []
    named = next((header.index(name) for name in _TEXT_KEYS if name in header), None)
    column, fields = (0, 1) if named is None else (named, len(header))
    records = _Records()
    for number, row in enumerate(rows, 1):
        if len(row) != fields:
            records.fail(
                f"CSV row {number} has {len(row)} fields: {','.join(row)[:60]!r}. Send one text "
                "in each row, in double quotes where it holds a comma, or a header row that "
                "names the column text."
            )
        elif number > 1 or named is None:
            records.add(Request(texts=[row[column]]))
    return records.request()


def _read_plain(body: bytes) -> Request:
    text = _decoded(body)
    return Request(texts=[text] if text.strip() else [])


_READERS: Mapping[str, Callable[[bytes], Request]] = {
    JSON: _read_json,
    JSON_LINES: _read_json_lines,
    CSV: _read_csv,
    TEXT: _read_plain,
    NPY: _read_npy,
}


def write_answer(prediction: Sequence[Any] | Iterator[str], accept: str) -> tuple[Any, str]:
    """The answer in the first type of `accept` that can be written, and that type; JSON where any
    will do.

    JSON is one list with an entry for each text; JSON Lines has an entry on each line; CSV has
    `label,score` rows without a header, all labels of a text in one row, or a vector's numbers;
    NPY is the array of vectors. A record that could not be read has its error there: in CSV the
    row `error,message`, in NPY numbers that are none (nan). An iterator of pieces of text is
    written piece by piece, as plain text, JSON Lines or server-sent events.

    Raises:
        UnsupportedContentType: none of the types can be written.
    """
    pieces = isinstance(prediction, Iterator)
    writers: Mapping[str, Any] = _PIECE_WRITERS if pieces else _WRITERS
    kinds = [media_type(each) for each in (accept or "*/*").split(",")]
    for kind in kinds:
        if kind in ("*/*", "application/*", JSON):
            kind = JSON_LINES if pieces else JSON
        if kind in writers:
            return writers[kind](prediction), kind
    raise UnsupportedContentType(
        f"Accept {accept!r} is not supported. Ask for {', '.join(writers)}."
    )


def _json(prediction: Sequence[Any]) -> bytes:
    return json.dumps(list(prediction), ensure_ascii=False).encode()


def _json_lines(prediction: Sequence[Any]) -> bytes:
    return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in prediction).encode()


def _csv(prediction: Sequence[Any]) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for entry in prediction:
        writer.writerow(_cells(entry))
    return out.getvalue().encode()


def _cells(entry: Any) -> Iterator[Any]:
    if _is_fault(entry):
        yield from ("error", entry["error"]["message"])
        return
    for item in entry if isinstance(entry, list) else [entry]:
        if isinstance(item, dict):
            yield from item.values()
        else:
            yield item


def _is_fault(entry: Any) -> bool:
    return isinstance(entry, dict) and "error" in entry


def _npy(prediction: Sequence[Any]) -> bytes:
    vectors = [entry for entry in prediction if not _is_fault(entry)]
    if not all(isinstance(entry, list) and entry and type(entry[0]) is float for entry in vectors):
        raise UnsupportedContentType(f"Only vectors can be written as {NPY}; these are no vectors.")
    nothing = [float("nan")] * len(vectors[0])
    rows = [nothing if _is_fault(entry) else entry for entry in prediction]
    out = io.BytesIO()
    np.save(out, np.asarray(rows, dtype=np.float32), allow_pickle=False)
    return out.getvalue()


def _piece_lines(pieces: Iterator[str]) -> Iterator[bytes]:
    for piece in pieces:
        yield _json_lines([{"generated_text": piece}])


def _events(pieces: Iterator[str]) -> Iterator[bytes]:
    for piece in pieces:
        yield b"data: " + _json_lines([{"generated_text": piece}]) + b"\n"


def _plain_pieces(pieces: Iterator[str]) -> Iterator[bytes]:
    for piece in pieces:
        yield piece.encode()


_WRITERS = {JSON: _json, JSON_LINES: _json_lines, CSV: _csv, NPY: _npy}
_PIECE_WRITERS = {JSON_LINES: _piece_lines, EVENTS: _events, TEXT: _plain_pieces}
