"""Tokenize words with tags, in windows that fit."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc  # type: ignore[import-untyped]
from transformers import PreTrainedTokenizerBase

from recipe.batching.document_batches import NOT_LEARNED, TaggedTexts
from recipe.console import say
from recipe.data.column_names import TAGS, TOKEN_IDS, TOKENS
from recipe.errors import DataError
from recipe.tokenization import store
from recipe.tokenization.windows import check_fast, word_windows

_TAG_IDS, _LABELS = "tag_ids", "labels"


def tokenize_split(
    name: str,
    split: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    names: Sequence[str],
    is_split: bool,
) -> TaggedTexts:
    """Return the windows of a split with the columns `tokens` and `tags`; log what was cut.

    A sentence of more than `max_length` tokens becomes several windows, which share some tokens as
    context; each word is learned and evaluated in one of them.

    Args:
        names: The tags; a tag's id is its position.
        is_split: Whether long sentences are split; otherwise they are cut.

    Raises:
        DataError: no word has a tag.
        ModelError: the tokenizer does not map tokens to words.
    """
    check_fast(tokenizer)
    made = store.tokens_of(
        split,
        store.key(split, tokenizer, max_length, "tags", repr((*names, is_split))),
        functools.partial(_windows_of, tokenizer, max_length, tuple(names), is_split),
    )
    if not len(made[_LABELS]):
        raise DataError(f"No word of the {name} data has a tag that could be learned.")
    samples = TaggedTexts(
        made[TOKEN_IDS], made[store.STARTS], made[_LABELS], made[_TAG_IDS], judged=name != "train"
    )
    tagged = 0
    for table in store.tables(split.select_columns([TAGS])):
        tags = pc.list_flatten(table[TAGS])
        tagged += len(tags) - tags.null_count
    learned, sentences = samples.labels[:, 0].sum(), len(np.unique(samples.labels[:, 1]))
    line = f"{name}: {sentences} sentences in {len(samples)} windows, {learned} words with tags"
    if lost := tagged - learned:
        how = "no tokens" if is_split else f"cut at {max_length} tokens"
        line += f"; {lost} words are neither learned nor evaluated: {how}"
    say(line)
    return samples


def _windows_of(
    tokenizer: Any,
    max_length: int,
    names: Sequence[str],
    is_split: bool,
    batch: Mapping[str, list[Any]],
    rows: range,
) -> dict[str, store.Column]:
    """Return the windows of some sentences in which a word has a tag."""
    numbers: dict[str | None, int] = {name: number for number, name in enumerate(names)}
    numbers[None] = NOT_LEARNED
    all_ids, all_tags, labels = [], [], []
    for row, ids, words in word_windows(tokenizer, batch[TOKENS], max_length, is_split):
        tags = batch[TAGS][row]
        tag_ids = [NOT_LEARNED if word is None else numbers[tags[word]] for word in words]
        if count := len(tag_ids) - tag_ids.count(NOT_LEARNED):
            all_ids.append(ids)
            all_tags.append(tag_ids)
            labels.append([count, rows[row]])
    return {
        TOKEN_IDS: store.flat(all_ids, np.int32),
        _TAG_IDS: store.flat(all_tags, np.int16),
        store.LENGTHS: store.lengths_of(all_ids),
        _LABELS: np.array(labels, np.int64).reshape(-1, 2),
    }
