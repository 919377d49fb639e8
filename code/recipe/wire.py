"""Requests and answers: bytes to texts, predictions to bytes. No model here."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recipe.names import TEXT_NAMES, plain

JSON, JSON_LINES, CSV = "application/json", "application/jsonlines", "text/csv"
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


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a request asks."""

    texts: Sequence[str]
    top_k: int | None = None
    """How many labels to give for each text, best first; None for the best one alone."""


def media_type(header: str) -> str:
    """`text/csv` of `Text/CSV; charset=utf-8`, in the spelling this module uses."""
    plain_type = header.partition(";")[0].strip().lower()
    return _SPELLINGS.get(plain_type, plain_type)


def read_request(body: bytes, content_type: str) -> Request:
    """The texts of a JSON, JSON Lines, CSV or plain text body in UTF-8.

    Raises:
        BadRequest: the body is not of its type, or holds no texts.
        UnsupportedContentType: the type is another one.
    """
    readers = {
        JSON: _read_json,
        JSON_LINES: _read_json_lines,
        CSV: _read_csv,
        "text/plain": _read_plain,
    }
    kind = media_type(content_type)
    if kind not in readers:
        raise UnsupportedContentType(
            f"Content-Type {content_type!r} is not supported. Send {', '.join(readers)}."
        )
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadRequest(f"The body is not UTF-8: {error.reason} at byte {error.start}.") from error
    request = readers[kind](text)
    if not request.texts:
        raise BadRequest(f"The request holds no text. {_EXAMPLE}")
    return request


def _read_json(text: str) -> Request:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadRequest(f"The body is no valid JSON: {error}. {_EXAMPLE}") from error
    return _of_document(document)


def _of_document(document: object) -> Request:
    if not isinstance(document, dict):
        return Request(texts=_texts(document))
    parameters = document.get("parameters")
    if "inputs" not in document and _text_key(document) is None:
        raise BadRequest(
            f"The request has no 'inputs', but {', '.join(map(repr, document)) or 'nothing'}. "
            f"{_EXAMPLE}"
        )
    return Request(texts=_texts(document[_text_key(document)]), top_k=_top_k(parameters))


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


def _top_k(parameters: object) -> int | None:
    if parameters is None:
        return None
    if not isinstance(parameters, dict) or set(parameters) - {"top_k"}:
        raise BadRequest(
            f"'parameters' is {json.dumps(parameters)[:60]}: the only parameter is top_k, as in "
            '{"inputs": "a text", "parameters": {"top_k": 2}}.'
        )
    top_k = parameters.get("top_k")
    if top_k is not None and (type(top_k) is not int or top_k < 1):
        raise BadRequest(f"top_k is {json.dumps(top_k)[:60]}. Give 1 or more, or leave it out.")
    return top_k


def _read_json_lines(text: str) -> Request:
    requests = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                requests.append(_of_document(json.loads(line)))
            except ValueError as error:
                raise BadRequest(f"Line {number}: {error}") from error
    if len({request.top_k for request in requests}) > 1:
        raise BadRequest("The lines ask for different top_k. Send one request for each.")
    return Request(
        texts=[text for request in requests for text in request.texts],
        top_k=requests[0].top_k if requests else None,
    )


def _read_csv(text: str) -> Request:
    try:
        rows = [row for row in csv.reader(io.StringIO(text, newline=""), strict=True) if any(row)]
    except csv.Error as error:
        raise BadRequest(f"The body is no valid CSV: {error}.") from error
    header = [plain(cell) for cell in rows[0]] if rows else []
    named = next((header.index(name) for name in _TEXT_KEYS if name in header), None)
    column, body = (0, rows) if named is None else (named, rows[1:])
    for number, row in enumerate(rows, 1):
        if len(row) != len(header) or (named is None and len(row) > 1):
            raise BadRequest(
                f"CSV row {number} has {len(row)} fields: {','.join(row)[:60]!r}. Send one text "
                "in each row, in double quotes where it holds a comma, or a header row that "
                "names the column text."
            )
    return Request(texts=[row[column] for row in body])


def _read_plain(text: str) -> Request:
    return Request(texts=[text] if text.strip() else [])


def write_answer(prediction: Sequence[Label | list[Label]], accept: str) -> bytes:
    """The answer in the first type of `accept` that can be written; JSON where any will do.

    JSON is one list with an entry for each text; JSON Lines has an entry on each line; CSV has
    `label,score` rows without a header, all labels of a text in one row.

    Raises:
        UnsupportedContentType: none of the types can be written.
    """
    writers = {JSON: _json, JSON_LINES: _json_lines, CSV: _csv}
    kinds = [media_type(each) for each in (accept or "*/*").split(",")]
    for kind in kinds:
        if kind in ("*/*", "application/*"):
            kind = JSON
        if kind in writers:
            return writers[kind](prediction).encode()
    raise UnsupportedContentType(
        f"Accept {accept!r} is not supported. Ask for {', '.join(writers)}."
    )


def _json(prediction: Sequence[Label | list[Label]]) -> str:
    return json.dumps(list(prediction), ensure_ascii=False)


def _json_lines(prediction: Sequence[Label | list[Label]]) -> str:
    return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in prediction)


def _csv(prediction: Sequence[Label | list[Label]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for entry in prediction:
        labels = entry if isinstance(entry, list) else [entry]
        writer.writerow(value for label in labels for value in (label["label"], label["score"]))
    return out.getvalue()
