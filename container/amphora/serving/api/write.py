"""Writes answers: those of the APIs, and predictions of any type of users' handlers.

Tensors and arrays become nested lists, and other values what `encode` describes. This module never
imports torch or numpy unless a prediction is of theirs, or NPY is to be written.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import io
import itertools
import json
import math
import wave
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView, Sequence, Set
from datetime import date
from enum import Enum
from functools import partial
from typing import Any

from amphora.serving.api import media
from amphora.serving.api.media import BYTES, CSV, EVENTS, JSON, JSON_LINES, NPY, PNG, TEXT, WAV
from amphora.serving.protocol.media_types import Fault

_CHUNK_ENTRIES = 1024
_BROKEN = {
    "error": {
        "message": "The generation failed. The server's log has the reason.",
        "type": "server_error",
        "param": None,
        "code": "handler_failed",
    },
    "error_type": "generation",
}


class Unencodable(TypeError):
    """A value that cannot be written. The message names its type and its position."""


def document(value: Any, pause: Callable[[], None] = lambda: None) -> tuple[bytes, str]:
    """Return an answer that is JSON, whatever types the client accepts, and its type. Raise
    Unencodable if it contains NaN or infinity."""
    return b"".join(_pieces(value, pause)), JSON


def entries(
    answers: Sequence[Any],
    accept: str,
    *,
    single: bool = False,
    pause: Callable[[], None] = lambda: None,
) -> tuple[bytes, str]:
    """Return the answers to the inputs of a request in the type that `accept` prefers, and that
    type. The default is JSON.

    - JSON: a list with an entry for each input, or the entry if it is `single`.
    - JSON Lines: an entry on each line.
    - CSV: a row for each input, with all its labels and scores or the numbers of its vector.
    - NPY: an array of numbers.
    - PNG, WAV: the only answer, if it is an image or audio with its sampling rate.

    Invalid records have an error in their place: in CSV the row `error,message`, in NPY a row of
    nan. Raise Fault (406) if no accepted type can hold the answer, and Unencodable if it contains
    NaN or infinity.
    """

    def write_csv() -> bytes:
        if "header" in accept:
            raise media.not_acceptable(f"CSV has no header: accept {CSV}.")
        rows = []
        for answer in answers:
            pause()
            cells: list[Any] = []
            for item in answer if isinstance(answer, list) else [answer]:
                if _is_fault(item):
                    cells += ["error", item["error"]["message"]]
                else:
                    cells += item.values() if isinstance(item, dict) else [item]
            _check_finite(all(not isinstance(c, float) or math.isfinite(c) for c in cells))
            rows.append(cells)
        return _rows_as_csv(rows)

    writers: dict[str, Callable[[], bytes]] = {
        JSON: lambda: document(answers[0] if single else list(answers), pause)[0],
        JSON_LINES: lambda: b"".join(document(answer, pause)[0] + b"\n" for answer in answers),
        CSV: write_csv,
        NPY: lambda: _vectors_as_npy(answers),
    }
    if len(answers) == 1 and _is_from(answers[0], "PIL", "Image"):
        writers[PNG] = lambda: base64.b64decode(base64_of_image(answers[0]))
    elif len(answers) == 1 and isinstance(answers[0], dict) and "sampling_rate" in answers[0]:
        writers[WAV] = lambda: _as_wav(answers[0])
    return _first_written(writers, accept)


def _first_written(writers: Mapping[str, Callable[[], bytes]], accept: str) -> tuple[bytes, str]:
    """Return what the first writer of an accepted type writes. Raise Fault (406) if none can."""
    refusals = []
    for kind in media.preferred(accept, list(writers), media.SPELLINGS):
        try:
            return writers[kind](), kind
        except Fault as fault:
            refusals.append(fault)
    if refusals:
        raise refusals[0]
    message = f"Accept {accept!r} is not supported. Ask for {', '.join(writers)}."
    raise media.not_acceptable(message)


def stream_type(accept: str, kinds: Sequence[str], *, is_document: bool) -> str:
    """Return the type among `kinds` in which a stream is sent. Raise Fault (406) if none is
    accepted, unless the API knows only the first."""
    # A stream is not one JSON document. Clients that accept JSON get events, as from TGI.
    accepted = media.preferred(accept, kinds, {**media.SPELLINGS, JSON: EVENTS})
    if not accepted and not is_document:
        message = f"Accept {accept!r} is not supported. Ask for {', '.join(kinds)}."
        raise media.not_acceptable(message)
    return next(iter(accepted), kinds[0])


def stream(events: Iterator[Any], kind: str) -> Iterator[bytes]:
    """Return the events of generated texts in a type of `stream_type`. Wait for the first one, so
    that an error before it has an error status."""
    first = list(itertools.islice(events, 1))

    def pieces() -> Iterator[bytes]:
        try:
            for piece in itertools.chain(first, events):
                yield event(piece, kind)
        except Exception:
            # Many clients take a closed connection for the end of the text.
            if kind == EVENTS:
                yield event(_BROKEN)
            raise

    return pieces()


def event(value: Any, kind: str = EVENTS) -> bytes:
    """Return an event of a stream: a JSON value, or a string that is sent unchanged."""
    if kind == TEXT:
        return str(value["token"]["text"]).encode()
    if kind == JSON_LINES:
        return to_json(value) + b"\n"
    return b"data: " + (value.encode() if isinstance(value, str) else to_json(value)) + b"\n\n"


def _pieces(value: Any, pause: Callable[[], None]) -> Iterator[bytes]:
    """Yield a value as JSON in pieces, with pauses between the pieces of a long one."""
    if isinstance(value, dict) and _holds_list(value):
        for index, (name, part) in enumerate(value.items()):
            yield (b"," if index else b"{") + to_json(str(name)) + b":"
            yield from _pieces(part, pause)
        yield b"}"
    elif isinstance(value, list) and any(map(_holds_list, value)):
        for index, part in enumerate(value):
            yield b"," if index else b"["
            yield from _pieces(part, pause)
            pause()
        yield b"]"
    elif isinstance(value, list) and len(value) > _CHUNK_ENTRIES:
        for start in range(0, len(value), _CHUNK_ENTRIES):
            yield b"," if start else b"["
            yield to_json(value[start : start + _CHUNK_ENTRIES])[1:-1]
            pause()
        yield b"]"
    else:
        yield to_json(value)


def _holds_list(value: Any) -> bool:
    return isinstance(value, list) or (
        isinstance(value, dict) and any(isinstance(part, list) for part in value.values())
    )


def _is_fault(entry: Any) -> bool:
    return isinstance(entry, dict) and "error" in entry


def _rows_as_csv(rows: Sequence[Sequence[Any]]) -> bytes:
    """Return rows as CSV; a list or dict in a cell is JSON."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in rows:
        cells = [to_json(c).decode() if isinstance(c, (list, dict)) else c for c in row]
        writer.writerow(cells)
    return out.getvalue().encode()


