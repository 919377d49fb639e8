"""Tokenize questions with their contexts, in overlapping windows, with the spans of answers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from recipe.batching.window_batches import NOWHERE, Windows
from recipe.console import say
from recipe.data.annotations.questions import ANSWERS, CONTEXT, QUESTION, STARTS
from recipe.data.column_names import TOKEN_IDS, TYPE_IDS
from recipe.tokenization import store
from recipe.tokenization.windows import check_fast, pair_windows, shorten_text

_BEGINS, _ENDS, _LABELS, _CUT = "begins", "ends", "labels", "cut"


def tokenize_split(
    name: str,
    split: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    stride: int,
) -> Windows:
    """Return the windows of a split of questions, and log how many there are.

    A window holds the question and a part of the context; consecutive windows share `stride`
    tokens. The first answer is learned in the windows that hold all of it; otherwise the first
    token (CLS) is.

    Raises:
        ModelError: the tokenizer does not return the offsets of tokens.
    """
    check_fast(tokenizer)
    made = store.tokens_of(
        split,
        store.key(split, tokenizer, max_length, "questions", str(stride)),
        functools.partial(_windows_of, tokenizer, max_length, stride),
    )
    windows = Windows(
        made[TOKEN_IDS], made[store.STARTS], made[_LABELS], made[_BEGINS], made[_ENDS],
        judged=name != "train", types=made.get(TYPE_IDS),
    )  # fmt: skip
    cut = len(np.unique(windows.labels[made[_CUT], 2]))
    within = int((windows.labels[:, 0] != windows.labels[:, 3]).sum())
    line = f"{name}: {len(split)} questions in {len(windows)} windows, {within} with an answer"
    say(f"{line}; {cut} questions were cut to leave room for their context" if cut else line)
    return windows


def _windows_of(
    tokenizer: Any, max_length: int, stride: int, batch: Mapping[str, list[Any]], rows: range
) -> dict[str, store.Column]:
    """Return the windows of some questions."""
    most = max_length - stride - tokenizer.num_special_tokens_to_add(pair=True) - 1
    bare = tokenizer(batch[QUESTION], add_special_tokens=False, verbose=False)[TOKEN_IDS]
    cut = [len(ids) > most for ids in bare]
    questions = [
        shorten_text(tokenizer, question, most) if is_long else question
        for question, is_long in zip(batch[QUESTION], cut, strict=True)
    ]
    windows = list(pair_windows(tokenizer, questions, batch[CONTEXT], max_length, stride))
    all_edges, labels = [], []
    for window in windows:
        edges = np.array(window.encoding.offsets, np.int32)
        edges[~window.is_context] = NOWHERE
        all_edges.append(edges)
        learned = [window.nowhere, window.nowhere]
        if batch[ANSWERS][window.pair]:
            start = batch[STARTS][window.pair][0]
            stop = start + len(batch[ANSWERS][window.pair][0])
            inside, (begins, ends) = np.flatnonzero(window.is_context), edges.T
            # Learned only where the window has all of the answer.
            if len(inside) and begins[inside[0]] <= start and ends[inside[-1]] >= stop:
                first = inside[begins[inside] <= start][-1]
                last = inside[ends[inside] >= stop][0]
                learned = [first, max(first, last)]
        labels.append([*learned, rows[window.pair], window.nowhere])
    all_ids = [window.ids for window in windows]
    begins, ends = np.ascontiguousarray(np.concatenate(all_edges).T)
    columns = {
        TOKEN_IDS: store.flat(all_ids, np.int32),
        _BEGINS: begins,
        _ENDS: ends,
        store.LENGTHS: store.lengths_of(all_ids),
        _LABELS: np.array(labels, np.int64),
        _CUT: np.array([cut[window.pair] for window in windows]),
    }
    types = [window.types for window in windows if window.types is not None]
    return {**columns, TYPE_IDS: store.flat(types, np.int8)} if types else columns
