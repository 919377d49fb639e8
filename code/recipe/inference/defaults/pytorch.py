"""The functions of PyTorch's image that a file may leave out.

`model_fn` loads TorchScript; `input_fn` makes a tensor of JSON, CSV or NPY; `predict_fn` calls the
model with it.
"""

from __future__ import annotations

import csv
import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from recipe.backend.requests.payloads import (
    CSV,
    JSON,
    NPY,
    BadRequest,
    UnsupportedContentType,
    media_type,
)
from recipe.errors import ModelError
from recipe.inference.defaults.huggingface import bytes_of, read_json, read_npy, text_of

_SUFFIXES = (".pt", ".pth")


def script_files(model_dir: str) -> list[Path]:
    """Return model.pt if it is there, else every .pt and .pth file of the folder."""
    folder = Path(model_dir)
    if (folder / "model.pt").is_file():
        return [folder / "model.pt"]
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES and path.is_file())


def load_torchscript(model_dir: str) -> Any:
    """Load the TorchScript module in model.pt, or in the only .pt or .pth file, on this device.

    Raises:
        ModelError: There is none, there are several, or the file is not TorchScript.
    """
    import torch

    files = script_files(model_dir)
    if len(files) != 1:
        names = ", ".join(path.name for path in files) or "none"
        raise ModelError(
            f"Without a model_fn exactly one .pt or .pth file with TorchScript is served;"
            f" {model_dir} has {names}.",
            "Name one of them model.pt, or define model_fn in code/inference.py.",
        )
    with warnings.catch_warnings():
        # torch advises torch.export, which is not what the files hold that come from its image.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            load: Any = torch.jit.load
            model = load(str(files[0]), map_location=device_of(None))
        except (RuntimeError, ValueError, OSError) as error:
            raise ModelError(
                f"{files[0]} cannot be loaded as TorchScript: {str(error).splitlines()[0]}",
                "Save it by torch.jit.save, or define model_fn in code/inference.py, which"
                " makes the model and loads its state_dict.",
            ) from error
    return model.eval()


def device_of(model: Any) -> Any:
    """Return the device of a module's first parameter or buffer; of a model without any, the GPU if
    there is one."""
    import torch

    for name in ("parameters", "buffers"):
        tensors = getattr(model, name, None)
        if callable(tensors) and (first := next(iter(tensors()), None)) is not None:
            return first.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def decode(body: str | bytes, content_type: str, model: Any) -> Any:
    """Return a request's data as PyTorch's image passes it to `predict_fn`, on the model's device.

    Returns:
        A tensor: float32 for JSON and CSV, the array's dtype for NPY. For CSV with one row or one
        column it has one dimension, as in numpy.genfromtxt. JSON that is not numbers (a dict,
        texts), which PyTorch's image refuses, is returned unchanged.

    Raises:
        BadRequest: (400) The body is not of its type, or its rows have several lengths.
        UnsupportedContentType: (415) The type is another one.
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
                raise ValueError(f"it holds more than numbers ({array.dtype})")
            array = array.astype(np.float32)
        except (ValueError, OverflowError) as error:
            raise BadRequest(f"The JSON array is not a tensor of numbers: {error}.") from error
    elif kind == CSV:
        array = read_numbers(text_of(body))
    elif kind == NPY:
        array = read_npy(bytes_of(body))
    else:
        raise UnsupportedContentType(
            f"Content-Type {content_type!r} is not supported without your own input_fn."
            f" Send {JSON}, {CSV} or {NPY}."
        )
    try:
        # A copy, since what np.load gives may not be writable.
        return torch.from_numpy(np.array(array, order="C")).to(device_of(model))
    except TypeError as error:
        raise BadRequest(f"An array of {array.dtype} cannot be a tensor: {error}") from error


def read_numbers(text: str) -> np.ndarray[Any, Any]:
    """Return the numbers of CSV without a header, as numpy.genfromtxt shapes them, float32.

    Raises:
        BadRequest: A cell is not a number, of which numpy.genfromtxt would make nan or -1, or the
            rows have several lengths.
    """
    rows = [row for row in csv.reader(io.StringIO(text, newline="")) if row]
    if not rows:
        raise BadRequest("The CSV has no row.")
    numbers = []
    for place, row in enumerate(rows, 1):
        if len(row) != len(rows[0]):
            raise BadRequest(
                f"Row {place} of the CSV has {len(row)} fields, the first {len(rows[0])}."
            )
        try:
            numbers.append([float(cell) for cell in row])
        except ValueError as error:
            raise BadRequest(f"Row {place} of the CSV does not hold numbers: {error}.") from error
    return np.squeeze(np.array(numbers, dtype=np.float32))
