"""Documents to learn to token ids, in pieces that fit, and which of their tokens are learned."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import datasets
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from recipe.batching.document_batches import Documents
from recipe.console import say
from recipe.data.column_names import COMPLETION, LEARNED, MESSAGES, PROMPT, TEXT, TOKEN_IDS
from recipe.errors import DataError
from recipe.hyperparameters import SPLIT
from recipe.tokenization import chat
from recipe.tokenization import texts as tokens

_ROW, _GUESSED = "row", "guessed"
Batch = Mapping[str, Sequence[Any]]
Marked = tuple[list[int], list[bool], bool]
"""Token ids of a document, whether each is learned, and whether that is a guess."""


def tokenise(
    name: str,
    split: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    long_texts: str | None,
) -> Documents:
    """The documents of a split of `causal_data.Texts`, cached; a line says what became of them.

    Each ends with the end token. A text longer than `max_length` is truncated, or split into
    pieces, each of which starts with the last token of the one before, so that every token but
    the first is learned once.

    Args:
        name: Of the split, for messages.
        long_texts: The hyperparameter.

    Raises:
        DataError: nothing is left to learn, or a conversation is none for the chat template.
    """
    is_split = splits(split, long_texts)
    if MESSAGES in split.column_names:
        chat.see_to_template(tokenizer)
    if TOKEN_IDS in split.column_names:
        tokens.check_ids(split[TOKEN_IDS][:], tokenizer)
    if not len(split):  # the rows of this host of several
        return Documents.of(split)
    encoded = tokens.cached(
        split,
        tokens.key(
            split, tokenizer, max_length, "causal", str(is_split), str(tokenizer.chat_template)
        ),
        functools.partial(_rows, tokenizer, max_length, is_split),
        with_indices=True,
        remove_columns=split.column_names,
    )
    if len(encoded) == 0:
        raise DataError(
            f"The {name} data has {len(split)} documents, and no token of them is to be learned.",
            "Give texts of two tokens or more, completions, or assistant's turns; raise "
            "max_length where prompts fill it.",
        )
    documents = Documents.of(encoded)
    kept = len(set(encoded[_ROW][:]))
    learned, total = int(documents.labels.sum()), len(documents.token_ids)
    line = f"{name}: {kept} documents in {len(documents)} pieces, {total} tokens, {learned}"
    line += " of them learned"
    if left_out := len(split) - kept:
        line += f"; {left_out} documents are left out, as nothing in them is to be learned"
    say(line)
    if guessed := sum(encoded[_GUESSED][:]):
        say(
            f"{name}: the chat template does not tell the assistant's turns apart in {guessed} "
            "pieces: all their tokens are learned"
        )
    return documents


def splits(split: datasets.Dataset, long_texts: str | None) -> bool:
    """Whether long documents are split, not truncated: texts are, where long_texts says nothing."""
    are_texts = bool({TEXT, TOKEN_IDS} & set(split.column_names))
    return long_texts == SPLIT or (long_texts is None and are_texts)


def lengths(split: datasets.Dataset, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens of each document, uncut."""
    if MESSAGES in split.column_names:
        chat.see_to_template(tokenizer)
    documents = _encoded(tokenizer, split[:], range(len(split)))
    return [len(ids) for ids, _, _ in documents]


def _rows(
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    is_split: bool,
    batch: Batch,
    rows: Sequence[int],
) -> dict[str, list[Any]]:
    """The pieces of some documents in which something is learned."""
    rows_made: list[tuple[Any, ...]] = []
    for row, (ids, learned, guessed) in zip(rows, _encoded(tokenizer, batch, rows), strict=True):
        for piece in pieces(len(ids), max_length, is_split):
            if any(learned[piece][1:]):
                rows_made.append((ids[piece], learned[piece], row, guessed))
    columns = zip(*rows_made, strict=True) if rows_made else ([], [], [], [])
    return dict(zip((TOKEN_IDS, LEARNED, _ROW, _GUESSED), map(list, columns), strict=True))


def pieces(length: int, longest: int, is_split: bool) -> Iterator[slice]:
    """Where the pieces of a document of `length` tokens are in it."""
    if not is_split:
        yield slice(longest)
        return
    for start in range(0, max(1, length - 1), longest - 1):
        yield slice(start, start + longest)


def _encoded(
    tokenizer: PreTrainedTokenizerBase, batch: Batch, rows: Sequence[int]
) -> Iterator[Marked]:
    if TOKEN_IDS in batch:
        for ids in batch[TOKEN_IDS]:
            yield ids, [True] * len(ids), False
    elif TEXT in batch:
        for ids in _ids(tokenizer, batch[TEXT]):
            ended = _ended(ids, tokenizer)
            yield ended, [True] * len(ended), False
    elif PROMPT in batch:
        for prompt, completion in completed(tokenizer, batch[PROMPT], batch[COMPLETION]):
            learned = [False] * len(prompt) + [True] * len(completion)
            yield prompt + completion, learned, False
    else:
        for row, messages in zip(rows, batch[MESSAGES], strict=True):
            try:
                talk = chat.encode(tokenizer, json.loads(messages))
            except TemplateError as error:
                raise DataError(
                    f"The tokenizer's chat template refuses the conversation of row {row} (from "
                    f"0): {error}",
                    "Correct the row or remove it.",
                ) from error
            yield talk.ids, talk.learned, talk.is_guessed


def completed(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], completions: Sequence[str]
) -> Iterator[tuple[list[int], list[int]]]:
    """Token ids of each prompt, as it is read alone, and of what follows it, with the end token."""
    following = _ids(tokenizer, completions, add_special_tokens=False)
    for prompt, completion in zip(_ids(tokenizer, prompts), following, strict=True):
        if len(prompt) > 1 and prompt[-1] == tokenizer.eos_token_id:
            prompt.pop()  # nothing follows an end
        yield prompt, _ended(completion, tokenizer)


def _ids(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], **options: bool
) -> list[list[int]]:
    encoded = tokenizer(list(texts), return_attention_mask=False, verbose=False, **options)
    ids: list[list[int]] = encoded["input_ids"]
    return ids


def _ended(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    end = tokenizer.eos_token_id
    return ids if end is None or ids[-1:] == [end] else [*ids, end]
