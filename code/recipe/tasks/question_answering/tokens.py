"""Tokenise questions with their contexts, in overlapping windows, and make batches of these.

A batch has the tensors of any samples (`batches`), and for each window: `first`, the position of
its first token in the flattened blocks; `lengths`, its tokens (0 in an unused place); `spans`
[size, 2], the first and the last token of the answer. `answers` [size, 1 + 2 * tokens] has the
shape of the model's outputs, `at` [tokens] that of the longest window.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from recipe.batching import batches
from recipe.batching.batches import CompositeLayout
from recipe.batching.packing import Rows
from recipe.batching.samples import Samples
from recipe.console import say
from recipe.data.column_names import TOKEN_IDS, TYPE_IDS
from recipe.errors import ModelError
from recipe.tasks.question_answering import spans
from recipe.tasks.question_answering.data import ANSWERS, CONTEXT, QUESTION, STARTS
from recipe.tokenization import store

_BEGINS, _ENDS, _LABELS, _CUT = "begins", "ends", "labels", "cut"
NOWHERE = -1
Batch = Mapping[str, list[Any]]


@dataclass(frozen=True)
class Windows(Samples):
    """Samples that are windows. The label of each is [the first token of the answer, its last one,
    the number of the example, the token that stands for no answer]."""

    begins: Rows
    """The first character in the context of each of `token_ids`; NOWHERE for other tokens."""
    ends: Rows
    """The last character (exclusive) of each token in the context."""
    judged: bool = False
    """Whether the model returns answers in addition to losses."""


@dataclass(frozen=True)
class WindowLayout(CompositeLayout):
    """A layout of windows."""

    tokens: int
    """Tokens of the longest window."""
    judged: bool
    """Whether the model's answers are wanted, not only its losses."""

    def tensors(self, samples: Samples, rows: Rows) -> batches.Batch:
        """Return the tensors of the texts, and the spans of their answers."""
        batch, first = self.laid(samples, rows)
        lengths = np.zeros(self.texts.size, dtype=np.int64)
        lengths[: len(rows)] = samples.lengths[rows]
        spans = np.zeros((self.texts.size, 2), dtype=np.int64)
        spans[: len(rows)] = samples.labels[rows, :2]
        answers = (self.texts.size, 1 + 2 * self.tokens if self.judged else 1)
        return batch | {
            "first": torch.from_numpy(first),
            "lengths": torch.from_numpy(lengths),
            "spans": torch.from_numpy(spans),
            "answers": torch.zeros(answers, dtype=torch.int8),
            "at": torch.zeros(self.tokens, dtype=torch.int8),
        }


def tokenise(
    name: str,
    split: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    stride: int,
) -> Windows:
    """Return the windows of a split of `recipe.tasks.question_answering.data`, and log how many
    there are.

    A window holds the question and a part of the context; consecutive windows share `stride`
    tokens. The first answer is learned in the windows that hold all of it; otherwise the first
    token (CLS) is.

    Raises:
        ModelError: the tokenizer does not return the offsets of tokens.
    """
    if not tokenizer.is_fast:
        raise ModelError(
            f"The tokenizer ({type(tokenizer).__name__}) does not return the offsets of tokens.",
            "Give a model with a fast tokenizer (tokenizer.json).",
        )
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
    tokenizer: Any, max_length: int, stride: int, batch: Batch, rows: range
) -> dict[str, store.Column]:
    """Return the windows of some questions."""
    most = max_length - stride - tokenizer.num_special_tokens_to_add(pair=True) - 1
    bare = tokenizer(
        list(batch[QUESTION]), add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    questions, cut = [], []
    for question, offsets in zip(batch[QUESTION], bare["offset_mapping"], strict=True):
        cut.append(len(offsets) > most)
        while len(offsets) > most:
            # The rest of a cut word may have more tokens than that part had before.
            question = question[: min(offsets[most - 1][1], len(question) - 1)]
            again = tokenizer(question, add_special_tokens=False, return_offsets_mapping=True)
            offsets = again["offset_mapping"]
        questions.append(question)
    encoded = spans.encode(tokenizer, questions, list(batch[CONTEXT]), max_length, stride)
    of_context = spans.context_sequence(tokenizer)
    all_begins, all_ends, labels, is_cut = [], [], [], []
    for window, sample in enumerate(encoded["overflow_to_sample_mapping"]):
        tokens = zip(encoded.sequence_ids(window), encoded["offset_mapping"][window], strict=True)
        edges = [offset if owner == of_context else (NOWHERE, NOWHERE) for owner, offset in tokens]
        begins, ends = map(list, zip(*edges, strict=True))
        ids = encoded[TOKEN_IDS][window]
        nowhere = spans.no_answer_token(tokenizer, ids)
        learned = [nowhere, nowhere]
        if batch[ANSWERS][sample]:
            start = batch[STARTS][sample][0]
            stop = start + len(batch[ANSWERS][sample][0])
            inside = [index for index, begin in enumerate(begins) if begin != NOWHERE]
            # Learned only where the window has all of the answer.
            if inside and begins[inside[0]] <= start and ends[inside[-1]] >= stop:
                first = max(index for index in inside if begins[index] <= start)
                last = min(index for index in inside if ends[index] >= stop)
                learned = [first, max(first, last)]
        all_begins.append(begins)
        all_ends.append(ends)
        labels.append([*learned, rows[sample], nowhere])
        is_cut.append(cut[sample])
    columns = {
        TOKEN_IDS: store.flat(encoded[TOKEN_IDS], np.int32),
        _BEGINS: store.flat(all_begins, np.int32),
        _ENDS: store.flat(all_ends, np.int32),
        store.LENGTHS: store.lengths_of(encoded[TOKEN_IDS]),
        _LABELS: np.array(labels, np.int64),
        _CUT: np.array(is_cut, bool),
    }
    if TYPE_IDS in encoded:
        columns[TYPE_IDS] = store.flat(encoded[TYPE_IDS], np.int8)
    return columns
