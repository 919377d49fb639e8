"""Tokenise words with tags, in windows that fit; each tag is learned in exactly one window."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc  # type: ignore[import-untyped]
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from recipe.batching.document_batches import NOT_LEARNED
from recipe.console import say
from recipe.data.column_names import TAGS, TOKEN_IDS, TOKENS
from recipe.errors import DataError, ModelError
from recipe.settings import TRUNCATE
from recipe.tasks.token_classification.batches import HEADS, TAG_IDS, TaggedSamples
from recipe.tokenization import store

_LABELS = "labels"
_CONTEXT_BEFORE, _CONTEXT_AFTER = 4, 8
"""One in this many tokens of a window is context, which another window learns."""
Batch = Mapping[str, list[Any]]


@dataclass(frozen=True, kw_only=True)
class Tagging:
    """How the tags of words are assigned to tokens."""

    names: tuple[str, ...]
    """The tags; a tag's id is its position."""
    all_pieces: bool
    """Whether every piece of a word has its tag (I- after the first), not only the first piece."""
    long_texts: str | None
    """The hyperparameter; by default, sentences are split."""

    @functools.cached_property
    def ids(self) -> dict[str, int]:
        """Return the ids by name."""
        return {name: number for number, name in enumerate(self.names)}

    def inside(self, tag: str) -> int:
        """Return the id of a further piece of a word with `tag`."""
        return self.ids.get(f"I-{tag[2:]}" if tag.startswith("B-") else tag, self.ids[tag])


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
    within = tokenizer(" the the", add_special_tokens=False)
    return bool(alone[TOKEN_IDS][-1:] == within[TOKEN_IDS][-1:]) and len(alone[TOKEN_IDS]) == len(
        within[TOKEN_IDS]
    )


def tokenise(
    name: str,
    split: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    tagging: Tagging,
    *,
    judged: bool,
) -> TaggedSamples:
    """Return the windows of a split with the columns `tokens` and `tags`; log what was cut.

    A sentence of more than `max_length` tokens becomes several windows, which share some words as
    context; each word is learned and evaluated in one of them.

    Args:
        judged: Whether the model returns answers for each word.

    Raises:
        DataError: no word has a tag.
        ModelError: the tokenizer does not map tokens to words.
    """
    if not tokenizer.is_fast:
        raise ModelError(
            f"The tokenizer ({type(tokenizer).__name__}) does not map tokens to words.",
            "Give a model with a fast tokenizer (tokenizer.json).",
        )
    ways = ("tags", repr(tagging))
    made = store.tokens_of(
        split,
        store.key(split, tokenizer, max_length, *ways),
        functools.partial(_windows_of, tokenizer, max_length, tagging),
    )
    if not len(made[_LABELS]):
        raise DataError(f"No word of the {name} data has a tag that could be learned.")
    samples = TaggedSamples(
        made[TOKEN_IDS], made[store.STARTS], made[_LABELS], made[TAG_IDS], made[HEADS], judged
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
        of_words: dict[int, list[int]] = {}
        for word_index in inner:
            of_words.setdefault(owners[word_index], []).append(ids[word_index])
        words = list(of_words.items())
        room = max_length - len(before) - len(after)
        sizes = [len(pieces_of_word) for _, pieces_of_word in words]
        for window, learned in windows(sizes, room, tagging.long_texts != TRUNCATE):
            row, tag_ids, heads = list(before), [NOT_LEARNED] * len(before), [False] * len(before)
            for word_index in window:
                word, its_pieces = words[word_index]
                kept = its_pieces[: room - (len(row) - len(before))]
                tag = tags[word] if word_index in learned else None
                first = NOT_LEARNED if tag is None else tagging.ids[tag]
                others = tag is not None and tagging.all_pieces
                other = tagging.inside(tag) if others and tag is not None else NOT_LEARNED
                row += kept
                tag_ids += [first, *([other] * (len(kept) - 1))]
                heads += [tag is not None, *([False] * (len(kept) - 1))]
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
