"""Predictions of any kind to the body of an answer: what stands behind a missing `output_fn`.

Tensors and arrays become nested lists, other values what JSON has for them; `encode` says which. It
never imports torch or pandas itself: a prediction that needs them has imported them.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import dataclasses
import io
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any
from uuid import UUID

import numpy as np

from recipe.inference import accept
from recipe.inference.accept import NotAcceptable

JSON, JSON_LINES, CSV = "application/json", "application/jsonlines", "text/csv"
NPY, TEXT, EVENTS = "application/x-npy", "text/plain", "text/event-stream"
BYTES = "application/octet-stream"
SPELLINGS = {
    "application/x-jsonlines": JSON_LINES,
    "application/jsonl": JSON_LINES,
    "application/x-ndjson": JSON_LINES,
}


class Unencodable(TypeError):
    """A value that no answer can hold; the message names its type and its place."""


def encode(prediction: Any, accepted: str) -> tuple[bytes | Iterator[bytes], str]:
    """The body of an answer, and its type: the best of JSON, JSON Lines, CSV, NPY and plain text
    that `accepted` takes and the prediction can be written in.

    - JSON: tensors of any device and dtype, arrays, numpy's numbers, DataFrames (a list of
      records) and Series, dicts, dataclasses, ModelOutputs, lists, tuples, sets, strings, dates
      (as `str` writes them), Decimals (as numbers), UUIDs, paths, enums, images (PNG in base64).
    - JSON Lines: an entry of a list, or a row of a table, on each line.
    - CSV: a row for each entry; of records with a line of their names first.
    - NPY: the array that the prediction is.
    - Plain text: a string as it is, other values as JSON.
    - bytes are sent as they are; an image (PIL) as the type that is asked for.
    - A generator or iterator is streamed: pieces of str and bytes as they are, other ones as JSON
      Lines.

    Raises:
        NotAcceptable: (406) None of these types is accepted, or those that are cannot hold it.
        Unencodable: A value in it has a type that no answer can hold, or is NaN or infinite where
            JSON was asked for: JSON has no such numbers, and null would hide a broken model.
    """
    if isinstance(prediction, (bytes, bytearray, memoryview)):
        return bytes(prediction), _type_of_bytes(bytes(prediction), accepted)
    if _is_image(prediction) and (image := _image(prediction, accepted)) is not None:
        return image
    if isinstance(prediction, Iterator):
        return _stream(prediction, accepted)
    kinds = accept.preferred(accepted, list(_WRITERS), SPELLINGS)
    if not kinds:
        raise NotAcceptable(f"Accept {accepted!r} is none of {', '.join(_WRITERS)}.")
    refusals = []
    for kind in kinds:
        try:
            return _WRITERS[kind](prediction), kind
        except NotAcceptable as error:
            refusals.append(error)
    # A value that cannot be sent at all is the handlers' fault, and not the client's.
    to_json(prediction)
    raise refusals[0]


def to_json(value: Any) -> bytes:
    """A value as JSON, in the compact form of Hugging Face's image. Raises Unencodable."""
    try:
        try:
            text = _dumps(value)
        except TypeError:
            # Keys that are no strings, for the most part: numpy's numbers.
            text = _dumps(plain(value))
        try:
            return text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON escapes
            return _dumps(plain(value), ensure_ascii=True).encode()
    except (ValueError, RecursionError) as error:
        with contextlib.suppress(RecursionError):
            if place := _unwritable(plain(value)):
                raise Unencodable(place) from error
        raise Unencodable(f"The prediction cannot be written as JSON: {error}.") from error


def _dumps(value: Any, ensure_ascii: bool = False) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, allow_nan=False, separators=(",", ":"), default=_simpler
    )


def _unwritable(value: Any, place: str = "prediction") -> str:
    """Which number of a plain value is none that JSON has; '' where all are."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{place} is {value}, which JSON cannot hold."
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, list):
        entries = enumerate(value)
    return next(filter(None, (_unwritable(each, f"{place}[{key!r}]") for key, each in entries)), "")


def plain(value: Any) -> Any:
    """A value of dicts, lists, strings, numbers, booleans and None only. Raises Unencodable."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_key(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, (str, int, float)) and not isinstance(value, (Enum, np.generic)):
        return value
    return plain(_simpler(value))


def _key(key: Any) -> str:
    """As json.dumps writes keys."""
    if isinstance(key, Enum):
        key = key.value
    if isinstance(key, np.generic):
        key = key.item()
    if isinstance(key, str):
        return key
    if key is None or isinstance(key, (bool, int, float)):
        return str(json.dumps(key))
    if isinstance(key, (date, UUID)):
        return str(key)
    raise Unencodable(f"A key of the prediction is a {_name(key)}, which no answer can hold.")


