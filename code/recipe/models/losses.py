"""The loss of each sample, so that the optimised mean does not depend on the batch layout."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def sample_losses(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the losses [samples] in float32.

    Args:
        logits: [samples, labels].
        labels: Class ids [samples]; or floats: one target [samples] for each sample (mean squared
            error), or several [samples, labels] between 0 and 1 (binary cross-entropy).
        smoothing: Share of the target spread evenly over all classes; for class ids only.
    """
    logits = logits.float()
    if not torch.is_floating_point(labels):
        return functional.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    if labels.dim() == 1:
        return (logits.squeeze(-1) - labels).square()
    losses = functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return losses.mean(dim=-1)
