"""Tokenise words with tags, in windows that fit, and make batches of these. Each tag is learned in
exactly one window, and the model's head is computed for tokens with tags only.

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
from recipe.settings import TRUNCATE
from recipe.tokenization import store

TAG_IDS, HEADS, _LABELS = "tag_ids", "heads", "labels"
_CONTEXT_BEFORE, _CONTEXT_AFTER = 4, 8
"""One in this many tokens of a window is context, which another window learns."""
Batch = Mapping[str, list[Any]]


@dataclass(frozen=True)
class TaggedSamples(Samples):
    """Samples whose tokens have tags. The label of each is [how many of its tokens are learned,
    the number of its sentence]."""

    tags: Rows
    """The tag of each of `token_ids`, NOT_LEARNED for none."""
    heads: Rows
    """Whether each of `token_ids` is the first piece of a word with a tag."""
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
        # Tokens that are not evaluated go to a slot after the last word, which is cut off.
        slots = np.full(len(batch["places"]), self.words, dtype=np.int64)
        heads = np.flatnonzero(samples.heads[source])
        if self.words and len(heads):
            of_heads = owner[heads]
            starts = np.searchsorted(of_heads, of_heads)
            slots[heads] = np.arange(len(heads)) - starts
        batch["slots"] = torch.from_numpy(slots)
        batch["answers"] = torch.zeros((len(first), 1 + 3 * self.words), dtype=torch.int8)
        return laid | batch


@dataclass(frozen=True, kw_only=True)
class Tagging:
    """How the tags of words are assigned to tokens."""

    names: tuple[str, ...]
    """The tags; a tag's id is its position."""
    all_pieces: bool
    """Whether every piece of a word has its tag (I- after the first), not only the first piece."""
    long_texts: str | None
    """The hyperparameter; by default, sentences are split."""

    def ids(self, tag: str | None, count: int) -> list[int]:
        """Return the ids of the pieces of a word with `tag`, NOT_LEARNED for none."""
        if tag is None:
            return [NOT_LEARNED] * count
        rest = NOT_LEARNED
        if self.all_pieces:
            inside = f"I-{tag[2:]}" if tag.startswith("B-") else tag
            rest = self._numbers.get(inside, self._numbers[tag])
        return [self._numbers[tag], *[rest] * (count - 1)]

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}


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
    tagging: Tagging,
) -> TaggedSamples:
    """Return the windows of a split with the columns `tokens` and `tags`; log what was cut.

    A sentence of more than `max_length` tokens becomes several windows, which share some words as
    context; each word is learned and evaluated in one of them.

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
        store.key(split, tokenizer, max_length, "tags", repr(tagging)),
        functools.partial(_windows_of, tokenizer, max_length, tagging),
    )
    if not len(made[_LABELS]):
        raise DataError(f"No word of the {name} data has a tag that could be learned.")
    samples = TaggedSamples(
        made[TOKEN_IDS],
        made[store.STARTS],
        made[_LABELS],
        made[TAG_IDS],
        made[HEADS],
        judged=name != "train",
    )
    tagged = 0
    for table in store.tables(split.select_columns([TAGS])):
        tags = pc.list_flatten(table[TAGS])
        tagged += len(tags) - tags.null_count
    sentences, heads = len(np.unique(samples.labels[:, 1])), int(np.count_nonzero(samples.heads))
    line = f"{name}: {sentences} sentences in {len(samples)} windows, {heads} words with tags"
    if lost := tagged - heads:
        how = f"cut at {max_length} tokens" if tagging.long_texts == TRUNCATE else "no tokens"
        line += f"; {lost} words are neither learned nor evaluated: {how}"
    say(line)
    return samples


def lengths(split: datasets.Dataset, tokenizer: Any) -> list[int]:
    """Return the tokens of each sentence, uncut, with special tokens."""
    return [len(ids) for ids in _encoded(tokenizer, split[TOKENS][:])[TOKEN_IDS]]


def pieces(length: int, longest: int, is_split: bool) -> int:
    """Return about how many windows a sentence of `length` tokens becomes."""
    step = max(1, longest - longest // _CONTEXT_BEFORE - longest // _CONTEXT_AFTER)
    return 1 + max(0, -(-(length - longest) // step)) if is_split else 1


def _encoded(tokenizer: Any, words: Sequence[Sequence[str]]) -> Any:
    return tokenizer(
        [list(word) for word in words],
        is_split_into_words=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )


def _windows_of(
    tokenizer: Any, max_length: int, tagging: Tagging, batch: Batch, rows: range
) -> dict[str, store.Column]:
    """Return the windows of some sentences in which a word has a tag."""
    encoded = _encoded(tokenizer, batch[TOKENS])
    all_ids: list[list[int]] = []
    all_tags: list[list[int]] = []
    all_heads: list[list[bool]] = []
    numbers: list[int] = []
    for index, (number, tags) in enumerate(zip(rows, batch[TAGS], strict=True)):
        ids, owners = encoded[TOKEN_IDS][index], encoded.word_ids(index)
        inner = [position for position, word in enumerate(owners) if word is not None]
        if not inner:
            continue
        before, after = ids[: inner[0]], ids[inner[-1] + 1 :]
        room = max_length - len(before) - len(after)
        words = [
            (tags[word], [ids[position] for position in positions][:room])
            for word, positions in itertools.groupby(inner, owners.__getitem__)
        ]
        sizes = [len(pieces_of_word) for _, pieces_of_word in words]
        for window, learned in windows(sizes, room, tagging.long_texts != TRUNCATE):
            row, tag_ids, heads = list(before), [NOT_LEARNED] * len(before), [False] * len(before)
            for position in window:
                tag, its_pieces = words[position]
                tag = tag if position in learned else None
                row += its_pieces
                tag_ids += tagging.ids(tag, len(its_pieces))
                heads += [tag is not None, *([False] * (len(its_pieces) - 1))]
            if any(heads):
                all_ids.append(row + after)
                all_tags.append(tag_ids + [NOT_LEARNED] * len(after))
                all_heads.append(heads + [False] * len(after))
                numbers.append(number)
    learned_tokens = [sum(tag != NOT_LEARNED for tag in tag_ids) for tag_ids in all_tags]
    return {
        TOKEN_IDS: store.flat(all_ids, np.int32),
        TAG_IDS: store.flat(all_tags, np.int16),
        HEADS: store.flat(all_heads, bool),
        store.LENGTHS: store.lengths_of(all_ids),
        _LABELS: np.array([learned_tokens, numbers], np.int64).T,
    }


def windows(sizes: Sequence[int], room: int, is_split: bool) -> Iterator[tuple[range, range]]:
    """Yield the words of each window, and which of them are learned there.

    Args:
        sizes: Tokens of each word of a sentence.
        room: Tokens that fit into a window; longer words are cut.
        is_split: Whether there is more than one.
    """
    start = 0
    while start < len(sizes):
        begin, used, context = start, min(sizes[start], room), room // _CONTEXT_BEFORE
        while begin > 0 and sizes[begin - 1] <= min(context, room - used):
            begin -= 1
            context -= sizes[begin]
            used += sizes[begin]
        end = start + 1
        while end < len(sizes) and used + sizes[end] <= room:
            used += sizes[end]
            end += 1
        until = end
        if end < len(sizes) and is_split:
            left = room // _CONTEXT_AFTER
            while until > start + 1 and sizes[until - 1] <= left:
                left -= sizes[until - 1]
                until -= 1
        yield range(begin, end), range(start, until)
        if not is_split:
            return
        start = until
