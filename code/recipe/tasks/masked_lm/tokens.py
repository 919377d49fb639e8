"""Tokenise texts in pieces that fit, and record the words to mask."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from recipe.console import say
from recipe.data.column_names import TEXT, TOKEN_IDS
from recipe.errors import DataError, HyperparameterError
from recipe.tasks.masked_lm.batches import BACK, NEVER, MaskedTexts, Masking
from recipe.tasks.masked_lm.spec import Options
from recipe.tokenization import store
from recipe.tokenization import texts as tokens
from recipe.tokenization.encoding import Encoder

_ROW = "row"
_LOOKED_AT = 200
_NO_WORD = -1
Batch = Mapping[str, list[Any]]


def tokenise(
    name: str,
    split: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    options: Options,
    truncates: bool,
) -> MaskedTexts:
    """Return the samples of a split of `language_modeling.Texts`, cached; log their number.

    A text longer than `max_length` is split between words into pieces of nearly equal length, each
    with the tokenizer's special tokens.

    Args:
        truncates: Whether only the first piece is kept (long_texts=truncate).

    Raises:
        DataError: Nothing is left to learn, or the token ids are not this tokenizer's.
        HyperparameterError: Whole words are requested, and the tokenizer does not mark words.
    """
    whole_words = options.whole_word_masking
    if whole_words:
        reason = "Hyperparameter whole_word_masking has value True, but"
        if TOKEN_IDS in split.column_names:
            raise HyperparameterError(
                f"{reason} the data came tokenised, so that words cannot be told apart.",
                "Give the texts.",
            )
        if not tokenizer.is_fast:
            raise HyperparameterError(
                f"{reason} the model's tokenizer is written in Python and does not separate words.",
                "Leave it out, or give a model with a tokenizer.json.",
            )
        first_rows = split.select(range(min(_LOOKED_AT, len(split))))
        encoded: Any = tokenizer(first_rows[TEXT][:], add_special_tokens=False, verbose=False)
        count = sum(len(set(encoded.word_ids(row))) for row in range(len(first_rows)))
        written = [len(str(text).split()) for text in first_rows[TEXT]]
        if count < sum(written) / 2:
            raise HyperparameterError(
                f"{reason} the model's tokenizer separates {count} words in "
                f"{len(first_rows)} texts of {sum(written)} words.",
                "Leave it out: tokens are masked one by one.",
            )
    make = functools.partial(_Reader(tokenizer, whole_words).pieces, max_length, truncates)
    ways = ("masked", str(whole_words), str(truncates))
    made = store.tokens_of(split, store.key(split, tokenizer, max_length, *ways), make)
    ids: Any = tokenizer
    how = Masking(
        probability=options.mlm_probability,
        mask_id=int(ids.mask_token_id),
        vocabulary=len(tokenizer),
        pad_id=int(ids.pad_token_id),
    )
    samples = MaskedTexts.drawn_from(
        made[TOKEN_IDS], made[store.STARTS], made[BACK], how, is_fixed=name != "train"
    )
    if len(samples) == 0:
        raise DataError(f"The {name} data has {len(split)} texts, and none has a token.")
    kept = len(np.unique(made[_ROW]))
    line = f"{name}: {kept} texts in {len(samples)} pieces, {len(samples.token_ids)} tokens, "
    line += f"{how.probability:.0%} of {'words' if whole_words else 'tokens'} masked"
    if name != "train":
        line += f", the same {samples.labels.sum()} each time"
    if left_out := len(split) - kept:
        line += f"; {left_out} texts are left out, as they have no token"
    say(line)
    return samples


def lengths(split: datasets.Dataset, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of each text, uncut, with special tokens."""
    reader = _Reader(tokenizer, whole_words=False)
    _, _, inner = reader.read(split[:], range(len(split)))
    return [int(length) + len(reader.before) + len(reader.after) for length in inner]


