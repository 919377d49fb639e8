"""Declare a hyperparameter: its default, help, other names, valid values and effect.

The fields of `recipe.settings`, and of the `options` of a task's spec, are declared by `option`.
argv, `--help`, the checks of values, docs/REFERENCE.md and what a resume compares follow from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

Valid = tuple[Callable[[Any], bool], str]
"""A test of a number, and its description."""
AT_LEAST_1: Valid = (lambda value: value >= 1, "1 or more")
ABOVE_0: Valid = (lambda value: value > 0, "a number above 0")
BUDGET: Valid = (lambda value: 0 < value <= 1e9, "a number above 0, at most 1e9")
NOT_BELOW_0: Valid = (lambda value: value >= 0, "0 or more")
SHARE: Valid = (lambda value: 0 <= value < 1, "a number from 0 to below 1")


class Effect(Enum):
    """What a different value changes. A resume is refused if the final weights would change."""

    WEIGHTS = "the final weights"
    SAMPLES = "the samples or the initial weights, whose hashes a resume compares"
    BEST = "evaluations, which may decide which weights are the best or when training ends"
    NONE = "no weights"


def option(
    default: Any,
    text: str,
    *aliases: str,
    valid: Valid | None = None,
    choices: Sequence[str] = (),
    separator: str = "",
    effect: Effect = Effect.WEIGHTS,
    is_secret: bool = False,
    **off: Any,
) -> Any:
    """Return the field of a hyperparameter.

    Args:
        text: The help text.
        aliases: Its other names.
        valid: Which numbers are valid.
        choices: All valid texts.
        separator: Separates several values, which may also be given as a list.
        off: `off=value`: the value for none, null and an empty text, if that is not the default.
    """
    metadata = {
        "help": text,
        "aliases": aliases,
        "valid": valid,
        "choices": choices,
        "separator": separator,
        "effect": effect,
        **off,
    }
    return field(default=default, repr=not is_secret, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """The hyperparameters of a task that has none of its own."""
