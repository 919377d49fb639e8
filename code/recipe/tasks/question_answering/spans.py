"""Windows of a context with its question, and the likeliest spans in them: in training's evaluation
and in serving."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def encode(
    tokenizer: Any, questions: Sequence[str], contexts: Sequence[str], length: int, stride: int
) -> Any:
    """Return the windows of each context: at most `length` tokens with the question, of which
    consecutive windows share `stride`. A tokenizer that pads on the left has the context first."""
    asks_first = tokenizer.padding_side == "right"
    return tokenizer(
        *((questions, contexts) if asks_first else (contexts, questions)),
        truncation="only_second" if asks_first else "only_first",
        max_length=length,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )


def context_sequence(tokenizer: Any) -> int:
    """Return the sequence id of the tokens of contexts in the windows of `encode`."""
    return 1 if tokenizer.padding_side == "right" else 0


def no_answer_token(tokenizer: Any, ids: Sequence[int]) -> int:
    """Return the position of the token that stands for no answer: CLS, or the first one."""
    return ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in ids else 0


def likeliest(start: Array, end: Array, count: int, longest: int) -> list[tuple[int, int, float]]:
    """Return the likeliest spans of at most `longest` tokens, best first: first and last token, and
    the sum of their scores (logits or logarithms of probabilities). Tokens of -inf are in none.

    Args:
        start: [tokens], of each token as the first of the answer.
        end: [tokens], of each token as the last.
    """
    size, longest = len(start), min(longest, len(start))
    # By first token and length; spans that would end after the last token are excluded.
    sums = np.full((size, longest), -np.inf, dtype=start.dtype)
    for length in range(longest):
        sums[: size - length, length] = start[: size - length] + end[length:]
    flat = sums.ravel()
    indices = np.argpartition(-flat, min(count, flat.size) - 1)[:count]
    indices = indices[np.argsort(-flat[indices], kind="stable")]
    firsts, lengths = np.unravel_index(indices[flat[indices] != -np.inf], sums.shape)
    return [
        (int(first), int(first + length), float(sums[first, length]))
        for first, length in zip(firsts, lengths, strict=True)
    ]
