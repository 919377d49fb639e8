"""Tokenise pairs of texts, for the encoder and the decoder, and make batches of these.

The tokens of a sample are those of its source, then those of its target. A batch has `input_ids`
and `attention_mask` [rows, source length], `decoder_input_ids` [rows, target length], and the
tensors of `document_batches` for learned tokens: all targets, at their positions in the decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import datasets
import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from recipe.batching import batches, packing
from recipe.batching.batches import Samples
from recipe.batching.document_batches import NOT_LEARNED, pad_positions
from recipe.batching.packing import Rows
from recipe.console import say
from recipe.data.column_names import TOKEN_IDS
from recipe.tasks.text_to_text.data import SOURCE, TARGET
from recipe.tokenization import store
from recipe.tokenization.encoding import beginning

_SOURCES, _TARGETS = "sources", "targets"
_CUT_SOURCE, _CUT_TARGET = "source_is_cut", "target_is_cut"
_SOURCE_LENGTHS, _TARGET_LENGTHS = 4, 2
Lengths = tuple[int, int]
"""The lengths of sources and targets in a batch."""


@dataclass(frozen=True)
class Pairs(Samples):
    """Samples that are pairs. The label of each is the number of its target's tokens."""

    sources: Rows
    """Tokens of each sample's source."""
    texts: datasets.Dataset
    """The same pairs as texts, with the columns `source` and `target`."""

    def weight(self, rows: Rows) -> int:
        """Return the tokens of the targets at `rows`: the loss is the mean over these."""
        return max(1, int(self.labels[rows].sum()))

    def lengths_of(self, rows: Rows) -> Lengths:
        """Return the longest source and the longest target among `rows`."""
        return int(self.sources[rows].max(initial=1)), int(self.labels[rows].max(initial=1))