def _simpler(value: Any) -> Any:
    """One step towards plain values, for what JSON does not know."""
    if is_tensor(value):
        return lists_of_tensor(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return _list_of(np.asanyarray(value))
    for test, simpler in _SIMPLER:
        if test(value):
            return simpler(value)
    raise Unencodable(f"The prediction holds a {_name(value)}, which no answer can hold.")


def _name(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _is_from(value: Any, library: str, *names: str) -> bool:
    """Whether a value's class, or one that it inherits from, is one of a library's."""
    return any(
        kind.__name__ in names and kind.__module__.partition(".")[0] == library
        for kind in type(value).__mro__
    )


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor of torch, of any class that inherits from it."""
    return _is_from(value, "torch", "Tensor")


def _is_frame(value: Any) -> bool:
    return _is_from(value, "pandas", "DataFrame")


def _is_image(value: Any) -> bool:
    return _is_from(value, "PIL", "Image")


def lists_of_tensor(tensor: Any) -> Any:
    """A tensor's numbers in nested lists; the number itself where it has no dimensions."""
    return _list_of(_array_of_tensor(tensor))


def _array_of_tensor(tensor: Any) -> np.ndarray[Any, Any]:
    """A tensor on the host; numpy has neither bfloat16 nor the types of 8 bits."""
    if getattr(tensor, "is_nested", False):
        raise Unencodable("The prediction is a nested tensor: return its parts as a list.")
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    tensor = tensor.detach()
    if str(tensor.layout) != "torch.strided":
        tensor = tensor.to_dense()
    tensor = tensor.cpu().resolve_conj().resolve_neg()
    if str(tensor.dtype) not in _NUMPY_DTYPES:
        tensor = tensor.float()
    array: np.ndarray[Any, Any] = tensor.numpy()
    return array


_NUMPY_DTYPES = {
    f"torch.{name}"
    for name in (
        "float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32",
        "uint16", "uint8", "bool", "complex64", "complex128",
    )
}  # fmt: skip


def _list_of(array: np.ndarray[Any, Any]) -> Any:
    """Python's numbers in nested lists; an array without dimensions is its number."""
    if array.dtype.names is not None:
        names = array.dtype.names
        if array.ndim == 0:
            return {name: array[name] for name in names}
        return [_list_of(each) for each in array]
    if array.dtype.kind == "c":
        raise Unencodable(f"The prediction holds {array.dtype} numbers, which no answer can hold.")
    if array.dtype.kind in "mM":
        # Of nanoseconds tolist() makes bare numbers.
        known = array.astype("timedelta64[us]") if array.dtype.kind == "m" else array.astype(str)
        objects = known.astype(object)
        return np.where(np.isnat(array), np.array(None), objects).tolist()
    if array.dtype == np.longdouble:
        array = array.astype(np.float64)
    return array.tolist()


def _records(frame: Any) -> list[dict[Any, Any]]:
    """A DataFrame's rows. Raises Unencodable where two columns have one name."""
    names = list(frame.columns)
    if len(set(names)) < len(names):
        raise Unencodable(f"The DataFrame has columns of one name: {names}.")
    columns = [_cells(frame[name]) for name in names]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _cells(column: Any) -> list[Any]:
    """A column's values; what is missing is null. Only in a column of floats NaN is a number."""
    if getattr(column.dtype, "kind", "O") == "f":
        return list(column.tolist())
    pairs = zip(column.tolist(), column.isna(), strict=True)
    return [None if missing else each for each, missing in pairs]


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _base64(image: Any) -> str:
    out = io.BytesIO()
    image.save(out, format="PNG")
    return base64.b64encode(out.getvalue()).decode()


def _sorted(values: Set[Any]) -> list[Any]:
    """A set's values in an order that is the same each time, where they have one."""
    try:
        return sorted(values)
    except TypeError:
        return list(values)


def _decimal(value: Decimal) -> Any:
    return int(value) if value == value.to_integral_value() else float(value)


_SIMPLER: Sequence[tuple[Callable[[Any], bool], Callable[[Any], Any]]] = (
    (lambda value: isinstance(value, Enum), lambda value: value.value),
    (lambda value: type(value).__name__ in ("NaTType", "NAType"), lambda value: None),
    (lambda value: isinstance(value, (date, time, timedelta, UUID, PurePath)), str),
    (
        lambda value: isinstance(value, Decimal),
        lambda value: _decimal(value) if value.is_finite() else float(value),
    ),
    (_is_frame, _records),
    (
        lambda value: _is_from(value, "pandas", "Series", "Index", "ExtensionArray"),
        _cells,
    ),
    (_is_image, _base64),
    (lambda value: dataclasses.is_dataclass(value) and not isinstance(value, type), _fields),
    (lambda value: isinstance(value, Mapping), dict),
    (lambda value: isinstance(value, Set), _sorted),
    (lambda value: callable(getattr(value, "model_dump", None)), lambda value: value.model_dump()),
    (lambda value: callable(getattr(value, "toarray", None)), lambda value: value.toarray()),
    (lambda value: callable(getattr(value, "tolist", None)), lambda value: value.tolist()),
    (
        lambda value: (
            isinstance(value, Iterable) and not isinstance(value, (bytes, bytearray, memoryview))
        ),
        list,
    ),
)


def _json_lines(prediction: Any) -> bytes:
    value = plain(prediction)
    entries = value if isinstance(value, list) else [value]
    return b"".join(to_json(entry) + b"\n" for entry in entries)


def _csv(prediction: Any) -> bytes:
    """A row for each entry of a list, or one row; a cell that is a list or a dict holds JSON."""
    value = plain(prediction)
    if value is None:
        raise Unencodable("The prediction is None, which CSV cannot hold.")
    rows = value if isinstance(value, list) else [value]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    if rows and all(isinstance(row, dict) for row in rows):
        names = list(dict.fromkeys(name for row in rows for name in row))
        writer.writerow(names)
        writer.writerows([_csv_cell(row.get(name)) for name in names] for row in rows)
    else:
        for row in rows:
            writer.writerow(map(_csv_cell, row if isinstance(row, list) else [row]))
    return out.getvalue().encode()


def _csv_cell(value: Any) -> Any:
    return to_json(value).decode() if isinstance(value, (list, dict)) else value


def _npy(prediction: Any) -> bytes:
    array = _as_array(prediction)
    if array.dtype.hasobject:
        raise NotAcceptable(f"A {_name(prediction)} cannot be written as {NPY}: it is no array.")
    out = io.BytesIO()
    np.save(out, array, allow_pickle=False)
    return out.getvalue()


def _as_array(prediction: Any) -> np.ndarray[Any, Any]:
    if is_tensor(prediction):
        return _array_of_tensor(prediction)
    if isinstance(prediction, (np.ndarray, np.generic)):
        return np.asanyarray(prediction)
    if _is_from(prediction, "pandas", "DataFrame", "Series", "Index"):
        return np.asarray(prediction.to_numpy())
    try:
        return np.array(plain(prediction))
    except ValueError:  # rows of several lengths
        return np.array(None)


def _text(prediction: Any) -> bytes:
    return prediction.encode() if isinstance(prediction, str) else to_json(prediction)


_WRITERS: Mapping[str, Callable[[Any], bytes]] = {
    JSON: to_json,
    JSON_LINES: _json_lines,
    CSV: _csv,
    NPY: _npy,
    TEXT: _text,
}


def _type_of_bytes(body: bytes, accepted: str) -> str:
    """What bytes are called: as the client asked, unless it asked for JSON and they are none."""
    best = accept.best(accepted)
    if "*" not in best and best != JSON:
        return best
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return BYTES
    return JSON


_IMAGE_FORMATS = {
    "image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP", "image/gif": "GIF",
    "image/bmp": "BMP", "image/tiff": "TIFF",
}  # fmt: skip


def _image(image: Any, accepted: str) -> tuple[bytes, str] | None:
    """An image in the type that is asked for; None where no image is."""
    spellings = {"image/x-image": "image/png"}
    offers = [*_IMAGE_FORMATS, *_WRITERS] if "image/" in accepted else list(_WRITERS)
    kinds = accept.preferred(accepted, offers, spellings)
    if not kinds or kinds[0] not in _IMAGE_FORMATS:
        return None
    out = io.BytesIO()
    converted = image.convert("RGB") if kinds[0] == "image/jpeg" else image
    converted.save(out, format=_IMAGE_FORMATS[kinds[0]])
    return out.getvalue(), kinds[0]


def _stream(pieces: Iterator[Any], accepted: str) -> tuple[Iterator[bytes], str]:
    """The pieces as they come. The first is waited for: it says of what kind they are."""
    first = next(pieces, None)
    whole = itertools.chain([] if first is None else [first], pieces)
    if not isinstance(first, (str, bytes)):
        return (to_json(piece) + b"\n" for piece in whole), JSON_LINES
    offers = [TEXT, EVENTS, BYTES] if isinstance(first, str) else [BYTES, TEXT, EVENTS]
    kind = next(iter(accept.preferred(accepted, offers)), offers[0])
    return (piece.encode() if isinstance(piece, str) else bytes(piece) for piece in whole), kind
