"""The handlers of PyTorch's image, for files that do not define them.

`input_fn` converts JSON, CSV or NPY to a tensor, with which `predict_fn` calls the model.
"""

from __future__ import annotations

import csv
import io
from typing import Any

import numpy as np

from recipe.backend.requests.bodies import text_of
from recipe.backend.requests.payloads import (
    CSV,
    JSON,
    NPY,
    BadRequest,
    UnsupportedContentType,
    media_type,
)
from recipe.inference.defaults.huggingface import array_of, bytes_of, read_json


def device_of(model: Any) -> Any:
    """Return the device of a module's first parameter or buffer. Without any, return the GPU if
    there is one, else the CPU."""
    import torch

    for name in ("parameters", "buffers"):
        tensors = getattr(model, name, None)
        if callable(tensors) and (first := next(iter(tensors()), None)) is not None:
            return first.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def decode(body: str | bytes, content_type: str, model: Any) -> Any:
    """Return a request's data as PyTorch's image passes it to `predict_fn`: a tensor on the model's
    device, in float32 for JSON and CSV, in the array's dtype for NPY.

    CSV of one row or one column becomes one dimension, as with numpy.genfromtxt. JSON other than
    numbers, which PyTorch's image refuses, is returned unchanged, such as a dict or texts. Raise
    BadRequest (400) if the body is not of its type, or its rows differ in length, and
    UnsupportedContentType (415) for other types.
    """
    import torch

    kind = media_type(content_type)
    if kind == JSON:
        value = first = read_json(body)
        # If the first value in nested lists is a number, all must be.
        while isinstance(first, list) and first:
            first = first[0]
        if not isinstance(first, (int, float, list)):
            return value
        try:
            array = np.array(value)
            if array.dtype.kind not in "biuf":
                raise ValueError(f"it has values other than numbers ({array.dtype})")
            array = array.astype(np.float32)
        except (ValueError, OverflowError) as error:
            raise BadRequest(f"The JSON array is not a tensor of numbers: {error}.") from error
    elif kind == CSV:
        array = read_numbers(text_of(body))
    elif kind == NPY:
        array = array_of(bytes_of(body))
    else:
        raise UnsupportedContentType(
            f"Content-Type {content_type!r} is not supported. Send {JSON}, {CSV} or {NPY}, or"
            " define input_fn."
        )
    try:
        # Copy, since an array of np.load may be read-only.
        return torch.from_numpy(np.array(array, order="C")).to(device_of(model))
    except TypeError as error:
        raise BadRequest(f"An array of {array.dtype} cannot be a tensor: {error}") from error


def read_numbers(text: str) -> np.ndarray[Any, Any]:
    """Return the numbers of CSV without a header, as numpy.genfromtxt shapes them, float32. Raise
    BadRequest for cells of which that makes nan or -1, and for rows of several lengths."""
    rows = [row for row in csv.reader(io.StringIO(text, newline="")) if row]
    if not rows:
        raise BadRequest("The CSV has no row.")
    numbers = []
    for index, row in enumerate(rows, 1):
        if len(row) != len(rows[0]):
            raise BadRequest(
                f"Row {index} of the CSV has {len(row)} fields, the first {len(rows[0])}."
            )
        try:
            numbers.append([float(cell) for cell in row])
        except ValueError as error:
            raise BadRequest(f"Row {index} of the CSV does not hold numbers: {error}.") from error
    return np.squeeze(np.array(numbers, dtype=np.float32))
