"""Texts to token ids whose words can be masked, in pieces that fit."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase

from recipe.batching.masked_batches import BACK, NEVER, MaskedTexts, Masking, words_of
from recipe.console import say
from recipe.data.column_names import TEXT, TOKEN_IDS
from recipe.errors import DataError, HyperparameterError
from recipe.hyperparameters import TRUNCATE, Hyperparameters
from recipe.tokenization import texts as tokens

_ROW = "row"
_LOOKED_AT = 200
Encoded = tuple[list[int], list[int | None]]
"""Token ids of a text without special tokens, and the number of each token's word."""


def tokenise(
    name: str,
    split: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    hyperparameters: Hyperparameters,
) -> MaskedTexts:
    """The samples of a split of `language_modeling.Texts`, cached; a line says what became of them.

    A text longer than `max_length` is split into pieces of nearly one length, between words; each
    has the tokenizer's special tokens around it. With long_texts=truncate the first is kept.

    Raises:
        DataError: nothing is left to learn, or tokenised data is not this tokenizer's.
        HyperparameterError: whole words were asked for, and the tokenizer does not tell them apart.
    """
    whole_words = hyperparameters.whole_word_masking
    if TOKEN_IDS in split.column_names:
        tokens.check_ids(split[TOKEN_IDS][:], tokenizer)
    if whole_words:
        _check_words(split, tokenizer)
    truncates = hyperparameters.long_texts == TRUNCATE
    ways = ("masked", str(whole_words), str(truncates))
    encoded = tokens.cached(
        split,
        tokens.key(split, tokenizer, max_length, *ways),
        functools.partial(_rows, tokenizer, max_length, whole_words, truncates),
        with_indices=True,
        remove_columns=split.column_names,
    )
    if len(encoded) == 0:
        raise DataError(f"The {name} data has {len(split)} texts, and none has a token.")
    masking = Masking(
        probability=hyperparameters.mlm_probability,
        mask_id=int(tokenizer.mask_token_id),
        vocabulary=len(tokenizer),
        pad_id=int(tokenizer.pad_token_id),
    )
    samples = MaskedTexts.drawn_from(encoded, masking, is_fixed=name != "train")
    kept = len(set(encoded[_ROW][:]))
    line = f"{name}: {kept} texts in {len(samples)} pieces, {len(samples.token_ids)} tokens, "
    line += f"{masking.probability:.0%} of {'words' if whole_words else 'tokens'} masked"
    if name != "train":
        line += f", the same {samples.labels.sum()} each time"
    if left_out := len(split) - kept:
        line += f"; {left_out} texts are left out, as they have no token"
    say(line)
    return samples


def lengths(split: datasets.Dataset, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens of each text, uncut, with special tokens."""
    before, after = _around(tokenizer)
    special = len(before) + len(after)
    return [len(ids) + special for ids, _ in _encoded(tokenizer, split[:], False)]


def pieces(words: Sequence[int | None], room: int, truncates: bool) -> Iterator[slice]:
    """Where the pieces of a text are in it, each of `room` tokens at most.

    A piece ends between words, unless one of more than half of it stands there.
    """
    count = len(words)
    if truncates:
        yield slice(min(room, count))
        return
    start = 0
    while start < count:
        left = count - start
        end = start + -(-left // -(-left // room))
        at = end
        while at < count and at > start + room // 2 and words[at] == words[at - 1] is not None:
            at -= 1
        end = at if at == count or words[at] != words[at - 1] else end
        yield slice(start, end)
        start = end


def _rows(
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    whole_words: bool,
    truncates: bool,
    batch: Mapping[str, Sequence[Any]],
    rows: Sequence[int],
) -> dict[str, list[Any]]:
    """The pieces of some texts."""
    before, after = _around(tokenizer)
    room = max_length - len(before) - len(after)
    columns: dict[str, list[Any]] = {TOKEN_IDS: [], BACK: [], _ROW: []}
    never = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    for row, (ids, words) in zip(rows, _encoded(tokenizer, batch, whole_words), strict=True):
        numbers = [None if id_ in never else word for id_, word in zip(ids, words, strict=True)]
        for piece in pieces(numbers, room, truncates) if ids else ():
            inner = words_of(numbers[piece])
            columns[TOKEN_IDS].append([*before, *ids[piece], *after])
            columns[BACK].append([*(NEVER for _ in before), *inner, *(NEVER for _ in after)])
            columns[_ROW].append(row)
    return columns


def _around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The special tokens that stand before and after each text."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    ids, special = encoded["input_ids"], encoded["special_tokens_mask"]
    first = special.index(0)
    last = len(ids) - special[::-1].index(0)
    return ids[:first], ids[last:]


def _encoded(
    tokenizer: PreTrainedTokenizerBase, batch: Mapping[str, Sequence[Any]], whole_words: bool
) -> Iterator[Encoded]:
    if TOKEN_IDS in batch:
        before, after = _around(tokenizer)
        for row in batch[TOKEN_IDS]:
            ids = list(row)
            if before and ids[: len(before)] == before:
                ids = ids[len(before) :]
            if after and ids[-len(after) :] == after:
                ids = ids[: -len(after)]
            yield ids, list(range(len(ids)))
        return
    encoded: Any = tokenizer(
        list(batch[TEXT]), add_special_tokens=False, return_attention_mask=False, verbose=False
    )
    for row, ids in enumerate(encoded["input_ids"]):
        yield ids, encoded.word_ids(row) if whole_words else list(range(len(ids)))


def _check_words(split: datasets.Dataset, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises HyperparameterError where whole words cannot be masked."""
    reason = "Hyperparameter whole_word_masking has value True, but"
    if TOKEN_IDS in split.column_names:
        raise HyperparameterError(
            f"{reason} the data came tokenised, which does not tell words apart.", "Give the texts."
        )
    if not tokenizer.is_fast:
        raise HyperparameterError(
            f"{reason} the model's tokenizer is one in Python, which does not tell words apart.",
            "Leave it out, or give a model with a tokenizer.json.",
        )
    first_rows = split.select(range(min(_LOOKED_AT, len(split))))
    counts = [len(set(words)) for _, words in _encoded(tokenizer, first_rows[:], True)]
    written = [len(str(text).split()) for text in first_rows[TEXT]]
    if sum(counts) < sum(written) / 2:
        raise HyperparameterError(
            f"{reason} the model's tokenizer tells {sum(counts)} words apart in "
            f"{len(first_rows)} texts of {sum(written)} words.",
            "Leave it out: tokens are masked one by one.",
        )
