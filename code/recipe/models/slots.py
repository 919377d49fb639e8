"""Samples of several texts (`batching.groups`): a model's answers to the texts, by samples."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.nn import functional

from recipe.models import lora


def take_groups(model: Any) -> None:
    """Let `model` take batches of groups beside those it always took.

    Its answer to one has logits [samples, most, labels]; where a sample has no text, of any other.
    """
    inner = lora.bare(model)
    inner.forward = functools.partial(_forward, inner.forward)


def _forward(usual: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
    slots = inputs.pop("slots", None)
    outputs = usual(*args, **inputs)
    if slots is not None:
        # Not by an index, whose gradient CUDA sums in another order each time.
        outputs.logits = functional.embedding(slots, outputs.logits)
    return outputs
