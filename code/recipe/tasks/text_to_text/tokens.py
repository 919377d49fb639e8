"""Tokenise pairs of texts, for the encoder and the decoder."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from recipe.console import say
from recipe.data.column_names import TOKEN_IDS
from recipe.tasks.text_to_text.batches import Pairs
from recipe.tasks.text_to_text.data import SOURCE, TARGET
from recipe.tokenization import store
from recipe.tokenization.encoding import beginning


def tokenise(
    name: str,
    split: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    prefix: str,
    longest_source: int,
    longest_target: int,
) -> Pairs:
    """Return the samples of a split of `TextPairs`, cached; log how many are cut.

    Args:
        prefix: The text before each source.
        longest_source: Tokens at which sources are cut.
        longest_target: Tokens at which targets are cut.
    """
    ways = ("pairs", prefix, str(longest_target), *marks(tokenizer))
    made = store.tokens_of(
        split,
        store.key(split, tokenizer, longest_source, *ways),
        functools.partial(_pairs_of, tokenizer, prefix, longest_source, longest_target),
    )
    pairs = Pairs(made[TOKEN_IDS], made[store.STARTS], made[_TARGETS], made[_SOURCES], split)
    line = f"{name}: {len(pairs)} pairs, {int(pairs.sources.sum())} tokens of sources and "
    line += f"{int(pairs.labels.sum())} of targets"
    for what, column in (("sources", _CUT_SOURCE), ("targets", _CUT_TARGET)):
        if cut := int(made[column].sum()):
            line += f"; {cut} {what} are cut ({cut / len(pairs):.1%})"
    say(line)
    return pairs


def marks(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the languages that a tokenizer is set to."""
    return [str(getattr(tokenizer, name, None)) for name in ("src_lang", "tgt_lang")]


_SOURCES, _TARGETS = "sources", "targets"
_CUT_SOURCE, _CUT_TARGET = "source_is_cut", "target_is_cut"


def _pairs_of(
    tokenizer: PreTrainedTokenizerBase,
    prefix: str,
    longest_source: int,
    longest_target: int,
    batch: Mapping[str, list[Any]],
    rows: range,
) -> dict[str, store.Column]:
    sources = [prefix + text for text in batch[SOURCE]]
    read, cut = encoded(tokenizer, sources, longest_source)
    written, ends = encoded(tokenizer, batch[TARGET], longest_target, is_target=True)
    of_sources, of_targets = store.lengths_of(read), store.lengths_of(written)
    return {
        TOKEN_IDS: store.flat([a + b for a, b in zip(read, written, strict=True)], np.int32),
        store.LENGTHS: of_sources + of_targets,
        _SOURCES: of_sources,
        _TARGETS: of_targets,
        _CUT_SOURCE: np.array(cut, bool),
        _CUT_TARGET: np.array(ends, bool),
    }


def encoded(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    longest: int,
    is_target: bool = False,
) -> tuple[list[list[int]], list[bool]]:
    """Return the token ids of texts with special tokens, and whether each was cut."""
    heads = [beginning(tokenizer, text, longest + 1) for text in texts]
    options: dict[str, Any] = {"return_attention_mask": False, "verbose": False}
    texts_given: dict[str, Any] = {"text_target": heads} if is_target else {"text": heads}
    whole = tokenizer(**texts_given, truncation=True, max_length=longest + 1, **options)[
        "input_ids"
    ]
    cut = [len(ids) > longest for ids in whole]
    if any(cut):
        # With its end token, as in training.
        ids = tokenizer(**texts_given, truncation=True, max_length=longest, **options)["input_ids"]
    else:
        ids = whole
    return ids, cut
