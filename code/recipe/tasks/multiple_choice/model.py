"""Models with a head of one number for each choice, on rows of one choice each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from transformers import AutoModelForMultipleChoice

from recipe.models import lora


def pairs_of(context: str, question: str, choices: Sequence[str]) -> list[tuple[str, str]]:
    """Return the two texts that the model reads for each choice.

    As run_swag.py of transformers does, the choice follows the question; without a context, the
    question itself is the first text.
    """
    if not context:
        return [(question, choice) for choice in choices]
    return [(context, f"{question} {choice}") for choice in choices]


def patch_forward_for_choices(model: Any) -> None:
    """Let `model` take [rows, tokens], each row a choice, and return logits [rows, 1].

    transformers gives it [samples, choices, tokens], all samples with equally many choices.
    """
    lora.patch_forward(model, _forward)


def _forward(model: Any, usual: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
    rows = {
        name: value[:, None] if isinstance(value, Tensor) and value.dim() == 2 else value
        for name, value in inputs.items()
    }
    return usual(*args, **rows)


class ScorerOfChoices:
    """Loads models of AutoModelForMultipleChoice that take rows of one choice each."""

    @staticmethod
    def from_pretrained(*args: Any, **options: Any) -> Any:
        """Return the model as AutoModelForMultipleChoice does, maybe with its loading report."""
        loaded = AutoModelForMultipleChoice.from_pretrained(*args, **options)
        patch_forward_for_choices(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded
