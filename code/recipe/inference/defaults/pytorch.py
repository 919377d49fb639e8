"""What PyTorch's image does where a file defines no function of a kind.

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

from recipe.errors import ModelError
from recipe.inference.defaults.huggingface import (
    Refused,
    Unsupported,
    bytes_of,
    media_type,
    read_json,
    read_npy,
    text_of,
)

_SUFFIXES = (".pt", ".pth")


def script_files(model_dir: str) -> list[Path]:
    """model.pt where it is there, else every .pt and .pth file of the folder."""
    folder = Path(model_dir)
    if (folder / "model.pt").is_file():
        return [folder / "model.pt"]
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES and path.is_file())


def load_torchscript(model_dir: str) -> Any:
    """The TorchScript module in model.pt, or in the only .pt or .pth file, on this device.

    Raises:
        ModelError: There is none, there are several, or it is no TorchScript.
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
            model = load(str(files[0]), map_location=_device())
        except (RuntimeError, ValueError, OSError) as error:
            raise ModelError(
                f"{files[0]} cannot be loaded as TorchScript: {str(error).splitlines()[0]}",
                "Save it by torch.jit.save, or define model_fn in code/inference.py, which"
                " makes the model and loads its state_dict.",
            ) from error
    return model.eval()


def _device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_of(model: Any) -> Any:
    """Where a module's first parameter or buffer is; else where a new one would be."""
    tensors = (*_first(model, "parameters"), *_first(model, "buffers"))
    return tensors[0].device if tensors else _device()


def _first(model: Any, name: str) -> tuple[Any, ...]:
    values = getattr(model, name, None)
    first = next(iter(values()), None) if callable(values) else None
    return () if first is None else (first,)


def decode(body: str | bytes, content_type: str, model: Any) -> Any:
    """A request's data, as PyTorch's image hands it to `predict_fn`, on the model's device.

    Returns:
        A tensor: float32 of JSON and CSV, of NPY in the dtype that it has. Of CSV it has one
        dimension where there is one row or one column, as numpy.genfromtxt has it. JSON that is
        not numbers, of which PyTorch's image makes nothing, as it is: a dict, texts.

    Raises:
        Refused: (400) The body is not of its type, or its rows have several lengths.
        Unsupported: (415) The type is another one.
    """
    import torch

    kind = media_type(content_type)
    if kind == "application/json":
        value = read_json(body)
        if not _holds_numbers(value):
            return value
        array = _float_array(value)
    elif kind == "text/csv":
        array = _read_csv(text_of(body))
    elif kind == "application/x-npy":
        array = read_npy(bytes_of(body))
    else:
        raise Unsupported(
            f"Content-Type {content_type!r} is not supported without an input_fn of your own."
            " Send application/json, text/csv or application/x-npy."
        )
    try:
        # A copy, since what np.load gives may not be writable.
        return torch.from_numpy(np.array(array, order="C")).to(device_of(model))
    except TypeError as error:
        raise Refused(f"An array of {array.dtype} is no tensor: {error}") from error


def _holds_numbers(value: Any) -> bool:
    """Whether the first value in nested lists is a number: then all must be."""
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, (int, float, list))


def _float_array(value: Any) -> np.ndarray[Any, Any]:
    try:
        array = np.array(value)
        if array.dtype.kind not in "biuf":
            raise ValueError(f"it holds more than numbers ({array.dtype})")
        return array.astype(np.float32)
    except (ValueError, OverflowError) as error:
        raise Refused(f"The JSON array is no tensor of numbers: {error}.") from error


def _read_csv(text: str) -> np.ndarray[Any, Any]:
    """Numbers without a header; numpy.genfromtxt would make nan or -1 of what is none."""
    rows = [row for row in csv.reader(io.StringIO(text, newline="")) if row]
    if not rows:
        raise Refused("The CSV has no row.")
    numbers = []
    for place, row in enumerate(rows, 1):
        if len(row) != len(rows[0]):
            raise Refused(
                f"Row {place} of the CSV has {len(row)} fields, the first {len(rows[0])}."
            )
        try:
            numbers.append([float(cell) for cell in row])
        except ValueError as error:
            raise Refused(f"Row {place} of the CSV is not of numbers: {error}.") from error
    return np.squeeze(np.array(numbers, dtype=np.float32))
