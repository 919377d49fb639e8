"""Tokenise words with tags, in windows that fit, and make batches of these. The tag of a word is
that of its first token, which is learned in exactly one window; the model's head is computed for
these tokens only.

A batch has the tensors of any samples (`batches`), `places`, `targets` (NOT_LEARNED in unused
places) and `owners` as in `document_batches`, and `slots`, the number of each place's word in its
sample. `answers` [samples, 1 + 3 * words] has the shape of the model's outputs, in integers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc  # type: ignore[import-untyped]
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from recipe.batching import batches
from recipe.batching.batches import CompositeLayout
from recipe.batching.document_batches import NOT_LEARNED, pad_positions
from recipe.batching.packing import Rows
from recipe.batching.samples import Samples
from recipe.console import say
from recipe.data.column_names import TAGS, TOKEN_IDS, TOKENS
from recipe.errors import DataError, ModelError
from recipe.tokenization import store

_TAG_IDS, _LABELS = "tag_ids", "labels"
_CONTEXT_BEFORE, _CONTEXT_AFTER = 4, 8
"""One in this many tokens of a window is context, which another window learns."""
Batch = Mapping[str, list[Any]]


@dataclass(frozen=True)
class TaggedSamples(Samples):
    """Samples whose tokens have tags. The label of each is [how many of its tokens are learned,
    the number of its sentence]."""

    tags: Rows
    """The tag of each of `token_ids`, NOT_LEARNED for none."""
    judged: bool = False
    """Whether the model returns answers for each word in addition to losses."""

    def weight(self, rows: Rows) -> int:
        """Return the learned tokens of the samples at `rows`, over which the loss is the mean."""
        return int(self.labels[rows, 0].sum())

    def words(self) -> int:
        """Return a bound on the judged words of a sample, which is the same on every host."""
        return int(self.lengths.max(initial=0)) if self.judged else 0


@dataclass(frozen=True)
class TagLayout(CompositeLayout):
    """A layout of tagged samples."""

    learned: int
    """Most learned tokens in a batch; a rare batch has more."""
    words: int
    """Most judged words of a sample."""

    def tensors(self, samples: Samples, rows: Rows) -> batches.Batch:
        """Return the tensors of the texts, and the learned positions."""
        assert isinstance(samples, TaggedSamples)
        laid, first = self.laid(samples, rows)
        source, owner, within = samples.token_positions(rows)
        indices = np.flatnonzero(samples.tags[source] != NOT_LEARNED)
        source, owner, within = source[indices], owner[indices], within[indices]
        tags = samples.tags[source]
        batch = pad_positions(first[owner] + within, tags, owner, len(first), self.learned)
        # Unused places go to a slot after the last one, which is cut off.
        slots = np.full(len(batch["places"]), self.words, dtype=np.int64)
        if self.words:
            slots[: len(owner)] = within
        batch["slots"] = torch.from_numpy(slots)
        batch["answers"] = torch.zeros((len(first), 1 + 3 * self.words), dtype=torch.int8)
        return laid | batch


def reading_words(
    tokenizer: PreTrainedTokenizerBase, source: str, options: Mapping[str, Any]
) -> PreTrainedTokenizerBase:
    """Return a tokenizer that tokenises a single word as within a text, as serving does; tokenizers
    like GPT-2's need a space before it for that.

    Args:
        source: Where it comes from.
        options: What it is loaded with.
    """
    if _reads_words(tokenizer):
        return tokenizer
    again: Any = AutoTokenizer.from_pretrained(source, add_prefix_space=True, **options)
    again.pad_token = tokenizer.pad_token
    if not _reads_words(again) and again.is_fast:
        # tokenizer.json overrides the option.
        before = again.backend_tokenizer.pre_tokenizer
        if hasattr(before, "add_prefix_space"):
            before.add_prefix_space = True
            again.backend_tokenizer.pre_tokenizer = before
    if not _reads_words(again):
        say("warning: the tokenizer splits a single word differently from a word within a text")
    return again  # type: ignore[no-any-return]


def _reads_words(tokenizer: Any) -> bool:
    try:
        alone = tokenizer(["the", "the"], is_split_into_words=True, add_special_tokens=False)
    except (ValueError, AssertionError):  # RoBERTa's tokenizers refuse otherwise
        return False
    first, second = alone[TOKEN_IDS], tokenizer(" the the", add_special_tokens=False)[TOKEN_IDS]
    return bool(first[-1:] == second[-1:] and len(first) == len(second))


def tokenise(
    name: str,
    split: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    names: Sequence[str],
    is_split: bool,
) -> TaggedSamples:
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
    if not tokenizer.is_fast:
        raise ModelError(
            f"The tokenizer ({type(tokenizer).__name__}) does not map tokens to words.",
            "Give a model with a fast tokenizer (tokenizer.json).",
        )
    made = store.tokens_of(
        split,
        store.key(split, tokenizer, max_length, "tags", repr((*names, is_split))),
        functools.partial(_windows_of, tokenizer, max_length, tuple(names), is_split),
    )
    if not len(made[_LABELS]):
        raise DataError(f"No word of the {name} data has a tag that could be learned.")
    samples = TaggedSamples(
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


def lengths(split: datasets.Dataset, tokenizer: Any) -> list[int]:
    """Return the tokens of each sentence, uncut, with special tokens."""
    return [len(ids) for ids in _encoded(tokenizer, split[TOKENS][:])[TOKEN_IDS]]


def _encoded(tokenizer: Any, words: Sequence[Sequence[str]]) -> Any:
    return tokenizer(
        [list(word) for word in words],
        is_split_into_words=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )


def _windows_of(
    tokenizer: Any,
    max_length: int,
    names: Sequence[str],
    is_split: bool,
    batch: Batch,
    rows: range,
) -> dict[str, store.Column]:
    """Return the windows of some sentences in which a word has a tag."""
    encoded = _encoded(tokenizer, batch[TOKENS])
    numbers: dict[str | None, int] = {name: number for number, name in enumerate(names)}
    numbers[None] = NOT_LEARNED
    all_ids: list[list[int]] = []
    all_tags: list[list[int]] = []
    labels: list[list[int]] = []
    for index, (row, tags) in enumerate(zip(rows, batch[TAGS], strict=True)):
        ids, words = encoded[TOKEN_IDS][index], encoded.word_ids(index)
        inner = [position for position, word in enumerate(words) if word is not None]
        if not inner:
            continue
        body = slice(inner[0], inner[-1] + 1)
        before, body_ids, after = ids[: body.start], ids[body], ids[body.stop :]
        tag_ids = [
            NOT_LEARNED if word is None or word == previous else numbers[tags[word]]
            for previous, word in itertools.pairwise([None, *words[body]])
        ]
        room = max_length - len(before) - len(after)
        for window, learned in windows(len(tag_ids), room, is_split):
            kept = [
                tag_ids[position] if position in learned else NOT_LEARNED for position in window
            ]
            if count := len(kept) - kept.count(NOT_LEARNED):
                all_ids.append([*before, *body_ids[window.start : window.stop], *after])
                all_tags.append([*[NOT_LEARNED] * len(before), *kept, *[NOT_LEARNED] * len(after)])
                labels.append([count, row])
    return {
        TOKEN_IDS: store.flat(all_ids, np.int32),
        _TAG_IDS: store.flat(all_tags, np.int16),
        store.LENGTHS: store.lengths_of(all_ids),
        _LABELS: np.array(labels, np.int64).reshape(-1, 2),
    }


def windows(length: int, room: int, is_split: bool) -> Iterator[tuple[range, range]]:
    """Yield the tokens of each window, and which of them are learned there.

    Args:
        length: Tokens of a sentence.
        room: Tokens that fit into a window.
        is_split: Whether there is more than one.
    """
    context, rest = room // _CONTEXT_BEFORE, room // _CONTEXT_AFTER
    for begin in range(0, length, step(room)) if is_split else [0]:
        end = min(begin + room, length)
        is_last = end == length or not is_split
        yield range(begin, end), range(begin + context * (begin > 0), end - rest * (not is_last))
        if is_last:
            return


def step(room: int) -> int:
    """Return how many tokens a window begins after the one before it."""
    return max(1, room - room // _CONTEXT_BEFORE - room // _CONTEXT_AFTER)
