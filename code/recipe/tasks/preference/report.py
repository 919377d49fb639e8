"""Report which answers a model prefers after training."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from recipe.reports import figures, section
from recipe.reports.section import Section

_SHOWN = 6


def sections(
    split: str,
    rewards: npt.NDArray[np.float64],
    show: Callable[[int], tuple[str, str, str]],
) -> list[Section]:
    """Return the histogram of margins, and the pairs with the lowest and the highest ones.

    Args:
        rewards: [pairs, 2], of chosen and rejected answers.
        show: Returns the prompt, the chosen and the rejected answer of a pair, by its number.
    """
    margins = rewards[:, 0] - rewards[:, 1]
    order = np.argsort(margins, kind="stable")
    ends = order if len(order) <= 2 * _SHOWN else np.concatenate([order[:_SHOWN], order[-_SHOWN:]])
    rows = []
    for pair in ends.tolist():
        prompt, chosen, rejected = (section.beginning(text) for text in show(pair))
        reward, other = rewards[pair]
        numbers = f"{margins[pair]:+.3f}", f"{reward:+.3f}", f"{other:+.3f}"
        rows.append([prompt, numbers[0], chosen, numbers[1], rejected, numbers[2]])
    wrong = int((margins <= 0).sum())
    return [
        Section(
            title=f"Margins, {split} data",
            note=f"{wrong} of {len(margins)} pairs have a margin of 0 or less.",
            figure=("margins", functools.partial(figures.margins, margins)),
        ),
        Section(
            title=f"Pairs with the lowest and the highest margins, {split} data",
            columns=[
                ("prompt", section.TEXT),
                ("margin", section.NUMBER),
                ("chosen", section.TEXT),
                ("reward", section.NUMBER),
                ("rejected", section.TEXT),
                ("reward", section.NUMBER),
            ],
            rows=rows,
        ),
    ]
