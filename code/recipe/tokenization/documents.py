"""Tokenise documents in pieces that fit, and mark the tokens that are learned."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from recipe.batching.document_batches import Documents
from recipe.console import say, say_row
from recipe.data.column_names import COMPLETION, LEARNED, MESSAGES, PROMPT, TEXT, TOKEN_IDS
from recipe.errors import DataError
from recipe.tokenization import chat, store
from recipe.tokenization import texts as tokens
from recipe.tokenization.encoding import Encoder
from recipe.value_ranges import SPLIT

_ROW, _GUESSED, _LABELS = "row", "guessed", "labels"
Batch = Mapping[str, list[Any]]


@dataclass(frozen=True)
class Marked:
    """Tokenised documents, concatenated."""

    ids: store.Column
    """[tokens]"""
    learned: store.Column
    """[tokens]: whether each is learned."""
    lengths: store.Column
    """[documents]"""
    is_guessed: store.Column
    """[documents]: whether the chat template does not mark the assistant's tokens."""


def tokenise(
    name: str,
    split: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    long_texts: str | None,
) -> Documents:
    """Return the cached documents of a split of `language_modeling.Texts`, and log a summary.

    Each ends with the end token. A text longer than `max_length` is truncated, or split into
    pieces, each of which starts with the last token of the one before, so that every token but
    the first is learned once.

    Args:
        name: Of the split, for messages.
        long_texts: The hyperparameter.

    Raises:
        DataError: Nothing is left to learn, or the chat template rejects a conversation.
    """
    is_split = splits(split, long_texts)
    if MESSAGES in split.column_names:
        chat.see_to_template(tokenizer)
    if not len(split):  # the rows of this host of several
        none = np.empty(0, np.int64)
        return Documents(none.astype(np.int32), np.zeros(1, np.int64), none, none.astype(bool))
    reader = Reader(tokenizer)

    def make(batch: Batch, rows: range) -> dict[str, store.Column]:
        return _pieces_of(reader.read(batch, rows), rows, max_length, is_split)

    ways = ("causal", str(is_split), str(tokenizer.chat_template))
    made = store.tokens_of(split, store.key(split, tokenizer, max_length, *ways), make)
    documents = Documents(made[TOKEN_IDS], made[store.STARTS], made[_LABELS], made[LEARNED])
    if len(documents) == 0:
        raise DataError(
            f"The {name} data has {len(split)} documents, and no token of them is to be learned.",
            "Give texts of two tokens or more, completions, or assistant's turns; raise "
            "max_length where prompts fill it.",
        )
    kept = len(np.unique(made[_ROW]))
    learned, total = int(documents.labels.sum()), len(documents.token_ids)
    line = f"{name}: {kept} documents in {len(documents)} pieces, {total} tokens, {learned}"
    line += " of them learned"
    if left_out := len(split) - kept:
        line += f"; {left_out} documents have no tokens to learn and are left out"
    say_row("tokens", line)
    if guessed := int(made[_GUESSED].sum()):
        say(
            f"{name}: in {guessed} of {len(documents)} pieces, the chat template does not mark the "
            "assistant's turns; all their tokens are learned"
        )
    return documents


def splits(split: datasets.Dataset, long_texts: str | None) -> bool:
    """Return whether long documents are split, not truncated; by default, texts are split."""
    are_texts = bool({TEXT, TOKEN_IDS} & set(split.column_names))
    return long_texts == SPLIT or (long_texts is None and are_texts)


