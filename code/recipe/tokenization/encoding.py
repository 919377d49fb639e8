"""Tokenize texts, in the same way for training and serving."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from recipe.data.column_names import TOKEN_IDS, TYPE_IDS
from recipe.errors import ModelError

Tokens = npt.NDArray[Any]
_CHARACTERS = 64
"""Characters of a text that are tokenized for each token that is kept; most tokens have 4 to 8."""
_USUAL_CHARACTERS = 16
_FEW_CHARACTERS = 8
UNCUT = 10**6
"""A length in tokens that truncates no text."""


def flat(rows: Sequence[Sequence[Any]], kind: Any) -> Tokens:
    """Return the concatenated items of lists."""
    return np.fromiter(itertools.chain.from_iterable(rows), kind, sum(map(len, rows)))


def lengths_of(rows: Sequence[Sequence[Any]]) -> Tokens:
    """Return the lengths of lists."""
    return np.fromiter(map(len, rows), np.int64, len(rows))


def beginning(
    tokenizer: PreTrainedTokenizerBase, text: str, max_length: int, most: int = sys.maxsize
) -> str:
    """Return a beginning of a text that has the same first `max_length` tokens as the whole text.

    Tokenizers read the whole text before they truncate it, which takes seconds for megabytes. Only
    a Unigram model may split a run of thousands of characters without a space differently than in
    the whole text, since many splits of such a run have equal scores.

    Args:
        text: Returned unchanged if no beginning determines its tokens.
        most: The most characters to tokenize for this.
    """
    size = min(_CHARACTERS * max_length, most)
    if len(text) <= size or tokenizer.truncation_side != "right":
        return text
    # A word may be cut at its end, which must be well after the last token.
    enough = 2 * max_length
    for head in (text[: min(size, _USUAL_CHARACTERS * max_length)], text[:size]):
        ids = tokenizer(head, truncation=True, max_length=enough, verbose=False)["input_ids"]
        if len(ids) == enough:
            return head
    return text


@contextmanager
def truncate_on(tokenizer: PreTrainedTokenizerBase, side: str) -> Iterator[None]:
    """Make the tokenizer truncate long texts on a side (left, right). The block must not pause,
    since other predictions share the tokenizer."""
    usual, tokenizer.truncation_side = tokenizer.truncation_side, side
    try:
        yield
    finally:
        tokenizer.truncation_side = usual


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_length: int
) -> list[list[int]]:
    """Return the token ids of each text with the model's special tokens, cut at `max_length`, not
    padded."""
    encoded = tokenizer(
        [beginning(tokenizer, text, max_length) for text in texts],
        truncation=True,
        max_length=max_length,
        return_attention_mask=False,
        return_token_type_ids=False,
    )
    ids: list[list[int]] = encoded["input_ids"]
    return ids


def types_alone(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether tokens of a single text have types other than 0 (XLNet, Funnel)."""
    return TYPE_IDS in tokenizer.model_input_names and any(tokenizer("a b")[TYPE_IDS])


