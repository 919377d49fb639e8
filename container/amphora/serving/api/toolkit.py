"""Bodies as AWS's images decode them for users' handlers: the default `input_fn`.

Hugging Face's returns JSON unchanged, CSV and images as a dict with the key "inputs", and NPY as an
array. PyTorch's returns numbers, of which the handlers' defaults make a tensor.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import sys
from typing import Any

from amphora.serving.api.huggingface import text_of
from amphora.serving.api.media import CSV, JSON, NPY, media_type, unsupported_type
from amphora.serving.protocol.media_types import Fault, bad_request

_NESTED = {"zero-shot-classification", "table-question-answering"}
_CSV_NAMES = ("question", "context", "inputs")
_MOST_PIXELS = 64_000_000


def decode(body: str | bytes, content_type: str, task: str = "", *, numbers: bool = False) -> Any:
    """Return a request's data as Hugging Face's image passes it to `predict_fn`, or PyTorch's.

    That is for JSON its value, for CSV {"inputs": [...]}, which two tasks do not accept, for NPY an
    array, for an image {"inputs": image}, and for audio {"inputs": bytes}. PyTorch's image takes
    the first three types, and reads CSV as `numbers`. Raise Fault: 400 if the body is not of its
    type, 413 for too large an image, 415 for other types.
    """
    kind = media_type(content_type)
    if kind == JSON:
        text = text_of(body)
        try:
            return json.loads(text)  # in which NaN is allowed
        except (ValueError, RecursionError) as error:
            raise bad_request(f"The body is not valid JSON: {error}.") from error
    if kind == CSV:
        if task in _NESTED:
            raise bad_request(f"{task} has nested requests, which CSV cannot hold: send JSON.")
        return _csv_numbers(text_of(body)) if numbers else _csv_records(text_of(body))
    data = body.encode() if isinstance(body, str) else bytes(body)
    if kind == NPY:
        return _array(data)
    if kind.startswith("image/") and not numbers:
        return {"inputs": _image(data)}
    if kind.startswith("audio/") and not numbers:
        return {"inputs": data}
    known = f"{JSON}, {CSV} or {NPY}" if numbers else f"{JSON}, {CSV}, {NPY}, image/* or audio/*"
    raise unsupported_type(
        f"Content-Type {content_type!r} is not supported. Send {known}, or define input_fn."
    )


def _array(body: bytes) -> Any:
    """Return the array of an NPY body, but none of objects, since pickle would run code."""
    import numpy as np

    try:
        array = np.load(io.BytesIO(body), allow_pickle=False)
    except Exception as error:
        # A malicious header raises MemoryError, TokenError, BadZipFile and others.
        raise bad_request(f"The body is not a valid NPY array: {error}") from error
    if not isinstance(array, np.ndarray):
        raise bad_request("The body is an NPZ archive, not an NPY array.")
    return array


def _image(body: bytes) -> Any:
    """Return an image in RGB, of at most AMPHORA_MAX_PIXELS."""
    from PIL import Image

    setting = os.environ.get("AMPHORA_MAX_PIXELS", "")
    most = int(setting) if setting.isdecimal() else _MOST_PIXELS
    try:
        image = Image.open(io.BytesIO(body))
        width, height = image.size
        if width * height > most:
            message = (
                f"The image has {width:,} x {height:,} pixels; {most:,} are allowed"
                " (AMPHORA_MAX_PIXELS)."
            )
            raise Fault(413, "too_costly", message)
        return image.convert("RGB")
    except Fault:
        raise
    except Exception as error:
        # Decoders of damaged images raise exceptions of many types.
        why = re.sub(r" ?<_io\.[^<>]*>", "", str(error))
        raise bad_request(f"The body is not a readable image: {why}.") from error


def _csv_records(text: str) -> dict[str, Any]:
    """Return CSV rows as dicts, or only the texts if a column is named inputs. Raise Fault (400) if
    the first line does not name the columns, or a row has more or fewer fields."""
    header = next(iter(text.splitlines()), "")
    if not any(name in header.lower() for name in _CSV_NAMES):
        raise bad_request(
            "The CSV's first line must name its columns: inputs, or question and context. "
            "AMPHORA_HANDLER_DEFAULTS=pytorch reads a CSV of numbers."
        )
    # The toolkit would take the whole line for the name of one column.
    marks = (mark for mark in ",;\t|" if set(header.lower().split(mark)) & set(_CSV_NAMES))
    delimiter = next(marks, ",")
    csv.field_size_limit(sys.maxsize)
    try:
        stream = io.StringIO(text, newline="")
        rows = list(csv.DictReader(stream, delimiter=delimiter, strict=True))
    except csv.Error as error:
        raise bad_request(f"The body is not valid CSV: {error}.") from error
    if not rows:
        raise bad_request("The CSV has no row below its header.")
    for number, row in enumerate(rows, 2):
        # DictReader stores surplus fields under the key None, and None for missing fields.
        if None in row or None in row.values():
            raise bad_request(
                f"Line {number} of the CSV has another number of fields than its header."
            )
    return {"inputs": [row["inputs"] for row in rows] if "inputs" in rows[0] else rows}


def _csv_numbers(text: str) -> Any:
    """Return the numbers of CSV without a header, as numpy.genfromtxt shapes them, in float32: one
    row or one column has one dimension. Raise Fault (400) for cells of which that makes nan or -1,
    and for rows of several lengths."""
    import numpy as np

    rows = [row for row in csv.reader(io.StringIO(text, newline="")) if row]
    if not rows:
        raise bad_request("The CSV has no row.")
    numbers = []
    for index, row in enumerate(rows, 1):
        if len(row) != len(rows[0]):
            message = f"Row {index} of the CSV has {len(row)} fields, the first {len(rows[0])}."
            raise bad_request(message)
        try:
            numbers.append([float(cell) for cell in row])
        except ValueError as error:
            message = f"Row {index} of the CSV does not hold numbers: {error}."
            raise bad_request(message) from error
    return np.squeeze(np.array(numbers, dtype=np.float32))
