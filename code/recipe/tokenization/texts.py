"""Tokenize data sets of texts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from recipe.batching.samples import Samples, column
from recipe.data.column_names import LABEL, PAIR, TEXT, TOKEN_IDS, TYPE_IDS
from recipe.errors import DataError
from recipe.storage import claims
from recipe.tokenization import store
from recipe.tokenization.encoding import (
    UNCUT,
    Encoder,
    encode,
    encode_alone,
    encode_pairs,
)

_WORTH_PROCESSES = 10_000


def samples(
    split: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> Samples:
    """Return the samples of a data set of `text` and `label`, or of pairs.

    Tokens are written to the cache of data sets, some rows at a time: all processes of a host map
    one file, which a restarted job finds. Tokenizers in Python use `tokenise` instead. Data that
    came tokenised is only truncated.

    Raises:
        DataError: the data came tokenised by another tokenizer.
        OutputError: there is no room for the tokens.
    """
    if not len(split) or (TEXT in split.column_names and not tokenizer.is_fast):
        return Samples.from_dataset(tokenise(split, tokenizer, max_length))
    names = [name for name in (TEXT, PAIR) if name in split.column_names]
    encoder = Encoder(tokenizer, max_length)

    def make(batch: Mapping[str, list[Any]], rows: range) -> dict[str, store.Column]:
        if names:
            ids, types, lengths = encoder.encode(*(batch[name] for name in names))
            columns = {TOKEN_IDS: ids, store.LENGTHS: lengths}
            return columns if types is None else {**columns, TYPE_IDS: types}
        check_ids(batch[TOKEN_IDS], tokenizer, rows.start)
        lengths = store.lengths_of(batch[TOKEN_IDS])
        columns = {store.LENGTHS: np.minimum(lengths, max_length)}
        for name, kind in ((TOKEN_IDS, np.int32), (TYPE_IDS, np.int8)):
            if name in batch:
                if not np.array_equal(store.lengths_of(batch[name]), lengths):
                    raise DataError(f"In some rows {name} and {TOKEN_IDS} have different lengths.")
                # The last token is the closing special token, which the model was trained to see.
                kept = [
                    row if len(row) <= max_length else [*row[: max_length - 1], row[-1]]
                    for row in batch[name]
                ]
                columns[name] = store.flat(kept, kind)
        return columns

    tokens = store.tokens_of(split, store.key(split, tokenizer, max_length, "store"), make)
    types = tokens.get(TYPE_IDS)
    return Samples(tokens[TOKEN_IDS], tokens[store.STARTS], column(split, LABEL), types=types)


def lengths(split: datasets.Dataset, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of each text or pair, special tokens included, uncut."""
    if TEXT not in split.column_names:
        return [len(ids) for ids in split[TOKEN_IDS]]
    texts = list(split[TEXT])
    if PAIR in split.column_names:
        ids, _ = encode_pairs(tokenizer, texts, list(split[PAIR]), UNCUT)
    else:
        ids = encode(tokenizer, texts, UNCUT)
    return [len(tokens) for tokens in ids]


def tokenise(
    split: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> datasets.Dataset:
    """Return a data set of `input_ids` (not padded) and `label` from one of `text` and `label`.

    It has `token_type_ids` if the tokenizer has them: for pairs (`text` and `text_pair`), and for
    single texts if they are not all 0.

    The first process of a host writes it to the cache of data sets (HF_DATASETS_CACHE), from which
    the others and a restarted job read. A tokenizer in Rust uses all cores; one in Python gets a
    process for each core.

    Raises:
        OutputError: there is no room for the tokens.
    """
    if not len(split):  # the rows of this host of several
        return split
    in_python = not tokenizer.is_fast and len(split) > _WORTH_PROCESSES
    texts = [name for name in (TEXT, PAIR) if name in split.column_names]

    def make(batch: Mapping[str, Any]) -> dict[str, Any]:
        if len(texts) == 1:
            ids, types = encode_alone(tokenizer, batch[TEXT], max_length)
        else:
            ids, types = encode_pairs(tokenizer, batch[TEXT], batch[PAIR], max_length)
        return {TOKEN_IDS: ids} if types is None else {TOKEN_IDS: ids, TYPE_IDS: types}

    return cached(
        split,
        store.key(split, tokenizer, max_length),
        make,
        num_proc=len(os.sched_getaffinity(0)) if in_python else None,
        remove_columns=texts,
    )


def cached(
    split: datasets.Dataset, key: str, make: Callable[..., Mapping[str, Any]], **options: Any
) -> datasets.Dataset:
    """Return the result of `make` for the batches of `split`, from the cache if possible.

    Args:
        key: The cache key of the result.
        options: Further arguments of Dataset.map.
    """
    folder = store.tokens_folder()
    claims.sweep(folder)
    with store.room(folder, len(split)):
        return split.map(
            make,
            batched=True,
            new_fingerprint=key,
            cache_file_name=str(folder / f"{key}.arrow"),
            load_from_cache_file=True,
            **options,
        )


def check_ids(
    rows: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase, first: int = 0
) -> None:
    """Check that tokenised data can be from `tokenizer`.

    Args:
        rows: The token ids of some rows.
        first: The number of the first row.

    Raises:
        DataError: a row has no tokens, or an unknown one.
    """
    empty = next((number for number, row in enumerate(rows, first) if not len(row)), None)
    if empty is not None:
        raise DataError(f"Row {empty} of the data that came tokenised has no tokens.", "Remove it.")
    for strange in (max(map(max, rows), default=0), min(map(min, rows), default=0)):
        if not 0 <= strange < len(tokenizer):
            raise DataError(
                f"The data came tokenised and has the token id {strange}, but the model's "
                f"tokenizer has {len(tokenizer)} tokens.",
                "Tokenise it with the model's own tokenizer, or give the texts.",
            )
