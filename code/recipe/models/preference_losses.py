"""Losses of preferences: of a pair's log-probabilities, and those of the model before training.

As TRL's DPOTrainer has them, in values and gradients (by a test): its `label_smoothing` with
`sigmoid`, which it once called cDPO, is that of its earlier releases.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def losses(changes: Tensor, tokens: Tensor, kind: str, beta: float, smoothing: float) -> Tensor:
    """[pairs]: each pair's loss.

    Args:
        changes: [pairs, 2], by how much the log-probability of the chosen answer and that of the
            rejected one have risen since before training.
        tokens: [pairs, 2], how many tokens each answer has.
        kind: The hyperparameter loss_type.
        smoothing: How likely it is that both answers were mistaken for each other.
    """
    if kind == "ipo":
        # Of means over tokens, as the authors have it; the square aims at a margin of 1 / 2 beta.
        means = changes / tokens.clamp(min=1)
        return (means[:, 0] - means[:, 1] - 1 / (2 * beta)).square()
    margins = beta * (changes[:, 0] - changes[:, 1])
    if kind == "hinge":
        return torch.relu(1 - margins)
    right, mistaken = -functional.logsigmoid(margins), -functional.logsigmoid(-margins)
    if kind == "robust":
        return ((1 - smoothing) * right - smoothing * mistaken) / (1 - 2 * smoothing)
    return (1 - smoothing) * right + smoothing * mistaken
