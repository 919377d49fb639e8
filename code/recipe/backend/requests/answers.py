"""Writes predictions in the type that a request accepts."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from recipe.backend import turns
from recipe.backend.requests import accept as accept_header
from recipe.backend.requests.payloads import (
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

_HEADER = re.compile(r"text/csv\s*;\s*header\s*=\s*present", re.IGNORECASE)
_WRITTEN_AT_ONCE = 1024
_NOT_FINITE = "the model answered with NaN or infinity: see what it computes"
_BROKEN = {
    "error": {
        "message": "The text broke off: the server's log says why.",
        "type": "server_error",
        "param": None,
        "code": "handler_failed",
    },
    "error_type": "generation",
}


def write_answer(prediction: Any, accept: str) -> tuple[Any, str]:
    """Return the answer in the best type of `accept` that can be written, and that type; JSON if
    any will do.

    JSON is a list with an entry for each input, or, if an `Answers` is `single`, the one entry.
    JSON Lines has an entry on each line; CSV has `label,score` rows, all labels of a text in one
    row, or a vector's numbers, and names its columns first for `text/csv; header=present`; NPY is
    the array of numbers. A record that could not be read has its error there: in CSV the row
    `error,message`, in NPY a row of nan. An iterator of a text's tokens is written one by one, as
    server-sent events, JSON Lines or plain text. A `Document` and an `EventStream` have a type of
    their own.

    Raises:
        UnsupportedContentType: None of the types can be written.
        ValueError: The model has computed NaN or infinity.
    """
    if isinstance(prediction, Document):
        return _as_json(prediction.value).encode(), JSON
    if isinstance(prediction, EventStream):
        return _events(prediction.events), EVENTS
    streams = isinstance(prediction, Iterator)
    writers: Mapping[str, Any] = _STREAM_WRITERS if streams else _WRITERS
    # A stream is not one document of JSON: who asks for that gets its events, as from TGI.
    spellings = SPELLINGS | ({JSON: EVENTS} if streams else {})
    for kind in accept_header.preferred(accept, list(writers), spellings):
        if kind == CSV and _HEADER.search(accept):
            return _csv(prediction, with_header=True), f"{CSV}; header=present"
        return writers[kind](prediction), kind
    raise UnsupportedContentType(
        f"Accept {accept!r} is not supported. Ask for {', '.join(writers)}."
    )


def json_values(value: Any) -> Any:
    """Return `value` as JSON holds it: Python's numbers for arrays and tensors, PNG in base64 for
    an image, as Hugging Face's image answers."""
    if isinstance(value, dict):
        return {str(name): json_values(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_values(entry) for entry in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "save") and hasattr(value, "convert"):
        out = io.BytesIO()
        value.save(out, format="PNG")
        return base64.b64encode(out.getvalue()).decode()
    return value


def _as_json(value: Any) -> str:
    try:
        return "".join(_pieces(value))
    except ValueError as error:
        raise ValueError(_NOT_FINITE) from error


def _pieces(value: Any) -> Iterator[str]:
    """Yield a value as JSON in pieces, with pauses in a long one."""
    if isinstance(value, dict) and any(isinstance(part, list) for part in value.values()):
        for place, (name, part) in enumerate(value.items()):
            yield f"{', ' if place else '{'}{json.dumps(str(name), ensure_ascii=False)}: "
            yield from _pieces(part)
        yield "}"
    elif isinstance(value, list) and any(map(_holds_list, value)):
        for place, part in enumerate(value):
            yield ", " if place else "["
            yield from _pieces(part)
            turns.pause()
        yield "]"
    elif isinstance(value, list) and len(value) > _WRITTEN_AT_ONCE:
        for start in range(0, len(value), _WRITTEN_AT_ONCE):
            part = value[start : start + _WRITTEN_AT_ONCE]
            yield ", " if start else "["
            yield json.dumps(part, ensure_ascii=False, allow_nan=False)[1:-1]
            turns.pause()
        yield "]"
    else:
        yield json.dumps(value, ensure_ascii=False, allow_nan=False)


def _holds_list(value: Any) -> bool:
    return isinstance(value, list) or (
        isinstance(value, dict) and any(isinstance(part, list) for part in value.values())
    )


def _is_fault(entry: Any) -> bool:
    return isinstance(entry, dict) and "error" in entry


def _json(prediction: Sequence[Any]) -> bytes:
    if isinstance(prediction, Answers) and prediction.single:
        return _as_json(prediction.document).encode()
    return _as_json(list(prediction)).encode()


def _csv(prediction: Sequence[Any], with_header: bool = False) -> bytes:
    """Return a row for each entry. The header has the names of the longest one."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    rows = [entry if isinstance(entry, list) else [entry] for entry in prediction]
    if with_header:
        longest = max((row for row in rows if not any(map(_is_fault, row))), key=len, default=[])
        if not all(isinstance(item, dict) for item in longest):
            raise UnsupportedContentType("Numbers without names have no header. Ask for text/csv.")
        writer.writerow(name for item in longest for name in item)
    for row in rows:
        turns.pause()
        cells: list[Any] = []
        for item in row:
            if _is_fault(item):
                cells += ["error", item["error"]["message"]]
                continue
            values = item.values() if isinstance(item, dict) else [item]
            # A field has one line: what is nested stands in it as JSON.
            cells += [_as_json(v) if isinstance(v, (list, dict)) else v for v in values]
        if any(isinstance(cell, float) and not math.isfinite(cell) for cell in cells):
            raise ValueError(_NOT_FINITE)
        writer.writerow(cells)
    return out.getvalue().encode()


def _npy(prediction: Sequence[Any]) -> bytes:
    vectors = [entry for entry in prediction if not _is_fault(entry)]
    try:
        whole = np.stack([np.asarray(vector, dtype=np.float32) for vector in vectors])
    except (TypeError, ValueError) as error:
        raise UnsupportedContentType(
            f"Only vectors and matrices of one size can be written as {NPY}; these are not vectors."
        ) from error
    if not np.isfinite(whole).all():
        raise ValueError(_NOT_FINITE)
    rows = np.full((len(prediction), *whole.shape[1:]), np.nan, dtype=np.float32)
    rows[[not _is_fault(entry) for entry in prediction]] = whole
    out = io.BytesIO()
    np.save(out, rows, allow_pickle=False)
    return out.getvalue()


def _lines(entries: Iterator[Any]) -> Iterator[bytes]:
    for entry in entries:
        yield (_as_json(entry) + "\n").encode()


def _events(pieces: Iterator[Any]) -> Iterator[bytes]:
    """Yield server-sent events. A stream that fails sends an error event before the connection
    breaks, since many clients take its end for the end of the text."""
    try:
        for piece in pieces:
            text = piece if isinstance(piece, str) else _as_json(piece)
            yield f"data: {text}\n\n".encode()
    except Exception:
        yield b"data: " + _as_json(_BROKEN).encode() + b"\n\n"
        raise


_WRITERS = {
    JSON: _json,
    JSON_LINES: lambda prediction: b"".join(_lines(iter(prediction))),
    CSV: _csv,
    NPY: _npy,
}
_STREAM_WRITERS = {
    EVENTS: _events,
    JSON_LINES: _lines,
    TEXT: lambda pieces: (str(piece["token"]["text"]).encode() for piece in pieces),
}
