"""Choose the samples of each optimizer step, and their places in blocks. No tensors.

Everything here is a pure function of its arguments. A step has exactly the requested number of
samples, as in any other Trainer, but *which* samples is chosen so that the steps of an epoch have
nearly equal sums of tokens. So one block shape fits every step with little padding, and the number
of steps in an epoch, the schedule and the loss are those of unpacked training.

Apart from sorting, the time is proportional to the number of samples, for any size of a step.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

VERSION = 6
"""The version of the rules in this module: a resumed epoch needs the same order of samples."""
PORTION = 1 << 21
"""Samples that are planned together; a larger epoch is planned portion by portion."""
ALIGNMENT = 4
"""Block lengths are multiples of this, which suits matrix units and attention kernels."""
_JITTER = 0.1
_WANTED_FILL = 0.95
_POSSIBLE_SHARE = 0.99
_COMPARED = 8
_MANY = 64
_NEARLY = 1.05
_CHECKED = 256
_CANDIDATES = 400
_ORDERS = 30
_PLACED_AGAIN = 2_000
_BUCKETS_TRIED = 1_024
# Attention and its mask cost more the longer a block is: at this length as much as all the rest
# (measured with MiniLM's shape and dropout, see docs/LAB.md).
_EVEN_LENGTH = 320
# The same for the attention of recipe.models.cpu_kernels. Padding is compared with this one, so
# that samples are padded only if that is certainly faster.
_EVEN_KERNEL_LENGTH = 900
_SURELY = 0.95

Rows = npt.NDArray[Any]
"""Positions of samples in a data set, or their lengths in tokens, as integers."""


def steps(lengths: Rows, size: int, seed: int, epoch: int, balanced: bool) -> Sequence[Rows]:
    """Return the rows of each optimizer step of an epoch: each row once, `size` in all steps but
    the last.

    More than `PORTION` rows are divided at random into portions of that size, each of which is
    planned when its first step is requested.

    Args:
        lengths: Tokens of each sample.
        size: Samples in a step, over all processes and accumulated batches.
        balanced: Whether steps get similar sums of tokens, for packing; else they are drawn at
            random and sorted by length, for padding. Steps of samples of one length would learn
            worse what correlates with length (docs/LAB.md).
    """
    if len(lengths) > PORTION:
        return _Portions(lengths, size, seed, epoch, balanced)
    random = np.random.default_rng((seed, epoch))
    return _planned(random.permutation(len(lengths)), lengths, size, random, balanced)


def _planned(
    order: Rows, lengths: Rows, size: int, random: np.random.Generator, balanced: bool
) -> list[Rows]:
    """Return the steps of the rows in `order`, which is random; only the last may be smaller."""
    if balanced:
        dealt = _deal(order, lengths, size, random)
    else:
        numbers = np.arange(len(order)) // size
        dealt = _cut(_longest_first(order, lengths, numbers), size)
    # The step with fewer samples is the last one of the epoch.
    whole = [step for step in dealt if len(step) == size]
    shuffled = [whole[index] for index in random.permutation(len(whole))]
    return shuffled + [step for step in dealt if len(step) != size]


class _Portions(Sequence[Rows]):
    """The steps of an epoch, planned some millions of rows at a time."""

    def __init__(self, lengths: Rows, size: int, seed: int, epoch: int, balanced: bool) -> None:
        self._lengths, self._size, self._balanced = lengths, size, balanced
        self._seed = (seed, epoch)
        self._portion_steps = max(1, PORTION // size)
        self._portion = functools.lru_cache(maxsize=1)(self._plan)

    def __len__(self) -> int:
        return -(-len(self._lengths) // self._size)

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        portion, step = divmod(number, self._portion_steps)
        return self._portion(portion)[step]

    def _plan(self, portion: int) -> list[Rows]:
        samples = self._portion_steps * self._size
        count = len(self._lengths)
        order = permuted(portion * samples, min(count, (portion + 1) * samples), count,
                         self._seed)  # fmt: skip
        random = np.random.default_rng((*self._seed, portion))
        # By their positions in the portion: the lengths of all rows may be a file.
        dealt = _planned(np.arange(len(order)), self._lengths[order].astype(np.int64), self._size,
                         random, self._balanced)  # fmt: skip
        return [order[step] for step in dealt]


def text_positions(ids: Rows, begins: Rows, first: int) -> Rows:
    """Return the positions [tokens] of texts end to end, counted from `first` in each; `begins`
    [tokens] are the indices of their first tokens. RoBERTa's family does not count padding tokens,
    `first - 1`, which a text may contain."""
    is_counted = ids != first - 1
    counts = np.append(0, np.cumsum(is_counted))
    return np.where(is_counted, counts[1:] - counts[begins], 0) + first - 1


def permuted(start: int, end: int, count: int, seed: Sequence[int]) -> Rows:
    """Return positions `start` to `end` of a random permutation of `range(count)`, without
    computing the rest.

    This is a Feistel network of six rounds over the next power of four, applied until a number is
    in range.
    """
    half = np.uint64(max(1, -(-(count - 1).bit_length() // 2)))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = np.random.default_rng(seed).integers(0, 1 << 63, 6, dtype=np.uint64)

    def moved(numbers: Rows) -> Rows:
        left, right = numbers >> half, numbers & mask
        for key in keys:
            # The last steps of SplitMix64.
            mixed = right + key
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & mask)
        joined: Rows = (left << half) | right
        return joined

    numbers = moved(np.arange(start, end, dtype=np.uint64))
    outside = np.flatnonzero(numbers >= count)
    while len(outside):
        numbers[outside] = moved(numbers[outside])
        outside = outside[numbers[outside] >= count]
    order: Rows = numbers.astype(np.int64)
    return order


def spread(lengths: Rows, count: int, seed: Sequence[int], balanced: bool) -> list[Rows]:
    """Return all rows in `count` steps of nearly equal numbers of rows, each row once; some steps
    may be empty. The arguments are those of `steps`."""
    random = np.random.default_rng(seed)
    order = random.permutation(len(lengths))
    if balanced:
        # Empty samples make all steps equally large; they are removed afterwards.
        size = -(-len(order) // count)
        none = np.arange(len(order), size * count)
        filled = np.append(lengths, np.zeros_like(none))
        dealt = _deal(np.append(order, none), filled, size, random)
        dealt = [step[step < len(order)] for step in dealt] or [order] * count
    else:
        starts = np.arange(count + 1) * len(order) // count
        numbers = np.repeat(np.arange(count), np.diff(starts))
        dealt = np.split(_longest_first(order, lengths, numbers), starts[1:-1])
    return [dealt[index] for index in random.permutation(count)]


def ordered_batches(lengths: Rows, size: int, balanced: bool) -> list[Rows]:
    """Return the rows of each batch of an evaluation: each row once, in a fixed order."""
    rows = np.arange(len(lengths))
    return (
        _deal(rows, lengths, size, None) if balanced else _cut(_longest_first(rows, lengths), size)
    )


def split(step: Rows, lengths: Rows, parts: int, size: int, balanced: bool) -> list[Rows]:
    """Return the rows of each of the `parts` batches of a step, `size` at most in each; some may be
    empty.

    Batches get similar sums of tokens, or (not balanced) samples of similar lengths.
    """
    if not balanced:
        return np.array_split(step, parts)
    if parts == 1:
        return [step]
    # Longest first, each row goes to the batch with the fewest tokens that is not full.
    batches: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0, number) for number in range(parts)]
    rows = _longest_first(step, lengths)
    for row, length in zip(rows.tolist(), lengths[rows].tolist(), strict=True):
        tokens, number = heappop(heap)
        batches[number].append(row)
        if len(batches[number]) < size:
            heappush(heap, (tokens + length, number))
    return [np.asarray(batch, dtype=np.int64) for batch in batches]


def _longest_first(rows: Rows, lengths: Rows, parts: Rows | None = None) -> Rows:
    """Return `rows`, the longest first; rows of equal length keep their order.

    Args:
        parts: The part of each of `rows`, ascending. Each part is laid out separately.
    """
    row_lengths = lengths[rows]
    shorter = row_lengths.max(initial=0) - row_lengths
    if shorter.max(initial=0) < 1 << 16:
        shorter = shorter.astype(np.uint16)  # which NumPy sorts by counting
    by_length = np.argsort(shorter, kind="stable")
    if parts is not None:
        by_length = by_length[np.argsort(parts[by_length], kind="stable")]
    longest_first: Rows = rows[by_length]
    return longest_first


def _cut(rows: Rows, size: int) -> list[Rows]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _deal(order: Rows, lengths: Rows, size: int, random: np.random.Generator | None) -> list[Rows]:
    """Return steps with similar sums of tokens: each has one sample of each of `size` length
    classes.

    In a class, the longest sample goes to the step with the fewest tokens so far. Classes of one
    length need no choice, so that the work does not grow with `size`. Adding short samples to the
    step of a long one would make the sums of small steps more equal, but a model learns worse from
    such steps, whose composition depends on their longest sample (docs/LAB.md).

    Args:
        order: Positions of samples, in random order.
        random: Draws the steps; None for steps that are the same each time.
    """
    rows = _longest_first(order, lengths)
    if len(rows) <= size:
        return [rows] if len(rows) else []
    count, rest = divmod(len(rows), size)
    starts = np.arange(size + 1) * len(rows) // size
    larger = np.flatnonzero(np.diff(starts) > count)  # each of these gives one to the last step
    last_step = starts[larger]
    if random is not None:
        last_step = last_step + random.integers(0, count + 1, len(larger))
    strata = np.delete(rows, last_step).reshape(size, count)
    tokens = lengths[strata]
    spread = tokens.max(axis=1) - tokens.min(axis=1)
    sums = tokens[spread == 0].sum(axis=0)
    for index in np.argsort(-spread, kind="stable")[: np.count_nonzero(spread)]:
        weighed = tokens[index]
        if random is not None:
            # By exact lengths, every epoch would have the same steps.
            weighed = weighed * random.uniform(1 - _JITTER, 1 + _JITTER, len(weighed))
        longest_first = np.argsort(-weighed, kind="stable")
        emptiest_first = np.argsort(sums, kind="stable")
        sums[emptiest_first] += tokens[index, longest_first]
        strata[index, emptiest_first] = strata[index, longest_first]
    return [*strata.T.copy(), *([rows[last_step]] if rest else [])]


@dataclass(frozen=True)
class Shape:
    """The shape of a packed batch: `rows` blocks of `length` tokens."""

    rows: int
    length: int

    @property
    def tokens(self) -> int:
        """Return the tokens of a batch, padding included."""
        return self.rows * self.length

    def assign_blocks(self, lengths: Rows) -> Rows:
        """Return the number of the block of each sample.

        Longest first, each sample goes into the fullest block with room for it. If that takes more
        than `rows` blocks, other orders are tried, the same ones each time; if all take more, more
        blocks are used.

        Raises:
            ValueError: a sample is longer than a block.
        """
        if lengths.max(initial=0) > self.length:
            raise ValueError(f"a sample of {lengths.max()} tokens in blocks of {self.length}")
        listed = lengths.tolist()
        blocks, used = _best_fit(listed, np.argsort(-lengths, kind="stable").tolist(), self.length)
        if used > self.rows and lengths.sum() <= self.tokens:
            random = Random(0)
            for _ in range(min(_ORDERS, _PLACED_AGAIN // len(listed))):
                keys = [length * random.uniform(0.7, 1) for length in listed]
                order = sorted(range(len(listed)), key=lambda index: -keys[index])
                other, needed = _best_fit(listed, order, self.length)
                if needed < used:
                    blocks, used = other, needed
                if used <= self.rows:
                    break
        return np.asarray(blocks, dtype=np.int64)

    def fitting(self, lengths: Rows) -> Shape:
        """Return this shape, or one whose blocks are twice or four times as long if a sample needs
        that: not all samples were known when the shape was chosen."""
        longest, length = int(lengths.max(initial=0)), self.length
        while length < longest:
            length *= 2
        return self if length == self.length else Shape(-(-self.tokens // length), length)

    def holds(self, lengths: Rows) -> bool:
        """Return whether samples of these lengths are placed in no more than `rows` blocks."""
        return int(self.assign_blocks(lengths).max(initial=-1)) < self.rows


def _best_fit(lengths: Sequence[int], order: Sequence[int], length: int) -> tuple[list[int], int]:
    """Return the block of each sample, and how many blocks there are."""
    blocks = [0] * len(lengths)
    opened: list[tuple[int, int]] = []  # (room, block), sorted
    used = 0
    for index in order:
        needed = lengths[index]
        best = bisect_left(opened, (needed, 0))
        if best < len(opened):
            room, block = opened.pop(best)
        else:
            room, block = length, used
            used += 1
        blocks[index] = block
        insort(opened, (room - needed, block))
    return blocks, used


def shape(batches: Sequence[Rows]) -> Shape:
    """Return a shape that holds each of `batches`, which are given by the lengths of their samples.

    It is the cheapest shape with at least 95 % real tokens: many short blocks cost less attention
    and mask memory than few long ones. If there is none, it is the cheapest of those with nearly
    the most real tokens. Samples of nearly equal lengths, such as windows, get a block each if
    padding them costs less than attention over blocks. The search uses a few of the fullest batches
    and checks some 500 at most: a batch may use more blocks (`Shape.assign_blocks`).
    """
    batches = [np.asarray(batch) for batch in batches] or [np.zeros(0, dtype=np.int64)]
    sums = np.asarray([batch.sum() for batch in batches])
    mean, most = sums.mean(), max(1, int(sums.max()))
    wanted_fill = min(_WANTED_FILL, _POSSIBLE_SHARE * mean / most)

    def cost(tried: Shape, even_length: int) -> float:
        return tried.tokens * (1 + tried.length / even_length)

    def rank(tried: Shape) -> tuple[bool, float, int, int]:
        is_poor = bool(mean < wanted_fill * tried.tokens)
        weighed = tried.tokens if is_poor else cost(tried, _EVEN_LENGTH)
        return is_poor, weighed, tried.length, tried.rows

    fullest = [batches[index] for index in np.argsort(-sums, kind="stable")]
    compared = [
        (batch.tolist(), np.argsort(-batch, kind="stable").tolist())
        for batch in fullest[:_COMPARED]
    ]
    longest = max(int(batch.max(initial=1)) for batch in batches)
    shortest = -(-longest // ALIGNMENT) * ALIGNMENT
    # Multiples of these lengths hold `most` tokens with little or no room to spare.
    counts = np.arange(1, max(1, most // shortest) + 2)
    spare = 1 + np.asarray([0, 0.01, 0.02, 0.035, 0.05])
    exact = np.ceil(most / counts[:, None] * spare).astype(np.int64)
    lengths = np.unique(np.maximum(shortest, -(-exact // ALIGNMENT) * ALIGNMENT))
    # If few samples fit into a block, their number varies from batch to batch.
    many = len(fullest[0]) > _MANY
    ranked: list[tuple[bool, float, int, int]] = []
    for length in map(int, lengths[:: -(-len(lengths) // _CANDIDATES)]):
        is_poor, least = (True, 0.0) if not ranked else ranked[0][:2]
        if many and not is_poor and most * (1 + length / _EVEN_LENGTH) > _NEARLY * least:
            break  # no longer block can be cheaper
        rows = max(1, *(_best_fit(batch, order, length)[1] for batch, order in compared))
        heappush(ranked, rank(Shape(rows, length)))
        # Other orders may do with fewer blocks, a little longer.
        if rows > -(-most // length) and not many:
            heappush(ranked, rank(Shape(-(-most // length), length)))
    checked = [*fullest[:_CHECKED], *fullest[_CHECKED :: max(1, len(fullest) // _CHECKED)]]
    while True:
        *_, length, rows = heappop(ranked)
        tried = Shape(rows, length)
        lacking = next(
            (index for index, batch in enumerate(checked) if not tried.holds(batch)), None
        )
        if lacking is None:
            apart = Shape(max(1, *map(len, batches)), shortest)
            costs = [cost(candidate, _EVEN_KERNEL_LENGTH) for candidate in (apart, tried)]
            return apart if costs[0] < _SURELY * costs[1] else tried
        checked.insert(0, checked.pop(lacking))  # what others are likely to lack room for, too
        heappush(ranked, rank(Shape(rows, length + ALIGNMENT)))


def buckets(batches: Sequence[Rows], most: int = 4) -> tuple[int, ...]:
    """Return at most `most` lengths; each batch is padded to the smallest that takes it.

    They are chosen to minimize padding.
    """
    longest = np.asarray([batch.max() for batch in map(np.asarray, batches) if len(batch)] or [1])
    alignment = ALIGNMENT * -(-int(longest.max()) // (ALIGNMENT * _BUCKETS_TRIED))
    lengths, counts = np.unique(-(-longest // alignment) * alignment, return_counts=True)
    tops, up_to = np.append(0, lengths), np.append(0, np.cumsum(counts))
    # padded[below, top]: the tokens of the batches longer than one length and up to another, padded
    # to the latter.
    padded = np.where(
        tops[:, None] < tops, tops * (up_to - up_to[:, None]).astype(np.float64), np.inf
    )
    best, below = np.append(0, np.full(len(lengths), np.inf)), []
    for _ in range(most):
        total = best[:, None] + padded
        below.append(total.argmin(axis=0))
        best = np.append(0, total.min(axis=0)[1:])
    chosen: list[int] = []
    stop = len(lengths)
    for lower in reversed(below):
        if stop:
            chosen.append(int(tops[stop]))
            stop = int(lower[stop])
    return tuple(reversed(chosen))