def lengths(split: datasets.Dataset, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of each document, uncut."""
    if MESSAGES in split.column_names:
        chat.see_to_template(tokenizer)
    read = Reader(tokenizer).read(split[:], range(len(split)))
    return [int(length) for length in read.lengths]


def _pieces_of(
    read: Marked, rows: range, max_length: int, is_split: bool
) -> dict[str, store.Column]:
    """Return the pieces of some documents in which something is learned."""
    cut = [list(pieces(int(length), max_length, is_split)) for length in read.lengths]
    counts = store.lengths_of(cut)
    owners = np.repeat(np.arange(len(cut)), counts)
    begins = np.fromiter((one.start or 0 for some in cut for one in some), np.int64, len(owners))
    lengths = np.fromiter((one.stop for some in cut for one in some), np.int64, len(owners))
    lengths = np.minimum(lengths, read.lengths[owners]) - begins
    begins += (np.cumsum(read.lengths) - read.lengths)[owners]
    # The first token of a piece has no token before it from which it could be predicted.
    learned_before = np.concatenate([[0], np.cumsum(read.learned)])
    inner = begins + np.minimum(1, lengths)
    labels = learned_before[begins + lengths] - learned_before[inner]
    kept = np.flatnonzero(labels)
    begins, lengths, owners, labels = begins[kept], lengths[kept], owners[kept], labels[kept]
    starts = np.cumsum(lengths) - lengths
    places = np.repeat(begins - starts, lengths) + np.arange(int(lengths.sum()))
    learned = read.learned[places]
    learned[starts] = False
    return {
        TOKEN_IDS: read.ids[places],
        LEARNED: learned,
        store.LENGTHS: lengths,
        _LABELS: labels.astype(np.int64),
        _ROW: owners + rows.start,
        _GUESSED: read.is_guessed[owners],
    }


def pieces(length: int, longest: int, is_split: bool) -> Iterator[slice]:
    """Yield the pieces of a document of `length` tokens, as slices."""
    if not is_split:
        yield slice(longest)
        return
    for start in range(0, max(1, length - 1), longest - 1):
        yield slice(start, start + longest)


class Reader:
    """Rows of documents to tokens: texts, prompts with completions, or conversations."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._whole = Encoder(tokenizer)
        self.following = Encoder(tokenizer, with_specials=False)

    def read(self, batch: Batch, rows: range) -> Marked:
        """Return all of the documents of some rows.

        Raises:
            DataError: The token ids are not this tokenizer's, or the chat template rejects a
                conversation.
        """
        is_guessed = np.zeros(len(rows), bool)
        if TOKEN_IDS in batch:
            tokens.check_ids(batch[TOKEN_IDS], self._tokenizer, rows.start)
            ids = store.flat(batch[TOKEN_IDS], np.int32)
            lengths = store.lengths_of(batch[TOKEN_IDS])
            return Marked(ids, np.ones(len(ids), bool), lengths, is_guessed)
        if TEXT in batch:
            ids, _, lengths = self._whole.encode(batch[TEXT])
            if (end := self._tokenizer.eos_token_id) is not None:
                ends = np.cumsum(lengths)
                is_open = lengths == 0
                is_open[~is_open] = ids[ends[~is_open] - 1] != end
                ids = np.insert(ids, ends[is_open], end)
                lengths = lengths + is_open
            return Marked(ids, np.ones(len(ids), bool), lengths, is_guessed)
        documents: list[tuple[list[int], list[bool]]] = []
        if PROMPT in batch:
            for prompt, completion in self.completed(batch[PROMPT], batch[COMPLETION]):
                learned = [False] * len(prompt) + [True] * len(completion)
                documents.append((prompt + completion, learned))
        else:
            written = []
            for row, messages in zip(rows, batch[MESSAGES], strict=True):
                talk = json.loads(messages)
                talk = talk if isinstance(talk, dict) else {"messages": talk}
                with chat.row_named(row):
                    written.append(chat.write(self._tokenizer, **talk))
            for at, talk in enumerate(chat.in_tokens(self.following, written)):
                documents.append((talk.ids, talk.learned))
                is_guessed[at] = talk.is_guessed
        all_ids, all_learned = zip(*documents, strict=True)
        return Marked(
            store.flat(all_ids, np.int32),
            store.flat(all_learned, bool),
            store.lengths_of(all_ids),
            is_guessed,
        )

    def completed(
        self, prompts: Sequence[str], completions: Sequence[str]
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the token ids of each prompt, tokenized alone, and those of its completion with the
        end token."""
        end = self._tokenizer.eos_token_id
        read, following = self._whole.rows(prompts)[0], self.following.rows(completions)[0]
        for prompt, completion in zip(read, following, strict=True):
            if len(prompt) > 1 and prompt[-1] == end:
                prompt.pop()  # nothing follows an end
            if end is not None and completion[-1:] != [end]:
                completion.append(end)
            yield prompt, completion
