"""Tokenize data sets of texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import datasets
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from transformers import PreTrainedTokenizerBase

from recipe.batching.samples import Samples
from recipe.batching.text_pairs import Pairs
from recipe.console import say
from recipe.data.column_names import LABEL, PAIR, SOURCE, TARGET, TEXT, TOKEN_IDS, TYPE_IDS
from recipe.data.files.spool import spool_tables
from recipe.data.held_out import data_set
from recipe.data.values import read_column
from recipe.errors import RowError
from recipe.tokenization import store
from recipe.tokenization.encoding import UNCUT, Encoder, beginning

_PLURALS = {SOURCE: "sources", TARGET: "targets"}


def labelled_pairs(columns: Iterable[tuple[Any, Any, Any]], kind: pa.DataType) -> datasets.Dataset:
    """Return a data set of pairs, for `samples`, from columns of some rows at a time.

    Args:
        columns: First texts, second texts and labels.
        kind: The type of labels.
    """
    schema = pa.schema([(TEXT, pa.large_string()), (PAIR, pa.large_string()), (LABEL, kind)])
    tables = (pa.table(list(some), schema=schema) for some in columns)
    return data_set([spool_tables(schema, tables)])


def samples(
    split: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> Samples:
    """Return the samples of a data set of `text` and `label`, or of pairs.

    Tokens are written to the cache of data sets, some rows at a time: all processes of a host map
    one file, which a restarted job finds. Data that came tokenized is only truncated.

    Raises:
        DataError: the data came tokenized by another tokenizer.
        OutputError: there is no room for the tokens.
    """
    if not len(split):  # the rows of this host of several
        return Samples(np.empty(0, np.int32), np.zeros(1, np.int64), read_column(split, LABEL))
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
                    pairs = zip(batch[name], batch[TOKEN_IDS], strict=True)
                    row = next(n for n, (a, b) in enumerate(pairs, rows.start) if len(a) != len(b))
                    message = f"{{row}} has {name} and {TOKEN_IDS} of different lengths."
                    raise RowError(row, message, "Tokenize it again.")
                # The last token is the closing special token, which the model was trained to see.
                kept = [
                    row if len(row) <= max_length else [*row[: max_length - 1], row[-1]]
                    for row in batch[name]
                ]
                columns[name] = store.flat(kept, kind)
        return columns

    tokens = store.tokens_of(split, store.key(split, tokenizer, max_length, "store"), make)
    types = tokens.get(TYPE_IDS)
    return Samples(tokens[TOKEN_IDS], tokens[store.STARTS], read_column(split, LABEL), types=types)


def source_target_samples(
    name: str,
    split: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    prefix: str,
    longest: Mapping[str, int],
) -> Pairs:
    """Return the samples of a data set of `source` and `target`, cached; log how many are cut.

    Args:
        prefix: The text before each source.
        longest: The tokens at which sources and targets are cut, by these columns.
    """

    def make(batch: Mapping[str, list[Any]], rows: range) -> dict[str, store.Column]:
        ids, columns = {}, {}
        for side, plural in _PLURALS.items():
            texts = [prefix + text for text in batch[side]] if side == SOURCE else batch[side]
            ids[side], is_cut = _cut_texts(tokenizer, texts, longest[side], side == TARGET)
            columns[plural] = store.lengths_of(ids[side])
            columns[f"{side}_is_cut"] = np.array(is_cut, bool)
        both = [source + target for source, target in zip(*ids.values(), strict=True)]
        lengths = columns["sources"] + columns["targets"]
        return {TOKEN_IDS: store.flat(both, np.int32), store.LENGTHS: lengths, **columns}

    # The languages that the tokenizer is set to mark the texts.
    marks = [str(getattr(tokenizer, name, None)) for name in ("src_lang", "tgt_lang")]
    ways = ("pairs", prefix, str(longest[TARGET]), *marks)
    made = store.tokens_of(split, store.key(split, tokenizer, longest[SOURCE], *ways), make)
    pairs = Pairs(made[TOKEN_IDS], made[store.STARTS], made["targets"], made["sources"], split)
    line = f"{name}: {len(pairs)} pairs, {int(pairs.sources.sum())} tokens of sources and "
    line += f"{int(pairs.labels.sum())} of targets"
    for side, plural in _PLURALS.items():
        if cut := int(made[f"{side}_is_cut"].sum()):
            line += f"; {cut} {plural} are cut ({cut / len(pairs):.1%})"
    say(line)
    return pairs


def _cut_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], longest: int, is_target: bool
) -> tuple[list[list[int]], list[bool]]:
    """Return the token ids of texts with special tokens, and whether each was cut."""
    heads = [beginning(tokenizer, text, longest + 1) for text in texts]
    given: dict[str, Any] = {"text_target" if is_target else "text": heads, "truncation": True}
    given |= {"return_attention_mask": False, "verbose": False}
    ids = tokenizer(**given, max_length=longest + 1)["input_ids"]
    is_cut = [len(row) > longest for row in ids]
    if any(is_cut):  # again, for the end tokens
        ids = tokenizer(**given, max_length=longest)["input_ids"]
    return ids, is_cut


def lengths(split: datasets.Dataset, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of each text or pair, special tokens included, uncut."""
    if TEXT not in split.column_names:
        return [len(ids) for ids in split[TOKEN_IDS]]
    names = [name for name in (TEXT, PAIR) if name in split.column_names]
    ids, _ = Encoder(tokenizer, UNCUT).rows(*(split[name][:] for name in names))
    return [len(tokens) for tokens in ids]


def check_ids(
    rows: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase, first: int = 0
) -> None:
    """Check that tokenized data can be from `tokenizer`.

    Args:
        first: The number of the first row.

    Raises:
        RowError: a row has no tokens, or an unknown one.
    """
    for number, row in enumerate(rows, first):
        if not len(row):
            raise RowError(number, "{row} came tokenized and has no tokens.", "Remove it.")
        strange = next((some for some in (max(row), min(row)) if not 0 <= some < len(tokenizer)), 0)
        if strange:
            raise RowError(
                number,
                f"{{row}} came tokenized and has the token id {strange}, but the model's "
                f"tokenizer has {len(tokenizer)} tokens.",
                "Tokenize it with the model's own tokenizer, or give the texts.",
            )
