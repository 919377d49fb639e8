"""Packed rows: the texts of a call one after the other in one row, padded only at its end.

The families of models that can be packed, their heads and their attention are those of training
(`recipe.models.packed_encoders`, `recipe.models.flat_attention`). Rows have few different lengths,
since kernels are made for each shape, and so few tokens that the output of a layer stays in a
core's cache (docs/LAB.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from recipe.backend.rows import (
    OutputKind,
    Pooling,
    Reading,
    TokenRow,
    Values,
    are_close,
    kept_positions,
    tolerance_of,
)
from recipe.batching import packing
from recipe.batching.flat import Row
from recipe.console import log
from recipe.data.column_names import TYPE_IDS
from recipe.models import flat_attention, packed_encoders
from recipe.models.packed_encoders import Family
from recipe.runtime import device
from recipe.runtime.graphs import CudaRecorder, Graphs, Recorder
from recipe.runtime.transfers import to_device

ROW_TOKENS: Mapping[str, int] = {"cpu": 2048, "cuda": 16384}
"""The most tokens of a row that holds several texts, by device."""
_STEP = 64
"""Lengths of rows are multiples of this, or powers of two below it."""
_LEAST = 16
RECORDERS: Mapping[str, Callable[[], Recorder]] = {"cuda": CudaRecorder}
"""What records graphs, by device."""
_GRAPH_TOKENS = (8192, 4096, 2048, 1024, 512, 256)
_GRAPH_LONGEST = (512, 128)
"""Tokens of the rows that graphs compute, and of their longest text. The largest is recorded first:
others reuse its memory, which is half of that of the fullest row."""
HEADS: Mapping[str, str] = {
    "AutoModel": "",
    "AutoModelForSequenceClassification": "head",
    "AutoModelForTokenClassification": "tags",
    "AutoModelForQuestionAnswering": "spans",
    "AutoModelForMaskedLM": "masked",
}
"""The name of the head in `Family`, by Auto class of transformers; empty for hidden states."""


@dataclass(frozen=True)
class PackedRows:
    """Computes packed rows of one model."""

    family: Family
    head: str
    """The name of the model's head in `family`; empty for hidden states."""
    most: int
    """The most tokens of a row of several texts."""
    takes_types: bool
    graphs: Graphs | None = None
    """Graphs of the rows in `shapes`; None: all are computed without."""
    shapes: Sequence[Row] = ()

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        architecture: str,
        inputs: frozenset[str],
        environ: Mapping[str, str],
    ) -> PackedRows | None:
        """Return the layout of a model on its device, in its precision; None if its family, head or
        device is not supported, or AMPHORA_PACKING is 0. Raise ValueError if that is neither 0 nor
        1. `architecture` is the name of the Auto class that loaded it, `inputs` those of its
        forward."""
        layouts = "packed texts, if the model allows it", "padded texts"
        if not device.is_on(environ, "AMPHORA_PACKING", *layouts):
            return None
        family = packed_encoders.family_of(model.config)
        is_library_model = type(model).__module__.startswith("transformers.models.")
        kind = model.device.type
        why_not = ""
        if family is None or not is_library_model:
            why_not = f"{type(model).__name__} is not of a family whose texts can share a row"
        elif architecture not in HEADS:
            why_not = f"the head of {architecture} cannot read a row of several texts"
        elif kind not in ROW_TOKENS:
            why_not = f"the device is {kind}"
        elif kind == "cuda":
            why_not = flat_attention.why_not(model.config, model.device, model.dtype) or ""
        if family is None or why_not:
            log(f"batches: texts are padded: {why_not}")
            return None
        return cls(family, HEADS[architecture], ROW_TOKENS[kind], TYPE_IDS in inputs)

    def with_graphs(
        self, model: PreTrainedModel, longest: int, environ: Mapping[str, str]
    ) -> PackedRows | None:
        """Return the layout with graphs for rows of up to 8,192 tokens; None if AMPHORA_CUDA_GRAPHS
        is not 1, the device has none, or their states are others.

        Args:
            longest: The most tokens of a text.

        Raises:
            ValueError: AMPHORA_CUDA_GRAPHS is neither 0 nor 1.
        """
        ways = "a graph of each shape of rows", "kernels one by one"
        recorder = RECORDERS.get(model.device.type)
        if not device.is_on(environ, "AMPHORA_CUDA_GRAPHS", *ways, usual="0") or not recorder:
            return None
        shapes = [
            Row(tokens, most)
            for tokens in _GRAPH_TOKENS
            for most in _GRAPH_LONGEST
            if most == _GRAPH_LONGEST[-1] or longest > _GRAPH_LONGEST[-1]
        ]
        try:
            graphs = Graphs(lambda batch: [self.computed(model, **batch)], recorder(), len(shapes))
            recorded = replace(self, graphs=graphs, shapes=shapes[::-1])
            why_not = recorded._compare_states(model, longest)
        except RuntimeError as error:  # as of a device that is full
            why_not = f"{type(error).__name__}: {str(error)[:200]}"
        outcome = f"no graphs, since {why_not}" if why_not else f"{len(shapes)} graphs of rows"
        log(f"batches: {outcome}")
        return None if why_not else recorded

    @torch.inference_mode()
    def _compare_states(self, model: PreTrainedModel, longest: int) -> str:
        """Record all graphs, and compare the states of random texts with those without. Return what
        differs; empty if nothing does."""
        random, usual = np.random.default_rng(0), replace(self, graphs=None, shapes=())
        for shape in [*self.shapes[::-1]] * 2:  # other texts once all are recorded
            lengths = [min(longest, shape.longest, shape.length)]
            while (room := shape.length * 3 // 4 - sum(lengths)) > 0:
                lengths.append(min(room, int(random.integers(1, lengths[0] + 1))))
            ids = (random.integers(model.config.vocab_size, size=length) for length in lengths)
            rows = [TokenRow(some.tolist()) for some in ids]
            expected, states = ([layout.states(model, rows).cpu()] for layout in (usual, self))
            if not are_close(states, expected, tolerance_of(expected, model.dtype)):
                return f"states of rows of {shape.length} tokens differ"
        return ""

    def cuts(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the positions of the texts of each row, shorter texts first."""
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        start = tokens = 0
        for end, index in enumerate(order):
            if tokens + lengths[index] > self.most and end > start:
                yield order[start:end]
                start, tokens = end, 0
            tokens += lengths[index]
        if order:
            yield order[start:]

    def states(self, model: PreTrainedModel, rows: Sequence[TokenRow]) -> Tensor:
        """Return the last hidden states [tokens, hidden] of one row on the model's device."""
        lengths = np.asarray([len(row.ids) for row in rows], dtype=np.int64)
        real, most = int(lengths.sum()), int(lengths.max())
        pad = int(getattr(model.config, "pad_token_id", None) or 0)
        fitting = (
            shape
            for shape in self.shapes
            if real <= shape.length and most <= shape.longest and len(rows) <= _texts(shape)
        )
        if (shape := next(fitting, None)) is not None:
            rounded, longest = shape.length, shape.longest
            starts = shape.starts(lengths, _texts(shape)).astype(np.int64)
        else:
            rounded = -(-real // _STEP) * _STEP
            if real <= _STEP // 2:
                rounded = max(_LEAST, 1 << (real - 1).bit_length())
            starts = np.array([0, *np.cumsum(lengths), *[rounded] * (real < rounded)])
            longest = max(most, rounded - real)
        ids = np.full(rounded, pad, dtype=np.int64)
        ids[:real] = list(itertools.chain.from_iterable(row.ids for row in rows))
        # Position ids restart at the first token of each text, and of the padding.
        first = self.family.first_position(model.config)
        positions = np.full(len(ids), first, dtype=np.int64)
        begins = np.repeat(np.cumsum(lengths) - lengths, lengths)
        positions[:real] = packing.text_positions(ids[:real], begins, first)
        parts = [ids, positions, starts]
        if self.takes_types and (shape is not None or any(row.types for row in rows)):
            types = np.zeros_like(ids)
            filled = (row.types or [0] * len(row.ids) for row in rows)
            types[:real] = list(itertools.chain.from_iterable(filled))
            parts.append(types)
        # Copy all arrays to the device at once.
        numbers = to_device(torch.from_numpy(np.concatenate(parts)), model.device)
        sizes = [len(part) for part in parts]
        split = torch.split(numbers, sizes)
        if shape is None or self.graphs is None:
            return self.computed(model, split, longest)[:real]
        return self.graphs.run({"parts": split, "longest": longest})[0][:real]

    def computed(self, model: PreTrainedModel, parts: Sequence[Tensor], longest: int) -> Tensor:
        """Compute the last hidden states [tokens, hidden] of a row, whose longest text has
        `longest` tokens, without waiting for the device.

        Args:
            parts: int64 tensors on the same device: ids [tokens], positions [tokens], the start of
                each text and the end of the last [texts + 1], and optionally types [tokens].
        """
        ids, positions, starts, *types = parts
        inputs: dict[str, Any] = {
            "input_ids": ids[None],
            "position_ids": positions[None],
            "starts": starts.to(torch.int32),
            "longest": longest,
        }
        if types:
            inputs[TYPE_IDS] = types[0][None]
        # Without blocks, only the shape of the last argument, the segments, is used.
        return packed_encoders.states(model, self.family, inputs, positions[None])[0]

    @torch.inference_mode()
    def values(
        self, model: PreTrainedModel, rows: Sequence[TokenRow], reading: OutputKind
    ) -> Values:
        """Return the values of each text of one row."""
        return self.read(model, self.states(model, rows), rows, reading)

    def read(
        self, model: PreTrainedModel, hidden: Tensor, rows: Sequence[TokenRow], reading: OutputKind
    ) -> Values:
        """Return the values of each text of a row by its states [tokens, hidden]."""
        lengths = np.asarray([len(row.ids) for row in rows], dtype=np.int64)
        begins = np.cumsum(lengths) - lengths
        if isinstance(reading, Pooling):
            starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
            # sentence-transformers passes hidden states without padding to its pooling like this.
            vectors = reading.vectors(hidden[None], cu_seq_lens_q=to_device(starts, hidden.device))
            return Values(vectors)
        if reading is Reading.TOKENS:
            counts = lengths.tolist()
            if any(row.keep is not None for row in rows):
                positions, counts = kept_positions(rows, begins)
                hidden = hidden[to_device(positions, hidden.device)]
            head = getattr(self.family, self.head) if self.head else None
            return Values(hidden if head is None else head(model, hidden), counts)
        is_mean = reading is Reading.MEAN
        if is_mean or self.family.pools_mean(model.config):
            owners = torch.from_numpy(np.repeat(np.arange(len(rows)), lengths))
            sums = hidden.new_zeros((len(rows), hidden.shape[-1]), dtype=torch.float32)
            sums.index_add_(0, to_device(owners, hidden.device), hidden.float())
            means = sums / to_device(torch.from_numpy(lengths), hidden.device)[:, None]
            if is_mean:
                return Values(means)
            pooled = means.to(hidden.dtype)
        else:
            pooled = hidden[to_device(torch.from_numpy(begins), hidden.device)]
        return Values(self.family.head(model, pooled))


def _texts(shape: Row) -> int:
    """Return the most texts of a row that a graph computes: empty ones take time, too."""
    return 64 + shape.length // 16