def _vectors_as_npy(answers: Sequence[Any]) -> bytes:
    import numpy as np

    vectors = [answer for answer in answers if not _is_fault(answer)]
    try:
        whole = np.stack([np.asarray(vector, dtype=np.float32) for vector in vectors])
    except (TypeError, ValueError) as error:
        raise media.not_acceptable(
            f"Only vectors and matrices of one size can be sent as {NPY}; this answer has none."
        ) from error
    _check_finite(np.isfinite(whole).all())
    rows = np.full((len(answers), *whole.shape[1:]), np.nan, dtype=np.float32)
    rows[[not _is_fault(answer) for answer in answers]] = whole
    return _as_npy(rows)


def _as_wav(answer: Mapping[str, Any]) -> bytes:
    """Return audio [samples] or [channels, samples] as WAV of 16 bits."""
    import numpy as np

    samples = np.atleast_2d(np.asarray(answer["audio"], dtype=np.float32))
    _check_finite(np.isfinite(samples).all())
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((len(samples), 2, answer["sampling_rate"], 0, "NONE", ""))
        file.writeframes((samples.T.clip(-1, 1) * 32767).astype("<i2").tobytes())
    return out.getvalue()


def _as_npy(array: Any) -> bytes:
    import numpy as np

    out = io.BytesIO()
    np.save(out, array, allow_pickle=False)
    return out.getvalue()


_REMEDY = "check the model's weights and code"


def _check_finite(is_finite: Any) -> None:
    if not is_finite:
        raise Unencodable(f"The prediction holds NaN or infinity: {_REMEDY}.")