@dataclass(frozen=True)
class PaddedPairs:
    """A pair in each row, both its texts padded to one of a few lengths."""

    shapes: Sequence[Lengths]
    size: int
    pad_id: int
    shift: Callable[[torch.Tensor], torch.Tensor]
    """The model's function from labels [rows, length] to the inputs of its decoder."""
    learned: int
    """Most target tokens in a batch; a rare batch has more."""
    balanced: ClassVar[bool] = False

    def tensors(self, samples: Samples, rows: Rows) -> batches.Batch:
        """Return the inputs of the model, and the learned tokens."""
        assert isinstance(samples, Pairs)
        source_length, target_length = self._shape(samples, rows)
        indices, owners, within = samples.token_positions(rows)
        sources = samples.sources[rows][owners]
        reads = within < sources
        ids = np.full((self.size, source_length), self.pad_id)
        mask = np.zeros_like(ids)
        # An unused row attends to one token, since attention to none is undefined.
        mask[:, 0] = 1
        ids[owners[reads], within[reads]] = samples.token_ids[indices[reads]]
        mask[owners[reads], within[reads]] = 1
        owners, within = owners[~reads], (within - sources)[~reads]
        targets = samples.token_ids[indices[~reads]].astype(np.int64)
        labels = np.full((self.size, target_length), NOT_LEARNED, dtype=np.int64)
        labels[len(rows) :, 0] = self.pad_id + 1  # of an unused row, whose loss does not count
        labels[owners, within] = targets
        positions = owners * target_length + within
        return {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(mask),
            "decoder_input_ids": self.shift(torch.from_numpy(labels)),
            **pad_positions(positions, targets, owners, self.size, self.learned),
        }

    def _shape(self, samples: Pairs, rows: Rows) -> Lengths:
        lengths = samples.lengths_of(rows)
        # If data is tokenized during training, a longer sample may come later.
        largest = [*map(max, zip(*self.shapes, lengths, strict=True))]
        source, target = (-(-length // packing.ALIGNMENT) * packing.ALIGNMENT for length in largest)
        fits = [shape for shape in self.shapes if shape[0] >= lengths[0] and shape[1] >= lengths[1]]
        return min(fits, key=sum, default=(source, target))

    def describe(self) -> str:
        """Return the lengths."""
        shown = ", ".join(f"{source} and {target}" for source, target in self.shapes)
        return f"padded to {shown} tokens of source and target"

    def computed_tokens(self, samples: Samples, rows: Rows) -> int:
        """Return the tokens of all rows."""
        assert isinstance(samples, Pairs)
        return self.size * sum(self._shape(samples, rows))


def shapes(pairs: Sequence[tuple[Pairs, Rows]]) -> list[Lengths]:
    """Return a few pairs of lengths that hold `pairs`; the last one holds every sample."""
    longest = np.asarray([samples.lengths_of(rows) for samples, rows in pairs if len(rows)])
    if not len(longest):
        return [(packing.ALIGNMENT, packing.ALIGNMENT)]
    tops = packing.buckets([batch[:1] for batch in longest], _SOURCE_LENGTHS)
    lengths_in_use: set[Lengths] = set()
    for below, top in zip((0, *tops), tops, strict=False):
        targets = longest[(longest[:, 0] > below) & (longest[:, 0] <= top), 1]
        if len(targets):
            lengths = packing.buckets([np.asarray([target]) for target in targets], _TARGET_LENGTHS)
            lengths_in_use |= {(top, length) for length in lengths}
    # In other epochs a long target may be batched with other sources.
    lengths_in_use.add((max(tops), max(length for _, length in lengths_in_use)))
    return sorted(lengths_in_use)


def tokenise(
    name: str,
    split: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    prefix: str,
    longest_source: int,
    longest_target: int,
) -> Pairs:
    """Return the samples of a split with the columns `source` and `target`, cached; log how many
    are cut.

    Args:
        prefix: The text before each source.
        longest_source: Tokens at which sources are cut.
        longest_target: Tokens at which targets are cut.
    """

    def make(batch: Mapping[str, list[Any]], rows: range) -> dict[str, store.Column]:
        sources = [prefix + text for text in batch[SOURCE]]
        source_ids, cut_sources = encoded(tokenizer, sources, longest_source)
        target_ids, cut_targets = encoded(tokenizer, batch[TARGET], longest_target, is_target=True)
        of_sources, of_targets = store.lengths_of(source_ids), store.lengths_of(target_ids)
        both = [a + b for a, b in zip(source_ids, target_ids, strict=True)]
        return {
            TOKEN_IDS: store.flat(both, np.int32),
            store.LENGTHS: of_sources + of_targets,
            _SOURCES: of_sources,
            _TARGETS: of_targets,
            _CUT_SOURCE: np.array(cut_sources, bool),
            _CUT_TARGET: np.array(cut_targets, bool),
        }

    # The languages that the tokenizer is set to mark the texts.
    marks = [str(getattr(tokenizer, name, None)) for name in ("src_lang", "tgt_lang")]
    key = store.key(split, tokenizer, longest_source, "pairs", prefix, str(longest_target), *marks)
    made = store.tokens_of(split, key, make)
    pairs = Pairs(made[TOKEN_IDS], made[store.STARTS], made[_TARGETS], made[_SOURCES], split)
    line = f"{name}: {len(pairs)} pairs, {int(pairs.sources.sum())} tokens of sources and "
    line += f"{int(pairs.labels.sum())} of targets"
    for what, column in (("sources", _CUT_SOURCE), ("targets", _CUT_TARGET)):
        if cut := int(made[column].sum()):
            line += f"; {cut} {what} are cut ({cut / len(pairs):.1%})"
    say(line)
    return pairs


def encoded(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    longest: int,
    is_target: bool = False,
) -> tuple[list[list[int]], list[bool]]:
    """Return the token ids of texts with special tokens, and whether each was cut."""
    heads = [beginning(tokenizer, text, longest + 1) for text in texts]
    options: dict[str, Any] = {"return_attention_mask": False, "verbose": False}
    given: dict[str, Any] = {"text_target" if is_target else "text": heads}
    ids = tokenizer(**given, truncation=True, max_length=longest + 1, **options)["input_ids"]
    cut = [len(row) > longest for row in ids]
    if any(cut):
        # With its end token, as in training.
        ids = tokenizer(**given, truncation=True, max_length=longest, **options)["input_ids"]
    return ids, cut
