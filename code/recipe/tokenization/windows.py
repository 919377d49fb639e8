"""Cut texts into overlapping windows of tokens: lists of words, and contexts of questions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from recipe.data.column_names import TOKEN_IDS, TYPE_IDS
from recipe.errors import ModelError
from recipe.tokenization.encoding import truncate_on

_CONTEXT_BEFORE, _CONTEXT_AFTER = 4, 8
"""One in this many tokens of a window of words is context, which another window learns."""


@dataclass(frozen=True)
class PairWindow:
    """A part of the context of a pair, with its question."""

    pair: int
    """The number of the pair."""
    ids: list[int]
    types: list[int] | None
    encoding: Any
    """The tokenizer's encoding, which has the characters of each token."""
    is_context: npt.NDArray[np.bool_]
    """Whether each token is one of the context."""
    nowhere: int
    """The position of the token that stands for no answer: CLS, or the first one."""

    def characters(self, first: int, last: int, by_words: bool) -> tuple[int, int]:
        """Return the characters of the context from a token to another one (inclusive), or of their
        whole words, if words are known."""
        edges = [self.encoding.offsets[token] for token in (first, last)]
        words = [self.encoding.token_to_word(token) for token in (first, last)]
        if by_words and None not in words:
            sequence = self.encoding.token_to_sequence(first)
            positions = [self.encoding.word_to_chars(word, sequence) for word in words]
            edges = edges if None in positions else positions
        return edges[0][0], edges[1][1]


def count_windows(tokens: int, room: int, shared: int) -> int:
    """Return how many windows a text has, of which each shares tokens with the one before it.

    Args:
        tokens: Those of the text.
        room: Tokens that fit into a window.
    """
    return 1 + max(0, -(-(tokens - room) // max(1, room - shared)))


def check_fast(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ModelError if a tokenizer does not map tokens to words and characters."""
    if not tokenizer.is_fast:
        raise ModelError(
            f"The tokenizer ({type(tokenizer).__name__}) does not map tokens to characters.",
            "Give a model with a fast tokenizer (tokenizer.json).",
        )


def shorten_text(tokenizer: Any, text: str, most: int) -> str:
    """Return the longest beginning of a text, up to the end of a token, that has at most `most`
    tokens without special ones."""
    while True:
        encoded = tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        ends = [end for _, end in encoded["offset_mapping"]]
        if len(ends) <= most:
            return text
        # The rest of a cut word may have more tokens than that part had before.
        text = text[: min(ends[most - 1], len(text) - 1)]


def pair_windows(
    tokenizer: Any, questions: Sequence[str], contexts: Sequence[str], length: int, shared: int
) -> Iterator[PairWindow]:
    """Yield the windows of each context: at most `length` tokens with the question, of which
    consecutive windows share some. A tokenizer that pads on the left has the context first."""
    asks_first = tokenizer.padding_side == "right"
    sequence = 1 if asks_first else 0
    encoded = tokenizer(
        *((questions, contexts) if asks_first else (contexts, questions)),
        truncation="only_second" if asks_first else "only_first",
        max_length=length,
        stride=shared,
        return_overflowing_tokens=True,
    )
    types = encoded.get(TYPE_IDS)
    for number, pair in enumerate(encoded["overflow_to_sample_mapping"]):
        ids = encoded[TOKEN_IDS][number]
        yield PairWindow(
            pair=pair,
            ids=ids,
            types=None if types is None else types[number],
            encoding=encoded[number],
            is_context=np.array([owner == sequence for owner in encoded.sequence_ids(number)]),
            nowhere=ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in ids else 0,
        )


def word_windows(
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sequence[Sequence[str]],
    length: int,
    is_split: bool,
) -> Iterator[tuple[int, list[int], list[int | None]]]:
    """Yield the windows of sentences, given as words: the number of the sentence, the token ids,
    and for each token the word that it represents.

    The first token of a word represents it, in exactly one of the windows; other tokens have None.
    Consecutive windows share tokens as context.

    Args:
        length: The most tokens of a window.
        is_split: Whether a long sentence has several windows; otherwise it is cut.
    """
    room = length - tokenizer.num_special_tokens_to_add(pair=False)
    with truncate_on(tokenizer, "right"):
        encoded: Any = tokenizer(
            list(map(list, sentences)),
            is_split_into_words=True,
            truncation=True,
            max_length=length,
            stride=words_shared(room) if is_split else 0,
            return_overflowing_tokens=is_split,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
    owners = [*encoded.get("overflow_to_sample_mapping", range(len(sentences))), None]
    before = previous = None
    for number, owner in enumerate(owners[:-1]):
        words = encoded.word_ids(number)
        inner = [position for position, word in enumerate(words) if word is not None]
        if owner == before:
            inner = inner[room // _CONTEXT_BEFORE :]
        else:
            before, previous = owner, None
        if owner == owners[number + 1]:
            inner = inner[: len(inner) - room // _CONTEXT_AFTER]
        represented: list[int | None] = [None] * len(words)
        for position in inner:
            if words[position] != previous:
                represented[position] = previous = words[position]
        yield owner, encoded[TOKEN_IDS][number], represented


def words_shared(room: int) -> int:
    """Return how many tokens windows of words share, of `room` that fit into each."""
    return room // _CONTEXT_BEFORE + room // _CONTEXT_AFTER