def encode(prediction: Any, accepted: str) -> tuple[bytes | Iterator[bytes], str]:
    """Return the body of an answer and its type: the type among JSON, JSON Lines, CSV, NPY and
    plain text that `accepted` prefers and that can hold the prediction.

    - JSON: tensors of any device and dtype, arrays of numbers and strings, dicts, ModelOutputs,
      lists, tuples, sets, strings, dates (as `str` writes them), images (PNG in base64).
    - JSON Lines: an entry of a list on each line.
    - CSV: a row for each entry; of records with a line of their names first.
    - NPY: the array that the prediction is.
    - Plain text: strings unchanged, other values as JSON.
    - bytes are sent unchanged.
    - Generators and iterators are streamed: str and bytes unchanged, other values as JSON Lines.

    Raises:
        Fault: (406) No accepted type can hold the prediction.
        Unencodable: A value cannot be written, or is NaN or infinite, which JSON does not have;
            null would hide a broken model.
    """
    if isinstance(prediction, (bytes, bytearray, memoryview)):
        # The type that the client accepts, unless that is JSON and the bytes are not.
        body, kind = bytes(prediction), media.best(accepted)
        if "*" in kind or kind == JSON:
            try:
                json.loads(body)
                kind = JSON
            except (ValueError, RecursionError):
                kind = BYTES
        return body, kind
    if isinstance(prediction, Iterator):
        return _stream_pieces(prediction, accepted)
    writers = {kind: partial(write, prediction) for kind, write in _WRITERS.items()}
    try:
        return _first_written(writers, accepted)
    except Fault:
        if media.preferred(accepted, list(_WRITERS), media.SPELLINGS):
            # A value that no type can hold is an error of the handlers, not of the client.
            to_json(prediction)
        raise


def _stream_pieces(pieces: Iterator[Any], accepted: str) -> tuple[Iterator[bytes], str]:
    """Wait for the first piece, and return the pieces and their type."""
    first = next(pieces, None)
    whole = itertools.chain([] if first is None else [first], pieces)
    if not isinstance(first, (str, bytes)):
        return (to_json(piece) + b"\n" for piece in whole), JSON_LINES
    offers = [TEXT, EVENTS, BYTES] if isinstance(first, str) else [BYTES, TEXT, EVENTS]
    kind = next(iter(media.preferred(accepted, offers)), offers[0])
    return (piece.encode() if isinstance(piece, str) else bytes(piece) for piece in whole), kind


def to_json(value: Any) -> bytes:
    """Return a value as JSON, in the compact form of Hugging Face's image. Raise Unencodable."""

    def dumps(value: Any, ensure_ascii: bool = False) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, allow_nan=False, separators=(",", ":"),
            default=_simpler,
        )  # fmt: skip

    try:
        try:
            text = dumps(value)
        except TypeError:
            # Keys that are not strings, for the most part: numpy's numbers.
            text = dumps(plain(value))
        try:
            return text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON escapes
            return dumps(plain(value), ensure_ascii=True).encode()
    except (ValueError, RecursionError) as error:
        with contextlib.suppress(RecursionError):
            if location := unwritable(plain(value)):
                raise Unencodable(location) from error
        raise Unencodable(f"The prediction cannot be written as JSON: {error}.") from error


def unwritable(value: Any, location: str = "prediction") -> str:
    """Return a message about the first NaN or infinity, or ''."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{location} is {value}, which JSON does not support: {_REMEDY}."
    entries: Iterable[tuple[Any, Any]] = enumerate(value) if isinstance(value, list) else ()
    if isinstance(value, dict):
        entries = value.items()
    faults = (unwritable(part, f"{location}[{key!r}]") for key, part in entries)
    return next(filter(None, faults), "")


def plain(value: Any) -> Any:
    """Return a value as dicts, lists, strings, numbers, booleans and None, or raise Unencodable."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_key(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, (str, int, float)) and not isinstance(value, Enum) and not is_array(value):
        return value
    return plain(_simpler(value))


def _key(key: Any) -> str:
    """Return a dict's key as json.dumps writes it."""
    if is_array(key):
        key = key.item()
    if key is None or isinstance(key, (bool, int, float)):
        return str(json.dumps(key))
    if isinstance(key, str):
        return key
    raise Unencodable(f"A key of the prediction is a {_name(key)}, which no answer can hold.")


