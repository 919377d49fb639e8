"""Rows of a benchmark, drawn from a file: other ones by each seed, and other ones to judge by."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

JUDGED_FROM = 1000
"""Seeds from this one on draw from the third of the rows that the seeds below it never see."""
Item = TypeVar("Item")


def drawn(items: Sequence[Item], rows: int, seed: int) -> list[Item]:
    """Draw `rows` of the items, or all that there are."""
    order = list(items)
    random.Random(0).shuffle(order)
    third = len(order) // 3
    kept = order[:third] if seed >= JUDGED_FROM else order[third:]
    return random.Random(seed).sample(kept, min(rows, len(kept)))
