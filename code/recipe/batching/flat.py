"""The shape of a batch for variable-length attention (`recipe.models.flat_attention`): one row with
all samples end to end, instead of blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from recipe.batching.packing import Rows

_MULTIPLE = 64


@dataclass(frozen=True)
class Row:
    """As many tokens as the fullest batch has; a rare fuller batch gets a longer row."""

    length: int
    longest: int
    """Tokens of the longest sample."""
    rows = 1

    @property
    def tokens(self) -> int:
        """Return the tokens computed."""
        return self.length

    def assign_blocks(self, lengths: Rows) -> Rows:
        """Return the number of each sample's block."""
        return np.zeros(len(lengths), dtype=np.int64)

    def fitting(self, lengths: Rows) -> Row:
        """Return this row, or a longer one if samples of these lengths need it."""
        step = max(_MULTIPLE, _rounded(self.length // 8))
        lacking = max(0, int(lengths.sum()) - self.length)
        longest = max(self.longest, int(lengths.max(initial=1)))
        return replace(self, length=self.length + -(-lacking // step) * step, longest=longest)

    def starts(self, lengths: Rows, size: int) -> npt.NDArray[np.int32]:
        """Return the start of each sample and the end of the row, with the same count of numbers
        for all batches of at most `size` samples.

        The unused end is cut into pieces of at most `longest` tokens, since attention computes only
        that many tokens of a piece, and skipped ones may be NaN.
        """
        ends = np.cumsum(lengths)
        real = int(ends[-1]) if len(ends) else 0
        starts = np.full(size + -(-self.length // self.longest) + 1, self.length, dtype=np.int32)
        starts[0] = 0
        starts[1 : len(ends) + 1] = ends
        pieces = np.arange(real + self.longest, self.length, self.longest)
        starts[len(ends) + 1 : len(ends) + 1 + len(pieces)] = pieces
        return starts


def row(lengths: list[Rows]) -> Row:
    """Return a row into which each of the batches fits.

    Args:
        lengths: Tokens of each sample of each batch.
    """
    fullest = max((int(batch.sum()) for batch in lengths), default=1)
    return Row(_rounded(fullest), max((int(batch.max(initial=1)) for batch in lengths), default=1))


def _rounded(tokens: int) -> int:
    return -(-max(1, tokens) // _MULTIPLE) * _MULTIPLE