def _simpler(value: Any) -> Any:
    """Return a simpler form of a value that is not a type of JSON."""
    if is_array(value):
        return lists_of_array(value)
    if is_tensor(value):
        return lists_of_array(array_of_tensor(value))
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, date):
        return str(value)
    if _is_from(value, "PIL", "Image"):
        return base64_of_image(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Set):
        return sorted(value, key=str)
    for method in ("toarray", "tolist"):
        if callable(convert := getattr(value, method, None)):
            return convert()
    # Not all iterables: a DataFrame iterates over the names of its columns.
    are_entries = isinstance(value, (Iterator, MappingView, Sequence))
    if are_entries and not isinstance(value, (bytes, bytearray, memoryview)):
        return list(value)
    raise Unencodable(
        f"The prediction holds a {_name(value)}, which no answer can hold: return dicts, lists, "
        "numbers and texts, or define output_fn."
    )


def _name(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _is_from(value: Any, library: str, *names: str) -> bool:
    """Return whether a value's class inherits from one of a library's classes."""
    return any(
        kind.__name__ in names and kind.__module__.partition(".")[0] == library
        for kind in type(value).__mro__
    )


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor of torch."""
    return _is_from(value, "torch", "Tensor")


def is_array(value: Any) -> bool:
    """Return whether a value is an array or a number of numpy."""
    return _is_from(value, "numpy", "ndarray", "generic")


def array_of_tensor(tensor: Any) -> Any:
    """Return a tensor as an array; float32 for types that numpy lacks, such as bfloat16."""
    tensor = tensor.detach()
    tensor = (tensor if str(tensor.layout) == "torch.strided" else tensor.to_dense()).cpu()
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.float().numpy()


def lists_of_array(array: Any) -> Any:
    """Return an array's numbers in nested lists, or the number if it has no dimensions."""
    if array.dtype.names is not None or array.dtype.kind in "mMc":
        raise Unencodable(
            f"The prediction holds an array of {array.dtype}, which no answer can hold: return"
            " numbers or strings, for example by .astype(str)."
        )
    return array.tolist()


def base64_of_image(image: Any) -> str:
    """Return a PIL image as PNG in base64."""
    out = io.BytesIO()
    image.save(out, format="PNG")
    return base64.b64encode(out.getvalue()).decode()


def to_json_lines(prediction: Any) -> bytes:
    """Return a line of JSON for each entry of a list, or one line. Raise Unencodable."""
    value = plain(prediction)
    entries = value if isinstance(value, list) else [value]
    return b"".join(to_json(entry) + b"\n" for entry in entries)


def to_csv(prediction: Any) -> bytes:
    """Return a row for each entry of a list, or one row; a list or dict in a cell is JSON. Raise
    Unencodable if a value has a type that no answer can hold, or all of it is None."""
    value = plain(prediction)
    if value is None:
        raise Unencodable("The prediction is None, which CSV cannot hold.")
    rows = value if isinstance(value, list) else [value]
    if rows and all(isinstance(row, dict) for row in rows):
        names = list(dict.fromkeys(name for row in rows for name in row))
        rows = [names, *([row.get(name) for name in names] for row in rows)]
    return _rows_as_csv([row if isinstance(row, list) else [row] for row in rows])


def to_npy(prediction: Any) -> bytes:
    """Return the prediction as an NPY array. Raise Fault (406) if it is not an array."""
    import numpy as np

    if is_tensor(prediction):
        array = array_of_tensor(prediction)
    elif is_array(prediction):
        array = np.asanyarray(prediction)
    else:
        try:
            array = np.array(plain(prediction))
        except ValueError:  # rows of several lengths
            array = np.array(None)
    if array.dtype.hasobject:
        message = f"A {_name(prediction)} cannot be written as {NPY}: it is not an array."
        raise media.not_acceptable(message)
    return _as_npy(array)


_WRITERS: Mapping[str, Callable[[Any], bytes]] = {
    JSON: to_json,
    JSON_LINES: to_json_lines,
    CSV: to_csv,
    NPY: to_npy,
    TEXT: lambda value: value.encode() if isinstance(value, str) else to_json(value),
}
