"""Tokenise prompts with a chosen and a rejected answer, and make batches of these pairs."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from recipe.batching import batches
from recipe.batching.batches import Samples
from recipe.batching.document_batches import DocumentLayout, Documents
from recipe.batching.groups import Groups
from recipe.batching.packing import Rows
from recipe.console import say
from recipe.data.column_names import LEARNED, PROMPT, TOKEN_IDS
from recipe.data.conversations import common_prefix
from recipe.errors import DataError
from recipe.tasks.preference.data import CHOSEN, REJECTED
from recipe.tokenization import chat, documents, store

_ROW, _CUT, _GUESSED, _LABELS = "row", "cut", "guessed", "labels"
_NAMED, _SHOWN_CHARS = 5, 40
Batch = Mapping[str, list[Any]]
Document = tuple[list[int], list[bool]]
"""Token ids of a prompt and an answer, and a flag for each token of the answer."""


@dataclass(frozen=True)
class AnswerPairs(Groups):
    """Groups of two documents: a prompt with its chosen answer, and with its rejected one.

    Labels are float32 [pairs, 4]: the log-probabilities of the chosen and of the rejected answer
    before training, which are NaN until `refer` sets them; and the tokens of each answer.
    """

    texts: Documents
    rows: Rows = field(kw_only=True)
    """The row of each pair in the data."""

    def fingerprint(self) -> str:
        """Return a hash of the tokens, without the log-probabilities that a model gives them."""
        return self.texts.fingerprint()

    def chosen(self) -> Documents:
        """Return the chosen document of each pair."""
        documents, rows = self.texts, self.members[:, 0]
        source, _, _ = documents.token_positions(rows)
        starts = np.concatenate([[0], np.cumsum(documents.lengths[rows])])
        ids, learned = documents.token_ids[source], documents.learned[source]
        return Documents(ids, starts, documents.labels[rows], learned)

    def refer(self, log_probabilities: npt.NDArray[np.float32]) -> None:
        """Set the log-probabilities [pairs, 2] of the model before training."""
        self.labels[:, :2] = log_probabilities


@dataclass(frozen=True)
class AnswerLayout(DocumentLayout):
    """A layout of both documents of each pair; `answers` is [pairs, 2, 2]."""

    def tensors(self, samples: Samples, rows: Rows) -> batches.Batch:
        assert isinstance(samples, AnswerPairs)
        batch = super().tensors(samples.texts, samples.laid(rows)[0])
        return {**batch, "answers": batch["answers"].view(-1, 2, 2)}

    def describe(self) -> str:
        return f"with two answers each {super().describe()}"

    def computed_tokens(self, samples: Samples, rows: Rows) -> int:
        assert isinstance(samples, AnswerPairs)
        return super().computed_tokens(samples.texts, samples.laid(rows)[0])


def tokenise(
    name: str,
    split: datasets.Dataset,
    are_talks: bool,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
) -> AnswerPairs:
    """Return the pairs of a split of `Preferences`, cached; log how many are left out.

    The end token follows each answer. In a conversation, formatted by the chat template, the answer
    is the assistant's turns after the prompt. Both are truncated at their end. A pair whose answer
    or difference was truncated completely is left out.

    Args:
        are_talks: Whether the rows are conversations.

    Raises:
        DataError: No pair is left, or the chat template rejects a conversation.
    """
    encoder = _Encoder(tokenizer, are_talks)
    if not are_talks and tokenizer.chat_template is not None and name == "train":
        say(
            "the tokenizer has a chat template, which is not applied to plain texts: for a chat "
            "model, give the answers as lists of messages"
        )
    ways = ("preferences 2", str(are_talks), str(tokenizer.chat_template))
    made = store.tokens_of(
        split,
        store.key(split, tokenizer, max_length, *ways),
        functools.partial(encoder.columns, max_length),
    )
    why = f"their prompts fill max_length ({max_length} tokens), or they differ only behind it"
    if not len(made[_LABELS]):
        raise DataError(
            f"No pair of the {name} data can be learned from: {why}.",
            "Raise max_length, or give shorter prompts.",
        )
    rows = made[_ROW][::2]
    left_out = np.setdiff1d(np.arange(len(split)), rows)
    both = Documents(made[TOKEN_IDS], made[store.STARTS], made[_LABELS], made[LEARNED])
    labels = np.full((len(rows), 4), np.nan, dtype=np.float32)
    labels[:, 2:] = both.labels.reshape(-1, 2)
    members = np.arange(2 * len(rows)).reshape(-1, 2)
    pairs = AnswerPairs(both.token_ids, both.starts[::2], labels, both, members, rows=rows)
    chosen, rejected = (int(count) for count in pairs.labels[:, 2:].sum(axis=0, dtype=np.int64))
    line = f"{name}: {len(pairs)} pairs, {len(pairs.token_ids)} tokens, {chosen} of them of chosen "
    line += f"answers and {rejected} of rejected ones"
    cut = made[_CUT].reshape(-1, 2).sum(axis=0)
    if cut.any():
        line += f"; {cut[0]} chosen and {cut[1]} rejected answers are cut at {max_length} tokens"
    if len(left_out):
        named = left_out[:_NAMED].tolist()
        shown = [f"row {row} ({split[row][PROMPT][:_SHOWN_CHARS]!r})" for row in named]
        more = f" and {len(left_out) - _NAMED} more" if len(left_out) > _NAMED else ""
        line += f"; {len(left_out)} pairs are left out, as {why}: {', '.join(shown)}{more}"
    say(line)
    if guessed := int(made[_GUESSED][::2].sum()):
        say(
            f"{name}: the chat template does not tell the answers apart in {guessed} pairs: an "
            "answer is what follows where both differ first"
        )
    return pairs


def lengths(
    split: datasets.Dataset, are_talks: bool, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """Return the tokens of each document, uncut: of a pair's chosen one, then of its rejected
    one."""
    pairs = _Encoder(tokenizer, are_talks).documents(split[:], range(len(split)))
    return [len(ids) for both, _ in pairs for ids, _ in both]


class _Encoder:
    """Converts rows of texts or conversations to documents."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, are_talks: bool) -> None:
        if are_talks:
            chat.see_to_template(tokenizer)
        self._tokenizer, self._are_talks = tokenizer, are_talks
        self._reader = documents.Reader(tokenizer)

    def columns(self, max_length: int, batch: Batch, rows: range) -> dict[str, store.Column]:
        """Return two documents for each pair that can be learned from."""
        all_ids: list[list[int]] = []
        all_learned: list[list[bool]] = []
        from_documents: list[tuple[int, bool, bool]] = []
        encoded = self.documents(batch, rows)
        for row, (both, guessed) in zip(rows, encoded, strict=True):
            cut = [(ids[:max_length], learned[:max_length]) for ids, learned in both]
            has_answers = all(any(learned[1:]) for _, learned in cut)
            if not has_answers or cut[0][0] == cut[1][0]:
                continue
            for (ids, learned), (whole, _) in zip(cut, both, strict=True):
                all_ids.append(ids)
                # The first token has no token before it from which it could be predicted.
                all_learned.append([False, *learned[1:]])
                from_documents.append((row, len(whole) > max_length, guessed))
        of_all = np.array(from_documents, np.int64).reshape(-1, 3)
        return {
            TOKEN_IDS: store.flat(all_ids, np.int32),
            LEARNED: store.flat(all_learned, bool),
            store.LENGTHS: store.lengths_of(all_ids),
            _LABELS: np.fromiter(map(sum, all_learned), np.int64, len(all_learned)),
            _ROW: of_all[:, 0],
            _CUT: of_all[:, 1].astype(bool),
            _GUESSED: of_all[:, 2].astype(bool),
        }

    def documents(self, batch: Batch, rows: range) -> Iterator[tuple[list[Document], bool]]:
        """Yield the chosen and the rejected document of each row, and whether their prompt is a
        guess."""
        if not self._are_talks:
            answers = [
                self._reader.completed(batch[PROMPT], batch[name]) for name in (CHOSEN, REJECTED)
            ]
            for two in zip(*answers, strict=True):
                marks = [[False] * len(prompt) + [True] * len(answer) for prompt, answer in two]
                whole = [prompt + answer for prompt, answer in two]
                yield list(zip(whole, marks, strict=True)), False
            return
        written = []
        for row, *talks in zip(rows, batch[PROMPT], batch[CHOSEN], batch[REJECTED], strict=True):
            prompt, *both = map(json.loads, talks)
            with chat.row_named(row):
                for answer in both:
                    documents_of_answer = chat.write(self._tokenizer, prompt + answer, len(prompt))
                    if len(documents_of_answer) > 1:
                        raise TemplateError(
                            "it rewrites an assistant's turn once others follow, and the answer "
                            "has several, of which one document can hold only the last"
                        )
                    written += documents_of_answer
        encoded = chat.encode_conversations(self._reader.following, written)
        for two in zip(encoded[::2], encoded[1::2], strict=True):
            pair = [(talk.ids, talk.learned) for talk in two]
            guessed = any(talk.is_guessed for talk in two)
            if guessed:
                shared = common_prefix(*(ids for ids, _ in pair))
                pair = [(ids, [index >= shared for index in range(len(ids))]) for ids, _ in pair]
            yield pair, guessed
