"""Writes predictions in the type that a request accepts."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
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
    Document,
    EventStream,
    UnsupportedContentType,
)

_CHUNK_ENTRIES = 1024
_NOT_FINITE = "the model's answer contains NaN or infinity: check its weights and its code"
_BROKEN = {
    "error": {
        "message": "The generation failed. The server's log has the reason.",
        "type": "server_error",
        "param": None,
        "code": "handler_failed",
    },
    "error_type": "generation",
}


def write_answer(prediction: Any, accept: str) -> tuple[Any, str]:
    """Return the answer in the type that `accept` prefers, and that type. The default is JSON.

    - JSON: a list with an entry for each input, or the entry if an `Answers` is `single`.
    - JSON Lines: an entry on each line.
    - CSV: a row for each input, with all its labels and scores or the numbers of its vector.
    - NPY: an array of numbers.

    Invalid records have an error in their place: in CSV the row `error,message`, in NPY a row of
    nan. An iterator over tokens is sent as server-sent events, JSON Lines or plain text. A
    `Document` is always JSON, and an `EventStream` server-sent events.

    Raise UnsupportedContentType if no accepted type can hold the answer, and ValueError if it
    contains NaN or infinity.
    """
    if isinstance(prediction, Document):
        return _as_json(prediction.value).encode(), JSON
    if isinstance(prediction, EventStream):
        return _events(_begun(prediction.events)), EVENTS
    streams = isinstance(prediction, Iterator)
    if streams:
        prediction = _begun(prediction)
    writers: Mapping[str, Any] = _STREAM_WRITERS if streams else _WRITERS
    # A stream is not one JSON document. Clients that accept JSON get events, as from TGI.
    spellings = SPELLINGS | ({JSON: EVENTS} if streams else {})
    refusals = []
    for kind in accept_header.preferred(accept, list(writers), spellings):
        try:
            if kind == CSV and "header" in accept:
                raise UnsupportedContentType(f"CSV has no header: accept {CSV}.")
            return writers[kind](prediction), kind
        except UnsupportedContentType as error:
            refusals.append(error)
    message = f"Accept {accept!r} is not supported. Ask for {', '.join(writers)}."
    raise refusals[0] if refusals else UnsupportedContentType(message)


def _begun(pieces: Iterator[Any]) -> Iterator[Any]:
    """Wait for the first piece, so that an error before it gets an error status."""
    first = list(itertools.islice(pieces, 1))
    return itertools.chain(first, pieces)


def _as_json(value: Any) -> str:
    try:
        return "".join(_pieces(value))
    except ValueError as error:
        raise ValueError(_NOT_FINITE) from error


def _pieces(value: Any) -> Iterator[str]:
    """Yield a value as JSON in pieces, with pauses between the pieces of a long one."""
    if isinstance(value, dict) and _holds_list(value):
        for index, (name, part) in enumerate(value.items()):
            yield f"{', ' if index else '{'}{json.dumps(str(name), ensure_ascii=False)}: "
            yield from _pieces(part)
        yield "}"
    elif isinstance(value, list) and any(map(_holds_list, value)):
        for index, part in enumerate(value):
            yield ", " if index else "["
            yield from _pieces(part)
            turns.pause()
        yield "]"
    elif isinstance(value, list) and len(value) > _CHUNK_ENTRIES:
        for start in range(0, len(value), _CHUNK_ENTRIES):
            part = value[start : start + _CHUNK_ENTRIES]
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


def _csv(prediction: Sequence[Any]) -> bytes:
    """Return a row for each entry."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    rows = [entry if isinstance(entry, list) else [entry] for entry in prediction]
    for row in rows:
        turns.pause()
        cells: list[Any] = []
        for item in row:
            if _is_fault(item):
                cells += ["error", item["error"]["message"]]
                continue
            values = item.values() if isinstance(item, dict) else [item]
            # Nested values are JSON in one field.
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
            f"Only vectors and matrices of one size can be sent as {NPY}; this answer has none."
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
    """Yield server-sent events. A failing stream ends with an error event, since many clients take
    a closed connection for the end of the text."""
    try:
        for piece in pieces:
            text = piece if isinstance(piece, str) else _as_json(piece)
            yield f"data: {text}\n\n".encode()
    except Exception:
        yield b"data: " + _as_json(_BROKEN).encode() + b"\n\n"
        raise


_WRITERS = {
    JSON: lambda prediction: _as_json(
        prediction[0] if getattr(prediction, "single", False) else list(prediction)
    ).encode(),
    JSON_LINES: lambda prediction: b"".join(_lines(iter(prediction))),
    CSV: _csv,
    NPY: _npy,
}
_STREAM_WRITERS = {
    EVENTS: _events,
    JSON_LINES: _lines,
    TEXT: lambda pieces: (str(piece["token"]["text"]).encode() for piece in pieces),
}
