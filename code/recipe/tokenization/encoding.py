"""Texts to token ids, the same way in training and in serving."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_CHARACTERS = 64
"""Of a text, for each token that is read; most tokens have 4 to 8."""


def beginning(tokenizer: PreTrainedTokenizerBase, text: str, max_length: int) -> str:
    """As much of a text as decides its first `max_length` tokens.

    Tokenizers read all of a text before they cut it: of one of megabytes, for seconds. Only a
    Unigram model may split a run of thousands of characters without a space otherwise than in the
    whole text: it weighs the run's splits against each other, and many weigh the same.
    """
    size = _CHARACTERS * max_length
    if len(text) <= size or tokenizer.truncation_side != "right":
        return text
    # Where it ends a word may have been cut: that must lie well behind the last token.
    enough = 2 * max_length
    head = text[:size]
    ids = tokenizer(head, truncation=True, max_length=enough, verbose=False)["input_ids"]
    return head if len(ids) == enough else text


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_length: int
) -> list[list[int]]:
    """Token ids of each text with the model's special tokens, cut at `max_length`, not padded."""
    encoded = tokenizer(
        [beginning(tokenizer, text, max_length) for text in texts],
        truncation=True,
        max_length=max_length,
        return_attention_mask=False,
        return_token_type_ids=False,
    )
    ids: list[list[int]] = encoded["input_ids"]
    return ids
