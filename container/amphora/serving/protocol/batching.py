"""Decides which waiting requests are predicted together.

Handlers whose predictions may be merged, and repeated, define `predict_batch_fn(inputs, model)`. It
takes a list of what `input_fn` returned, and returns what `predict_fn` would for each, or an
exception for an item that failed. `tokens_fn(data, model)` may return the number of tokens of each
text (row) of one request, so that requests of similar length are put together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """The size of one request in a batch: `rows` texts, the longest of `longest` tokens."""

    rows: int
    longest: int
    total: int
    """Tokens without padding."""
    pads: bool = True
    """Whether a call computes as many tokens for each text as the longest has."""

    @classmethod
    def from_tokens(cls, tokens: Sequence[int] | int, pads: bool = True) -> Size:
        """Make a size from the result of `tokens_fn`, and whether the handlers pad."""
        counts = [tokens] if isinstance(tokens, int) else list(tokens)
        return cls(len(counts), max(counts, default=0), sum(counts), pads)


UNKNOWN = Size(1, 1, 1)


@dataclass(frozen=True)
class CallGroup:
    """The indices of requests to predict in one call."""

    members: list[int]
    tokens: int
    padded: int
    """Tokens of the call, padding included."""


def plan(sizes: Sequence[Size], most_tokens: int, call_tokens: int) -> list[CallGroup]:
    """Return the cheapest way to cut the requests, sorted by length, into calls.

    A call costs `call_tokens` plus its padded tokens, and holds at most `most_tokens` of them,
    except for a single request that is larger. Exact: dynamic programming over the cuts.
    """
    order = sorted(range(len(sizes)), key=lambda index: sizes[index].longest)
    # Of the first 0, 1, 2 ... requests: the cost, and the start and tokens of the last call.
    best = [(0.0, 0, 0, 0)]
    for end in range(1, len(order) + 1):
        longest, rows, total = sizes[order[end - 1]].longest, 0, 0
        cheapest = (float("inf"), 0, 0, 0)
        for start in range(end - 1, -1, -1):
            size = sizes[order[start]]
            rows += size.rows
            total += size.total
            padded = rows * longest if size.pads else total
            if padded > most_tokens and start < end - 1:
                break
            cost = best[start][0] + call_tokens + padded
            if cost < cheapest[0]:
                cheapest = (cost, start, total, padded)
        best.append(cheapest)
    groups = []
    end = len(order)
    while end > 0:
        _, start, tokens, padded = best[end]
        groups.append(CallGroup(order[start:end], tokens, padded))
        end = start
    return groups[::-1]


class BatchDelay:
    """How long an idle worker waits for a batch to fill: as long as it paid for the last batches.

    A free worker that takes the first request of a burst leaves the rest to wait for a whole
    prediction. So, while predictions follow each other, it waits for as many as came together
    before, up to a share of what a prediction takes; when there was a pause, it does not wait.
    """

    _SHARE = 0.15
    _MEMORY = 0.7

    def __init__(self, most: float) -> None:
        self._most = most
        self._size = 1.0
        self._seconds = 0.0
        self._ended = float("-inf")

    def learn(self, size: int, seconds: float, now: float) -> None:
        """Note that a batch of `size` requests took `seconds` and ended at `now`."""
        self._size = self._MEMORY * self._size + (1 - self._MEMORY) * size
        self._seconds = self._MEMORY * self._seconds + (1 - self._MEMORY) * seconds
        self._ended = now

    def wait(self, waiting: int, oldest: float, now: float) -> float:
        """Return the seconds to wait for more requests; `oldest` is when the first one arrived."""
        limit = min(self._most, self._SHARE * self._seconds)
        if waiting >= round(self._size) or now - self._ended > limit + self._seconds:
            return 0.0
        return max(0.0, oldest + limit - now)