def pieces(words: store.Column, room: int, truncates: bool) -> Iterator[slice]:
    """Yield the pieces of a text as slices of at most `room` tokens.

    A piece ends between words, unless a word takes more than half of it.

    Args:
        words: The number of each token's word, _NO_WORD for none.
    """
    count = len(words)
    if truncates:
        yield slice(min(room, count))
        return
    start = 0
    while start < count:
        left = count - start
        end = start + -(-left // -(-left // room))
        position = end
        while (
            position < count
            and position > start + room // 2
            and words[position] == words[position - 1] != _NO_WORD
        ):
            position -= 1
        end = position if position == count or words[position] != words[position - 1] else end
        yield slice(start, end)
        start = end


class _Reader:
    """Converts rows of texts to tokens and their words."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, whole_words: bool) -> None:
        self._tokenizer, self._whole_words = tokenizer, whole_words
        self._encoder = Encoder(tokenizer, with_specials=False)
        encoded = tokenizer("a", return_special_tokens_mask=True)
        ids, special = encoded["input_ids"], encoded["special_tokens_mask"]
        first, last = special.index(0), len(ids) - special[::-1].index(0)
        self.before, self.after = ids[:first], ids[last:]
        """The special tokens that stand before and after each text."""

    def read(self, batch: Batch, rows: range) -> tuple[store.Column, store.Column, store.Column]:
        """Return the token ids [tokens] of texts without special tokens, the number of each token's
        word in its text (_NO_WORD for none), and the tokens of each text [texts].

        Raises:
            DataError: tokenised data is not this tokenizer's.
        """
        if TOKEN_IDS in batch:
            tokens.check_ids(batch[TOKEN_IDS], self._tokenizer, rows.start)
            before, after = self.before, self.after
            inner = []
            for row in batch[TOKEN_IDS]:
                if before and row[: len(before)] == before:
                    row = row[len(before) :]
                if after and row[-len(after) :] == after:
                    row = row[: -len(after)]
                inner.append(row)
            ids, lengths = store.flat(inner, np.int32), store.lengths_of(inner)
        elif self._whole_words:
            encoded: Any = self._tokenizer(
                batch[TEXT], add_special_tokens=False, return_attention_mask=False, verbose=False
            )
            ids = store.flat(encoded[TOKEN_IDS], np.int32)
            numbers = itertools.chain.from_iterable(map(encoded.word_ids, range(len(rows))))
            words = (_NO_WORD if word is None else word for word in numbers)
            return ids, np.fromiter(words, np.int64, len(ids)), store.lengths_of(encoded[TOKEN_IDS])
        else:
            ids, _, lengths = self._encoder.encode(batch[TEXT])
        # Each token is a word.
        return ids, np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths), lengths

    def pieces(
        self, max_length: int, truncates: bool, batch: Batch, rows: range
    ) -> dict[str, store.Column]:
        """Return the pieces of some texts."""
        ids, words, lengths = self.read(batch, rows)
        special = len(self.before) + len(self.after)
        never = set(self._tokenizer.all_special_ids) - {self._tokenizer.unk_token_id}
        words = np.where(np.isin(ids, sorted(never)), _NO_WORD, words)
        starts = np.cumsum(lengths) - lengths
        cut: list[list[slice]] = [
            [slice(0, length)] if 0 < length <= max_length - special
            else list(pieces(words[start : start + length], max_length - special, truncates))
            if length else []
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        ]  # fmt: skip
        counts = store.lengths_of(cut)
        owners = np.repeat(np.arange(len(cut)), counts)
        begins = np.fromiter((p.start or 0 for some in cut for p in some), np.int64, len(owners))
        inner = np.fromiter((p.stop for some in cut for p in some), np.int64, len(owners)) - begins
        begins += starts[owners]
        of_pieces = np.cumsum(inner) - inner  # where each begins, without special tokens
        positions = np.repeat(begins - of_pieces, inner) + np.arange(int(inner.sum()))
        # A piece's first token begins a word, whatever came before it.
        kept_words = words[positions]
        goes_on = np.concatenate([[False], kept_words[1:] == kept_words[:-1]])[: len(positions)]
        goes_on[of_pieces] = False
        indices = np.arange(len(positions))
        back = indices - np.maximum.accumulate(np.where(goes_on, 0, indices))
        back[kept_words == _NO_WORD] = NEVER
        # Special tokens around each piece: where two meet, the last ones of the first come first.
        edges = [np.repeat(of_pieces + inner, len(self.after)),
                 np.repeat(of_pieces, len(self.before))]  # fmt: skip
        positions_of_specials = np.concatenate(edges)
        specials = [*self.after * len(owners), *self.before * len(owners)]
        return {
            TOKEN_IDS: np.insert(ids[positions], positions_of_specials, specials),
            BACK: np.insert(back.astype(np.int16), positions_of_specials, NEVER),
            store.LENGTHS: inner + special,
            _ROW: owners + rows.start,
        }
