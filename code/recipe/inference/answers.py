"""Predictions to bytes, in the type that a request's Accept asks for. No model here."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from recipe.inference import accept as accept_header
from recipe.inference.payloads import (
    CSV,
    EVENTS,
    JSON,
    JSON_LINES,
    NPY,
    SPELLINGS,
    TEXT,
    Answers,
    Document,
    EventStream,
    UnsupportedContentType,
)


def write_answer(prediction: Any, accept: str) -> tuple[Any, str]:
    """The answer in the type of `accept` that is wanted most and can be written, and that type;
    JSON where any will do.

    JSON is a list with an entry for each input, or, where an `Answers` is `single`, the one entry.
    JSON Lines has an entry on each line; CSV has `label,score` rows, all labels of a text in one
    row, or a vector's numbers, and names its columns first for `text/csv; header=present`; NPY is
    the array of numbers. A record that could not be read has its error there: in CSV the row
    `error,message`, in NPY numbers that are none (nan). An iterator of a text's tokens is written
    one by one, as server-sent events, JSON Lines or plain text. A `Document` and an `EventStream`
    have a type of their own.

    Raises:
        UnsupportedContentType: none of the types can be written.
        ValueError: the model has computed numbers that are none (NaN or infinity).
    """
    if isinstance(prediction, Document):
        return _dumped(prediction.value).encode(), JSON
    if isinstance(prediction, EventStream):
        return _events(prediction.events), EVENTS
    pieces = isinstance(prediction, Iterator)
    writers: Mapping[str, Any] = _PIECE_WRITERS if pieces else _WRITERS
    # A stream is no one document of JSON: who asks for that gets its events, as from TGI.
    spellings = SPELLINGS | ({JSON: EVENTS} if pieces else {})
    for kind in accept_header.preferred(accept, list(writers), spellings):
        body = writers[kind](prediction)
        if kind == CSV and _HEADER.search(accept):
            return _header(prediction) + body, f"{CSV}; header=present"
        return body, kind
    raise UnsupportedContentType(
        f"Accept {accept!r} is not supported. Ask for {', '.join(writers)}."
    )


_HEADER = re.compile(r"text/csv\s*;\s*header\s*=\s*present", re.IGNORECASE)


def plain(value: Any) -> Any:
    """`value` as JSON holds it: of arrays, tensors and their numbers Python's own, of an image its
    PNG in base64, as Hugging Face's image answers."""
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "save") and hasattr(value, "convert"):
        out = io.BytesIO()
        value.save(out, format="PNG")
        return base64.b64encode(out.getvalue()).decode()
    return value


def _dumped(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise ValueError(_NO_NUMBER) from error


_NO_NUMBER = "the model answered with numbers that are none (NaN or infinity): see what it computes"


def _json(prediction: Sequence[Any]) -> bytes:
    whole = prediction.document if isinstance(prediction, Answers) else list(prediction)
    return _dumped(whole).encode()


def _json_lines(prediction: Sequence[Any]) -> bytes:
    return "".join(_dumped(entry) + "\n" for entry in prediction).encode()


def _csv(prediction: Sequence[Any]) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for entry in prediction:
        cells = list(_cells(entry))
        if any(isinstance(cell, float) and not math.isfinite(cell) for cell in cells):
            raise ValueError(_NO_NUMBER)
        writer.writerow(cells)
    return out.getvalue().encode()


def _header(prediction: Iterable[Any]) -> bytes:
    """The names of the columns of the longest entry."""
    entries = [each if isinstance(each, list) else [each] for each in prediction]
    good = [entry for entry in entries if not any(map(_is_fault, entry))]
    longest = max(good, key=len, default=[])
    if not all(isinstance(item, dict) for item in longest):
        raise UnsupportedContentType("Numbers without names have no header. Ask for text/csv.")
    return (",".join(name for item in longest for name in item) + "\n").encode()


def _cells(entry: Any) -> Iterator[Any]:
    if _is_fault(entry):
        yield from ("error", entry["error"]["message"])
        return
    for item in entry if isinstance(entry, list) else [entry]:
        values = item.values() if isinstance(item, dict) else [item]
        for value in values:
            # A field has one line: what is nested stands in it as JSON.
            yield _dumped(value) if isinstance(value, (list, dict)) else value


def _is_fault(entry: Any) -> bool:
    return isinstance(entry, dict) and "error" in entry


def _npy(prediction: Sequence[Any]) -> bytes:
    numbers = [entry for entry in prediction if not _is_fault(entry)]
    try:
        arrays = [np.asarray(entry, dtype=np.float32) for entry in numbers]
        whole = np.stack(arrays)
    except (TypeError, ValueError) as error:
        raise UnsupportedContentType(
            f"Only vectors and matrices of one size can be written as {NPY}; these are no vectors."
        ) from error
    if not np.isfinite(whole).all():
        raise ValueError(_NO_NUMBER)
    rows = np.full((len(prediction), *whole.shape[1:]), np.nan, dtype=np.float32)
    rows[[not _is_fault(entry) for entry in prediction]] = whole
    out = io.BytesIO()
    np.save(out, rows, allow_pickle=False)
    return out.getvalue()


def _piece_lines(pieces: Iterator[Any]) -> Iterator[bytes]:
    for piece in pieces:
        yield _json_lines([piece])


def _events(pieces: Iterator[Any]) -> Iterator[bytes]:
    """Server-sent events. One that breaks off says so before the connection breaks, since many a
    client takes the end of a stream for the end of its text."""
    try:
        for piece in pieces:
            text = piece if isinstance(piece, str) else _dumped(piece)
            yield f"data: {text}\n\n".encode()
    except Exception:
        yield b"data: " + _dumped(_BROKEN).encode() + b"\n\n"
        raise


_BROKEN = {
    "error": {
        "message": "The text broke off: the server's log says why.",
        "type": "server_error",
        "param": None,
        "code": "handler_failed",
    },
    "error_type": "generation",
}


def _plain_pieces(pieces: Iterator[Any]) -> Iterator[bytes]:
    for piece in pieces:
        yield str(piece["token"]["text"]).encode()


_WRITERS = {JSON: _json, JSON_LINES: _json_lines, CSV: _csv, NPY: _npy}
_PIECE_WRITERS = {EVENTS: _events, JSON_LINES: _piece_lines, TEXT: _plain_pieces}
