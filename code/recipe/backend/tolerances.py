"""Compares values of a model that differ by rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def tolerance_of(expected: Sequence[Tensor], dtype: torch.dtype, exact: float = 1e-3) -> float:
    """Return the difference that rounding may cause in values computed in `dtype`; `exact` is what
    float32 may cause, as a share of the largest value."""
    scale = max(float(values.abs().max()) for values in expected)
    return (exact if dtype == torch.float32 else 0.06) * max(scale, 1e-3)


def are_close(one: Sequence[Tensor], other: Sequence[Tensor], tolerance: float) -> bool:
    """Return whether all numbers are within a tolerance, and none is NaN."""
    return all(
        torch.allclose(ours, theirs, atol=tolerance, rtol=0)
        for ours, theirs in zip(one, other, strict=True)
    )
