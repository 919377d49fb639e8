"""The handlers of PyTorch's image, for files that do not define them: a request is a tensor, with
which `predict_fn` calls the model."""

from __future__ import annotations

from typing import Any

import numpy as np

from recipe.backend.requests.payloads import BadRequest


def device_of(model: Any) -> Any:
    """Return the device of a module's first parameter or buffer. Without any, return the GPU if
    there is one, else the CPU."""
    import torch

    for name in ("parameters", "buffers"):
        tensors = getattr(model, name, None)
        if callable(tensors) and (first := next(iter(tensors()), None)) is not None:
            return first.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def to_tensor(value: Any, model: Any) -> Any:
    """Return a request's data as PyTorch's image passes it to `predict_fn`: a tensor on the model's
    device, in float32 for JSON, in the dtype of an array.

    JSON other than numbers, which PyTorch's image refuses, is returned unchanged, such as a dict or
    texts. Raise BadRequest (400) if rows differ in length, or an array cannot be a tensor.
    """
    import torch

    array = value
    if not isinstance(value, np.ndarray):
        first = value
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
    try:
        # Copy, since an array of np.load may be read-only.
        return torch.from_numpy(np.array(array, order="C")).to(device_of(model))
    except TypeError as error:
        raise BadRequest(f"An array of {array.dtype} cannot be a tensor: {error}") from error