def refuse_types(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check a model for a task whose training passes no token types, while serving would.

    Raises:
        ModelError: Tokens of a single text have types other than 0, and the model takes types.
    """
    if types_alone(tokenizer) and takes_token_types(model):
        raise ModelError(
            "The tokenizer assigns token types to single texts, which a model of type "
            f"{model.config.model_type} takes as inputs, and this task trains without them.",
            "Give a model of another kind (BERT, RoBERTa, DeBERTa, ModernBERT ...).",
        )


class Encoder:
    """Tokenizes many texts or pairs into arrays, with the results of `encode` and `encode_pairs`,
    and types where `types_alone`; without `max_length`, without truncation.

    It calls the tokenizers library directly, without offsets and their lists, which takes three
    quarters of the time. If the class of the tokenizer changes the library's results, which a few
    texts show, it calls transformers instead.

    Args:
        max_length: The length to truncate to; None for whole texts, but not for pairs.
        with_specials: Whether to add the model's special tokens, if texts are not truncated.
    """

    _TRIED = 32

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int | None = None,
        *,
        with_specials: bool = True,
    ) -> None:
        self.tokenizer, self._max_length = tokenizer, max_length
        self._with_specials = with_specials
        self._is_typed = max_length is not None and types_alone(tokenizer)
        self._is_plain: bool | None = None

    def encode(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None
    ) -> tuple[Tokens, Tokens | None, Tokens]:
        """Return the token ids [tokens] int32 of the texts one after the other, their types
        [tokens] int8 (of pairs, where the tokenizer has them), and the tokens of each text [texts].

        Args:
            texts: One at least.
        """
        rows, types = self.rows(texts, pairs)
        flat_types = None if types is None else flat(types, np.int8)
        return flat(rows, np.int32), flat_types, lengths_of(rows)

    def rows(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None
    ) -> tuple[list[list[int]], list[list[int]] | None]:
        """Return the token ids and the token types of each text, as lists."""
        if self._is_plain is None:
            some = slice(self._TRIED)
            few = texts[some], None if pairs is None else pairs[some]
            calls = [getattr(type(self.tokenizer), name, None)
                     for name in ("__call__", "_encode_plus", "_batch_encode_plus")]  # fmt: skip
            is_usual = self.tokenizer.is_fast and all(
                call is None or call.__module__.startswith("transformers.tokenization_utils")
                for call in calls
            )
            self._is_plain = is_usual and self._quickly(*few) == self._encode_with_library(*few)
        answer = self._quickly(texts, pairs) if self._is_plain else None
        return answer or self._encode_with_library(texts, pairs)

    def _encode_with_library(
        self, texts: Sequence[str], pairs: Sequence[str] | None
    ) -> tuple[list[list[int]], list[list[int]] | None]:
        if pairs is not None and self._max_length is not None:
            return encode_pairs(self.tokenizer, texts, pairs, self._max_length)
        options: dict[str, Any] = {"add_special_tokens": self._with_specials}
        if self._max_length is not None:
            texts = [beginning(self.tokenizer, text, self._max_length) for text in texts]
            options = {"truncation": True, "max_length": self._max_length}
        encoded: Any = self.tokenizer(
            list(texts),
            return_attention_mask=False,
            return_token_type_ids=self._is_typed,
            verbose=False,
            **options,
        )
        return encoded[TOKEN_IDS], encoded[TYPE_IDS] if self._is_typed else None

    def _quickly(
        self, texts: Sequence[str], pairs: Sequence[str] | None
    ) -> tuple[list[list[int]], list[list[int]] | None] | None:
        """Return None for pairs so long that `encode_pairs` has to shorten them first."""
        tokenizer, backend = self.tokenizer, self.tokenizer.backend_tokenizer
        heads: Any = list(texts)
        wanted = None
        if self._max_length is not None:
            wanted = {"max_length": self._max_length, "stride": 0, "strategy": "longest_first",
                      "direction": tokenizer.truncation_side}  # fmt: skip
            if pairs is None:
                heads = [beginning(tokenizer, text, self._max_length) for text in texts]
            else:
                longest = _FEW_CHARACTERS * self._max_length
                if max(map(len, (*texts, *pairs))) > longest:
                    return None
                heads = list(zip(texts, pairs, strict=True))
        # `beginning`, or another call, may have changed the truncation.
        if wanted is None and backend.truncation is not None:
            backend.no_truncation()
        elif wanted is not None and backend.truncation != wanted:
            backend.enable_truncation(**wanted)
        if backend.padding is not None:
            backend.no_padding()
        backend.encode_special_tokens = tokenizer.split_special_tokens
        made = backend.encode_batch_fast(heads, add_special_tokens=self._with_specials)
        ids = [encoding.ids for encoding in made]
        if not (self._is_typed if pairs is None else TYPE_IDS in tokenizer.model_input_names):
            return ids, None
        return ids, [encoding.type_ids for encoding in made]


def encode_pairs(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], pairs: Sequence[str], max_length: int
) -> tuple[list[list[int]], list[list[int]] | None]:
    """Return the token ids of each (text, pair) as the tokenizer joins the two, cut at `max_length`
    by taking tokens from the longer one (`longest_first`), not padded; and the type of each token,
    if the tokenizer has types."""
    call: Any = tokenizer
    options = {"truncation": "longest_first", "return_attention_mask": False, "verbose": False}
    heads = [beginning_of_two(tokenizer, text, max_length) for text in texts]
    other_heads = [beginning_of_two(tokenizer, text, max_length) for text in pairs]
    encoded = call(heads, other_heads, max_length=max_length, **options)
    ids: list[list[int]] = encoded["input_ids"]
    types: list[list[int]] | None = encoded.get("token_type_ids")
    for row, whole in enumerate(zip(texts, pairs, strict=True)):
        head = heads[row], other_heads[row]
        if whole == head or not tokenizer.is_fast:
            continue
        owners = encoded.sequence_ids(row)
        if abs(owners.count(0) - owners.count(1)) != 1:
            continue
        # With an odd limit the longer text keeps one token more, and the beginnings do not show
        # which text is longer. So both keep the same number, and the shorter one then loses its
        # last token.
        even = call([head[0]], [head[1]], max_length=max_length + 1, **options)
        owners = even.sequence_ids(0)
        if owners.count(0) != owners.count(1):
            continue
        counts = [len(call(text, add_special_tokens=False, verbose=False).input_ids)
                  for text in whole]  # fmt: skip
        shorter = 1 if counts[0] > counts[1] else 0
        position = max(index for index, owner in enumerate(owners) if owner == shorter)
        ids[row] = [*even[TOKEN_IDS][0][:position], *even[TOKEN_IDS][0][position + 1 :]]
        if types is not None:
            types[row] = [*even[TYPE_IDS][0][:position], *even[TYPE_IDS][0][position + 1 :]]
    return ids, types


def beginning_of_two(tokenizer: PreTrainedTokenizerBase, text: str, max_length: int) -> str:
    """Return a beginning of a text of a pair that decides which of its tokens may be kept.

    The library builds every combination of the overflowing pieces of both texts: 1,600 pairs for
    two texts of 20 times the length.
    """
    text = beginning(tokenizer, text, max_length)
    if len(text) <= _FEW_CHARACTERS * max_length or not tokenizer.is_fast:
        return text
    if tokenizer.truncation_side != "right":
        return text
    encoded: Any = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    ends = [end for _, end in encoded["offset_mapping"]]
    return text if len(ends) <= 2 * max_length else text[: ends[2 * max_length - 1]]


def takes_token_types(model: PreTrainedModel) -> bool:
    """Return whether `model` uses token types."""
    wrapped: Any = model
    inner = wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else wrapped
    if getattr(inner.config, "type_vocab_size", 2) == 0:
        return False
    return TYPE_IDS in inspect.signature(type(inner).forward).parameters
