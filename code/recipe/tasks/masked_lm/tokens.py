"""Tokenize texts in pieces that fit."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from recipe.console import say
from recipe.data.column_names import TEXT, TOKEN_IDS
from recipe.errors import DataError
from recipe.tasks.masked_lm.batches import MaskedTexts, Masking
from recipe.tasks.masked_lm.spec import Options
from recipe.tokenization import store
from recipe.tokenization import texts as tokens
from recipe.tokenization.encoding import Encoder

_ROW = "row"
Batch = Mapping[str, list[Any]]


def tokenize_split(
    name: str,
    split: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    options: Options,
    truncates: bool,
) -> MaskedTexts:
    """Return the samples of a split of `language_modeling.Texts`, cached; log their number.

    A text longer than `max_length` is split into pieces of nearly equal length, each with the
    tokenizer's special tokens.

    Args:
        truncates: Whether only the first piece is kept (long_texts=truncate).

    Raises:
        DataError: Nothing is left to learn, or the token ids are not this tokenizer's.
    """
    reader = _Reader(tokenizer)
    make = functools.partial(reader.pieces, max_length, truncates)
    key = store.key(split, tokenizer, max_length, "masked 2", str(truncates))
    made = store.tokens_of(split, key, make)
    ids: Any = tokenizer
    special = {*tokenizer.all_special_ids, *reader.before, *reader.after}
    how = Masking(
        probability=options.mlm_probability,
        mask_id=int(ids.mask_token_id),
        vocabulary=len(tokenizer),
        pad_id=int(ids.pad_token_id),
        never=tuple(sorted(special - {tokenizer.unk_token_id})),
    )
    samples = MaskedTexts.drawn_from(
        made[TOKEN_IDS], made[store.STARTS], how, is_fixed=name != "train"
    )
    if len(samples) == 0:
        raise DataError(f"The {name} data has {len(split)} texts, and none has a token.")
    kept = len(np.unique(made[_ROW]))
    line = f"{name}: {kept} texts in {len(samples)} pieces, {len(samples.token_ids)} tokens, "
    line += f"{how.probability:.0%} of tokens masked"
    if name != "train":
        line += f", the same {samples.labels.sum()} each time"
    if left_out := len(split) - kept:
        line += f"; {left_out} texts are left out, as they have no token"
    say(line)
    return samples


def lengths(split: datasets.Dataset, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of each text, uncut, with special tokens."""
    reader = _Reader(tokenizer)
    _, inner = reader.read(split[:], range(len(split)))
    return [int(length) + len(reader.before) + len(reader.after) for length in inner]


class _Reader:
    """Converts rows of texts to tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer, with_specials=False)
        encoded = tokenizer("a", return_special_tokens_mask=True)
        ids, special = encoded["input_ids"], encoded["special_tokens_mask"]
        first, last = special.index(0), len(ids) - special[::-1].index(0)
        self.before, self.after = ids[:first], ids[last:]
        """The special tokens that stand before and after each text."""

    def read(self, batch: Batch, rows: range) -> tuple[store.Column, store.Column]:
        """Return the token ids [tokens] of texts without special tokens, and the tokens of each
        text [texts].

        Raises:
            DataError: tokenized data is not this tokenizer's.
        """
        if TOKEN_IDS not in batch:
            ids, _, lengths = self._encoder.encode(batch[TEXT])
            return ids, lengths
        tokens.check_ids(batch[TOKEN_IDS], self._tokenizer, rows.start)
        before, after = self.before, self.after
        inner = []
        for row in batch[TOKEN_IDS]:
            if before and row[: len(before)] == before:
                row = row[len(before) :]
            if after and row[-len(after) :] == after:
                row = row[: -len(after)]
            inner.append(row)
        return store.flat(inner, np.int32), store.lengths_of(inner)

    def pieces(
        self, max_length: int, truncates: bool, batch: Batch, rows: range
    ) -> dict[str, store.Column]:
        """Return the pieces of some texts."""
        ids, lengths = self.read(batch, rows)
        room = max_length - len(self.before) - len(self.after)
        starts = np.cumsum(lengths) - lengths
        if truncates:
            lengths = np.minimum(lengths, room)
        counts = -(-lengths // room)
        owners = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        # The first pieces of a text have one token more than the others.
        size, longer = (part[owners] for part in np.divmod(lengths, np.maximum(counts, 1)))
        inner = size + (number < longer)
        begins = starts[owners] + number * size + np.minimum(number, longer)
        ends = np.cumsum(inner)
        positions = np.repeat(begins - (ends - inner), inner) + np.arange(int(inner.sum()))
        # Special tokens around each piece: where two meet, the last ones of the first come first.
        edges = [np.repeat(ends, len(self.after)), np.repeat(ends - inner, len(self.before))]
        specials = [*self.after * len(owners), *self.before * len(owners)]
        return {
            TOKEN_IDS: np.insert(ids[positions], np.concatenate(edges), specials),
            store.LENGTHS: inner + max_length - room,
            _ROW: owners + rows.start,
        }
