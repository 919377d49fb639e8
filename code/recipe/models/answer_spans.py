"""The spans of a window that are the likeliest answers, in training's evaluation and in serving."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def find_spans(
    scores: Array, is_context: Array, nowhere: int, count: int, longest: int
) -> tuple[Any, list[tuple[int, int, float]]]:
    """Return the score of no answer, and the likeliest spans of at most `longest` tokens, best
    first: first and last token, and the sum of their scores.

    Args:
        scores: [2, tokens], of each token as the first of the answer and as the last: logits, or
            logarithms of probabilities.
        is_context: [tokens], whether each token may be in a span.
        nowhere: The token that stands for no answer, which is in none.
    """
    nothing = scores[:, nowhere].sum()
    start, end = np.where(is_context, scores, -np.inf)
    start[nowhere] = end[nowhere] = -np.inf
    size, longest = len(start), min(longest, len(start))
    # By first token and length; spans that would end after the last token are excluded.
    sums = np.full((size, longest), -np.inf, dtype=start.dtype)
    for length in range(longest):
        sums[: size - length, length] = start[: size - length] + end[length:]
    flat = sums.ravel()
    indices = np.argpartition(-flat, min(count, flat.size) - 1)[:count]
    indices = indices[np.argsort(-flat[indices], kind="stable")]
    firsts, lengths = np.unravel_index(indices[flat[indices] != -np.inf], sums.shape)
    return nothing, [
        (int(first), int(first + length), float(sums[first, length]))
        for first, length in zip(firsts, lengths, strict=True)
    ]
