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


def preference_losses(
    changes: Tensor, tokens: Tensor, kind: str, beta: float, smoothing: float
) -> Tensor:
    """Return the losses [pairs] of TRL's DPOTrainer; `sigmoid` smoothed as in its older releases.

    Args:
        changes: [pairs, 2], the increase of the log-probabilities of the chosen and of the rejected
            answer since the start of training.
        tokens: [pairs, 2], how many tokens each answer has.
        kind: The hyperparameter loss_type.
        smoothing: The probability that the two answers are swapped.
    """
    if kind == "ipo":
        # Means over tokens, as in the paper; the square aims at a margin of 1 / (2 beta).
        means = changes / tokens.clamp(min=1)
        return (means[:, 0] - means[:, 1] - 1 / (2 * beta)).square()
    margins = beta * (changes[:, 0] - changes[:, 1])
    if kind == "hinge":
        return torch.relu(1 - margins)
    right, mistaken = -functional.logsigmoid(margins), -functional.logsigmoid(-margins)
    if kind == "robust":
        return ((1 - smoothing) * right - smoothing * mistaken) / (1 - 2 * smoothing)
    return (1 - smoothing) * right + smoothing * mistaken
