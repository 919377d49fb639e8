"""Writes predictions of any type as the body of an answer: the default `output_fn`.

Tensors and arrays become nested lists, and other values what `encode` describes. This module never
imports torch: if a prediction needs it, it is already imported.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import io
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView, Sequence, Set
from datetime import date
from enum import Enum
from typing import Any

import numpy as np

from recipe.backend.requests import accept
from recipe.backend.requests.accept import NotAcceptable
from recipe.backend.requests.payloads import CSV, EVENTS, JSON, JSON_LINES, NPY, SPELLINGS, TEXT

BYTES = "application/octet-stream"


class Unencodable(TypeError):
    """A value that cannot be written. The message names its type and its position."""


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
        NotAcceptable: (406) No accepted type can hold the prediction.
        Unencodable: A value cannot be written, or is NaN or infinite, which JSON does not have;
            null would hide a broken model.
    """
    if isinstance(prediction, (bytes, bytearray, memoryview)):
        # The type that the client accepts, unless that is JSON and the bytes are not.
        body, kind = bytes(prediction), accept.best(accepted)
        if "*" in kind or kind == JSON:
            try:
                json.loads(body)
                kind = JSON
            except (ValueError, RecursionError):
                kind = BYTES
        return body, kind
    if isinstance(prediction, Iterator):
        return stream(prediction, accepted)
    kinds = accept.preferred(accepted, list(_WRITERS), SPELLINGS)
    if not kinds:
        raise NotAcceptable(
            f"Accept {accepted!r} has none of the supported types: {', '.join(_WRITERS)}."
        )
    refusals = []
    for kind in kinds:
        try:
            return _WRITERS[kind](prediction), kind
        except NotAcceptable as error:
            refusals.append(error)
    # A value that no type can hold is an error of the handlers, not of the client.
    to_json(prediction)
    raise refusals[0]


def stream(pieces: Iterator[Any], accepted: str) -> tuple[Iterator[bytes], str]:
    """Wait for the first piece, and return the pieces and their type."""
    first = next(pieces, None)
    whole = itertools.chain([] if first is None else [first], pieces)
    if not isinstance(first, (str, bytes)):
        return (to_json(piece) + b"\n" for piece in whole), JSON_LINES
    offers = [TEXT, EVENTS, BYTES] if isinstance(first, str) else [BYTES, TEXT, EVENTS]
    kind = next(iter(accept.preferred(accepted, offers)), offers[0])
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
        return f"{location} is {value}, which JSON does not support."
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
    if isinstance(value, (str, int, float)) and not isinstance(value, (Enum, np.generic)):
        return value
    return plain(_simpler(value))


def _key(key: Any) -> str:
    """Return a dict's key as json.dumps writes it."""
    if isinstance(key, np.generic):
        key = key.item()
    if key is None or isinstance(key, (bool, int, float)):
        return str(json.dumps(key))
    if isinstance(key, str):
        return key
    raise Unencodable(f"A key of the prediction is a {_name(key)}, which no answer can hold.")


def _simpler(value: Any) -> Any:
    """Return a simpler form of a value that is not a type of JSON."""
    if isinstance(value, (np.ndarray, np.generic)):
        return lists_of_array(np.asanyarray(value))
    if is_tensor(value):
        return lists_of_array(array_of_tensor(value))
    for test, simpler in _SIMPLER:
        if test(value):
            return simpler(value)
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


def array_of_tensor(tensor: Any) -> np.ndarray[Any, Any]:
    """Return a tensor as an array; float32 for types that numpy lacks, such as bfloat16."""
    tensor = tensor.detach()
    tensor = (tensor if str(tensor.layout) == "torch.strided" else tensor.to_dense()).cpu()
    try:
        array: np.ndarray[Any, Any] = tensor.numpy()
    except TypeError:
        array = tensor.float().numpy()
    return array


def lists_of_array(array: np.ndarray[Any, Any]) -> Any:
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


_SIMPLER: Sequence[tuple[Callable[[Any], bool], Callable[[Any], Any]]] = (
    (lambda value: isinstance(value, Enum), lambda value: value.value),
    (lambda value: isinstance(value, date), str),
    (lambda value: _is_from(value, "PIL", "Image"), base64_of_image),
    (lambda value: isinstance(value, Mapping), dict),
    (lambda value: isinstance(value, Set), lambda value: sorted(value, key=str)),
    (lambda value: callable(getattr(value, "toarray", None)), lambda value: value.toarray()),
    (lambda value: callable(getattr(value, "tolist", None)), lambda value: value.tolist()),
    (
        # Not all iterables: a DataFrame iterates over the names of its columns.
        lambda value: (
            isinstance(value, (Iterator, MappingView, Sequence))
            and not isinstance(value, (bytes, bytearray, memoryview))
        ),
        list,
    ),
)


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
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in rows:
        cells = row if isinstance(row, list) else [row]
        writer.writerow(
            to_json(cell).decode() if isinstance(cell, (list, dict)) else cell for cell in cells
        )
    return out.getvalue().encode()


def to_npy(prediction: Any) -> bytes:
    """Return the prediction as an NPY array. Raise NotAcceptable if it is not an array."""
    if is_tensor(prediction):
        array = array_of_tensor(prediction)
    elif isinstance(prediction, (np.ndarray, np.generic)):
        array = np.asanyarray(prediction)
    else:
        try:
            array = np.array(plain(prediction))
        except ValueError:  # rows of several lengths
            array = np.array(None)
    if array.dtype.hasobject:
        raise NotAcceptable(
            f"A {_name(prediction)} cannot be written as {NPY}: it is not an array."
        )
    out = io.BytesIO()
    np.save(out, array, allow_pickle=False)
    return out.getvalue()


_WRITERS: Mapping[str, Callable[[Any], bytes]] = {
    JSON: to_json,
    JSON_LINES: to_json_lines,
    CSV: to_csv,
    NPY: to_npy,
    TEXT: lambda value: value.encode() if isinstance(value, str) else to_json(value),
}
