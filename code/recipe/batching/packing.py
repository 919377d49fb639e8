"""Which samples make an optimizer step, and where each of them lies. Numbers only, no tensors.

Everything here is a pure function of its arguments. A step has exactly as many samples as was
asked for, as in any other Trainer. What is chosen is *which* ones: samples are shuffled, cut into
chunks of about `CHUNK`, and inside a chunk dealt out so that the steps have nearly equal sums of
tokens. So one block shape fits every step with little padding, and the number of steps in an epoch,
the schedule and the loss stay those of unpacked training.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

CHUNK = 16_384
"""Samples that are balanced, or grouped by length, together."""
ALIGNMENT = 4
"""Block lengths are multiples of this, as matrix units and attention kernels like it."""
_JITTER = 0.1
_WANTED_FILL = 0.95
_TRIED = 200
_ORDERS = 30
# Attention and its mask cost more the longer a block is: at this length as much as all the rest
# (measured with MiniLM's shape and dropout, see docs/LAB.md).
_EVEN_LENGTH = 320

Rows = npt.NDArray[Any]
"""Positions of samples in a data set, or their lengths in tokens, as integers."""


def steps(lengths: Rows, size: int, seed: int, epoch: int, balanced: bool) -> list[Rows]:
    """The rows of each optimizer step of an epoch: each row once, `size` in all steps but the last.

    Args:
        lengths: Tokens of each sample.
        size: Samples in a step, over all processes and accumulated batches.
        balanced: Whether steps get like sums of tokens, to be packed; else a step gets samples of
            like length, to be padded.
    """
    random = np.random.default_rng((seed, epoch))
    order = random.permutation(len(lengths))
    count = -(-len(order) // size)
    # Sorted by length alone, the same samples would meet in every epoch.
    jitter = _JITTER if balanced else 0
    sizes = lengths * random.uniform(1 - jitter, 1 + jitter, len(lengths))
    made: list[Rows] = []
    for chunk in np.array_split(np.arange(count), max(1, round(len(order) / CHUNK))):
        rows = order[chunk[0] * size : (chunk[-1] + 1) * size]
        rows = rows[np.argsort(-sizes[rows], kind="stable")]
        made += _deal(rows, lengths, size) if balanced else _cut(rows, size)
    # The step with fewer samples is the last one of the epoch.
    whole = [step for step in made if len(step) == size]
    shuffled = [whole[at] for at in random.permutation(len(whole))]
    return shuffled + [step for step in made if len(step) != size]


def in_order(lengths: Rows, size: int, balanced: bool) -> list[Rows]:
    """The rows of each batch of an evaluation: each row once, nothing drawn at random."""
    rows = np.argsort(-lengths, kind="stable")
    return _deal(rows, lengths, size) if balanced else _cut(rows, size)


def split(step: Rows, lengths: Rows, parts: int, size: int, balanced: bool) -> list[Rows]:
    """The rows of each of the `parts` batches of a step, `size` at most in each; some may be empty.

    Batches get like sums of tokens, or (not balanced) neighbours in length.
    """
    if balanced:
        longest_first = step[np.argsort(-lengths[step], kind="stable")]
        return _balance(longest_first, lengths, [size] * parts)
    return np.array_split(step, parts)


def _deal(rows: Rows, lengths: Rows, size: int) -> list[Rows]:
    full, rest = divmod(len(rows), size)
    return _balance(rows, lengths, [size] * full + [rest] * (rest > 0))


def _cut(rows: Rows, size: int) -> list[Rows]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _balance(rows: Rows, lengths: Rows, capacities: Sequence[int]) -> list[Rows]:
    """Each of `rows`, longest first, to the group with the fewest tokens that has room for one."""
    groups: list[list[int]] = [[] for _ in capacities]
    heap = [(0, number) for number in range(len(groups))]
    for row in rows.tolist():
        tokens, number = heapq.heappop(heap)
        groups[number].append(row)
        if len(groups[number]) < capacities[number]:
            heapq.heappush(heap, (tokens + int(lengths[row]), number))
    return [np.asarray(group, dtype=np.int64) for group in groups]


@dataclass(frozen=True)
class Shape:
    """`rows` blocks of `length` tokens: what one packed batch is."""

    rows: int
    length: int

    @property
    def tokens(self) -> int:
        """Places for tokens in a batch."""
        return self.rows * self.length

    def place(self, lengths: Sequence[int]) -> list[list[int]] | None:
        """For each block the samples laid into it, as positions in `lengths`; None: no room found.

        Longest first, each into the fullest block that has room for it; where that fails, in
        other orders, the same each time.
        """
        random = Random(0)
        spread = 0.0
        for _ in range(_ORDERS):
            keys = [length * random.uniform(1 - spread, 1) for length in lengths]
            order = sorted(range(len(lengths)), key=lambda at: -keys[at])
            if (blocks := self._best_fit(lengths, order)) is not None:
                return blocks
            if sum(lengths) > self.tokens:
                return None
            spread = 0.3
        return None

    def _best_fit(self, lengths: Sequence[int], order: Sequence[int]) -> list[list[int]] | None:
        room = [self.length] * self.rows
        blocks: list[list[int]] = [[] for _ in room]
        for at in order:
            best = -1
            for block, free in enumerate(room):
                if free >= lengths[at] and (best < 0 or free < room[best]):
                    best = block
            if best < 0:
                return None
            blocks[best].append(at)
            room[best] -= lengths[at]
        return blocks


def shape(batches: Sequence[Sequence[int]]) -> Shape:
    """The shape into which each of `batches` (lengths of its samples) can be laid.

    Of the shapes with at least 95 % real tokens, the cheapest: many short blocks cost less
    attention and mask memory than few long ones. Where none has that, the one with the most.
    """
    fullest = sorted(batches, key=sum, reverse=True)
    most = max(1, sum(fullest[0]))
    mean = sum(map(sum, batches)) / len(batches)
    longest = _aligned(max((length for batch in batches for length in batch), default=1))
    found = list(_candidates(fullest[:_TRIED], most, longest))
    good = [each for each in found if mean >= _WANTED_FILL * each.tokens]
    chosen = min(good or found, key=_cost if good else _size)
    while not all(chosen.place(batch) is not None for batch in fullest):
        chosen = Shape(chosen.rows, chosen.length + ALIGNMENT)
    return chosen


def _candidates(batches: Sequence[Sequence[int]], most: int, longest: int) -> Iterator[Shape]:
    for rows in range(1, max(1, most // longest) + 2):
        length = max(longest, _aligned(-(-most // rows)))
        tried = Shape(rows, length)
        while not all(tried.place(batch) is not None for batch in batches):
            tried = Shape(rows, tried.length + ALIGNMENT)
        yield tried


def _aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def _cost(of: Shape) -> float:
    return of.tokens * (1 + of.length / _EVEN_LENGTH)


def _size(of: Shape) -> tuple[int, int]:
    return of.tokens, of.length


def buckets(batches: Sequence[Sequence[int]], most: int = 4) -> tuple[int, ...]:
    """At most `most` lengths; each batch is padded to the smallest that takes it.

    Chosen so that as few places as possible are padding.
    """
    counts = Counter(_aligned(max(batch)) for batch in batches if len(batch))
    lengths = sorted(counts) or [ALIGNMENT]
    # (places, lengths chosen) for the batches up to each length, with one length more each round.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for _ in range(most):
        best = {0: (0, ()), **{top: _extend(best, top, counts) for top in lengths}}
    return best[lengths[-1]][1]


def _extend(
    best: dict[int, tuple[int, tuple[int, ...]]], top: int, counts: Counter[int]
) -> tuple[int, tuple[int, ...]]:
    return min(
        (places + top * sum(counts[length] for length in counts if below < length <= top), chosen)
        for below, (places, chosen) in (
            (below, (places, (*chosen, top))) for below, (places, chosen) in best.items()
        )
        if below < top
    )
