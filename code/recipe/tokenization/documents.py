"""Tokenize documents in pieces that fit, and mark the tokens that are learned."""

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
from recipe.settings import SPLIT
from recipe.tokenization import chat, chat_template, store
from recipe.tokenization import texts as tokens
from recipe.tokenization.encoding import Encoder

_ROW, _OPENED, _LABELS = "row", "opened", "labels"
_LEARNED_TURNS, _TURNS = "learned turns", "turns"
Batch = Mapping[str, list[Any]]


@dataclass(frozen=True)
class Marked:
    """Tokenized documents, concatenated."""

    ids: store.Column
    """[tokens]"""
    learned: store.Column
    """[tokens]: whether each is learned."""
    lengths: store.Column
    """[documents]"""
    opened: store.Column
    """[rows]: the learned turns without the end of the prompt that serving writes."""
    rows: store.Column
    """[documents]: the row of each, from 0; a conversation may become several documents."""
    turns: store.Column
    """[rows]: the assistant's turns to learn; 0 for other data."""


def tokenize_split(
    name: str,
    split: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    long_texts: str | None,
    is_all_learned: bool = False,
) -> Documents:
    """Return the cached documents of a split of `language_modeling.Texts`, and log a summary.

    Each ends with the end token. A text longer than `max_length` is truncated, or split into
    pieces, each of which starts with the last token of the one before, so that every token but
    the first is learned once.

    Args:
        is_all_learned: Whether prompts, and all turns of conversations, are learned, too.

    Raises:
        DataError: Nothing is left to learn, or the chat template rejects a conversation.
    """
    is_split = splits(split, long_texts)
    if MESSAGES in split.column_names:
        chat_template.see_to_template(tokenizer)
    if not len(split):  # the rows of this host of several
        none = np.empty(0, np.int64)
        return Documents(none.astype(np.int32), np.zeros(1, np.int64), none, none.astype(bool))
    reader = Reader(tokenizer, is_all_learned)

    def make(batch: Batch, rows: range) -> dict[str, store.Column]:
        return _pieces_of(reader.read(batch, rows), rows, max_length, is_split)

    ways = ("causal 3", str(is_split), str(is_all_learned), str(tokenizer.chat_template))
    made = store.tokens_of(split, store.key(split, tokenizer, max_length, *ways), make)
    documents = Documents(made[TOKEN_IDS], made[store.STARTS], made[_LABELS], made[LEARNED])
    if len(documents) == 0:
        raise DataError(
            f"The {name} data has {len(split)} documents, but none of their tokens is learned.",
            "Give texts of two tokens or more, completions, or assistant's turns; raise "
            "max_length if prompts fill it.",
        )
    kept = len(np.unique(made[_ROW]))
    learned, total = int(documents.labels.sum()), len(documents.token_ids)
    line = f"{name}: {kept} documents in {len(documents)} pieces, {total} tokens, {learned}"
    line += " of them learned"
    if left_out := len(split) - kept:
        line += f"; {left_out} documents have no tokens to learn and are left out"
    if turns := int(made[_TURNS].sum()):
        line += f"; {int(made[_LEARNED_TURNS].sum())} of {turns} assistant turns are learned"
    say_row("tokens", line)
    if opened := int(made[_OPENED].sum()):
        say(
            f"{name}: the generation prompt of the chat template, with which endpoints begin an "
            f"answer, ends with what {opened} learned turns do not have, such as the start of a "
            "thought; they are learned without it (chat_template_kwargs may turn it off)"
        )
    return documents


def stop_tokens(
    documents: Documents, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> set[int]:
    """Return the tokens that end the learned parts of documents, at which generation stops."""
    learned = np.asarray(documents.learned)
    is_end = learned & ~np.append(learned[1:], False)
    # A document of the maximum length may be cut anywhere.
    is_end[documents.starts[1:] - 1] = np.diff(documents.starts) < max_length
    ends = np.flatnonzero(is_end & learned)
    tails = np.stack([documents.token_ids[np.maximum(ends - back, 0)] for back in (2, 1, 0)], 1)
    tokens_at_ends = map(chat.EndTokens(tokenizer).end_token, np.unique(tails, axis=0).tolist())
    return {token for token in tokens_at_ends if token is not None}


def splits(split: datasets.Dataset, long_texts: str | None) -> bool:
    """Return whether long documents are split, not truncated; by default, texts are split."""
    are_texts = bool({TEXT, TOKEN_IDS} & set(split.column_names))
    return long_texts == SPLIT or (long_texts is None and are_texts)


def lengths(split: datasets.Dataset, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of each document, uncut."""
    if MESSAGES in split.column_names:
        chat_template.see_to_template(tokenizer)
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
    is_first = read.learned & ~np.concatenate([[False], read.learned[:-1]])
    begins, lengths, owners, labels = begins[kept], lengths[kept], owners[kept], labels[kept]
    starts = np.cumsum(lengths) - lengths
    positions = np.repeat(begins - starts, lengths) + np.arange(int(lengths.sum()))
    learned = read.learned[positions]
    learned[starts] = False
    # A turn counts in the piece with its first token, after at least one token of the prompt.
    turns = np.add.reduceat(is_first[positions] & learned, starts) if len(starts) else labels
    return {
        TOKEN_IDS: read.ids[positions],
        LEARNED: learned,
        store.LENGTHS: lengths,
        _LABELS: labels.astype(np.int64),
        _ROW: read.rows[owners] + rows.start,
        _OPENED: read.opened,
        _LEARNED_TURNS: turns.astype(np.int64),
        _TURNS: read.turns,
    }


def pieces(length: int, longest: int, is_split: bool) -> Iterator[slice]:
    """Yield the pieces of a document of `length` tokens, as slices."""
    if not is_split:
        yield slice(longest)
        return
    for start in range(0, max(1, length - 1), longest - 1):
        yield slice(start, start + longest)


class Reader:
    """Tokenizes rows of documents: texts, prompts with completions, or conversations."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, is_all_learned: bool = False) -> None:
        self._tokenizer, self._is_all_learned = tokenizer, is_all_learned
        self._whole = Encoder(tokenizer)
        self.following = Encoder(tokenizer, with_specials=False)

    def read(self, batch: Batch, rows: range) -> Marked:
        """Return all of the documents of some rows.

        Raises:
            DataError: The token ids are not this tokenizer's, or the chat template rejects a
                conversation.
        """
        of_rows, turns = np.arange(len(rows)), np.zeros(len(rows), np.int64)
        opened = np.zeros(len(rows), np.int64)
        if TOKEN_IDS in batch:
            tokens.check_ids(batch[TOKEN_IDS], self._tokenizer, rows.start)
            ids = store.flat(batch[TOKEN_IDS], np.int32)
            lengths = store.lengths_of(batch[TOKEN_IDS])
            learned = np.ones(len(ids), bool)
        elif TEXT in batch:
            ids, _, lengths = self._whole.encode(batch[TEXT])
            if (end := self._tokenizer.eos_token_id) is not None:
                ends = np.cumsum(lengths)
                is_open = lengths == 0
                is_open[~is_open] = ids[ends[~is_open] - 1] != end
                ids = np.insert(ids, ends[is_open], end)
                lengths = lengths + is_open
            learned = np.ones(len(ids), bool)
        else:
            if PROMPT in batch:
                talks = [
                    chat.TokenizedConversation(
                        prompt + completion,
                        [self._is_all_learned] * len(prompt) + [True] * len(completion),
                    )
                    for prompt, completion in self.completed(batch[PROMPT], batch[COMPLETION])
                ]
            else:
                written: list[chat.Written] = []
                owners = []
                for number, text in enumerate(batch[MESSAGES]):
                    talk = json.loads(text)
                    talk = talk if isinstance(talk, dict) else {"messages": talk}
                    with chat.row_named(rows[number]):
                        documents = chat.write(
                            self._tokenizer, **talk, is_all_learned=self._is_all_learned
                        )
                    written += documents
                    owners += [number] * len(documents)
                    if not self._is_all_learned:
                        turns[number] = chat.turns_to_learn(talk["messages"])
                    opened[number] = sum(one.opened_thoughts for one in documents)
                talks = chat.encode_conversations(self.following, written)
                of_rows = np.array(owners)
            ids = store.flat([talk.ids for talk in talks], np.int32)
            lengths = store.lengths_of([talk.ids for talk in talks])
            learned = store.flat([talk.learned for talk in talks], bool)
        return Marked(ids, learned, lengths, opened, of_rows, turns)

    def completed(
        self, prompts: Sequence[str], completions: Sequence[str]
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the token ids of each prompt, tokenized alone, and those of its completion with the
        end token."""
        end = self._tokenizer.eos_token_id
        read, following = self._whole.rows(prompts)[0], self.following.rows(completions)[0]
        for prompt, completion in zip(read, following, strict=True):
            if len(prompt) > 1 and prompt[-1] == end:
                prompt.pop()  # nothing follows an end token
            if end is not None and completion[-1:] != [end]:
                completion.append(end)
            yield prompt, completion
