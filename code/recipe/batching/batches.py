"""Token ids to batches. The one place that knows how samples share a tensor.

A batch is what the model takes, and beside it (see `engine`) `labels` [samples]; `rows` [samples],
each sample's position in its data set, -1 in a place that holds none; and `total`, the weight of
the samples of the whole optimizer step, over all processes and accumulated batches.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import datasets
import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset

from recipe.batching import packing
from recipe.batching.packing import Rows, Shape
from recipe.data.column_names import LABEL, TOKEN_IDS, TYPE_IDS

Batch = dict[str, Any]


@dataclass(frozen=True)
class Samples:
    """A data set in memory: the token ids of all samples one after the other, and their labels."""

    token_ids: Rows
    starts: Rows
    """Where each sample starts in `token_ids`, and at last where the data ends."""
    labels: Any
    """An array [samples] or [samples, labels]."""
    types: Rows | None = field(default=None, kw_only=True)
    """The type of each of `token_ids`, by which a tokenizer tells the texts of a pair apart."""

    @classmethod
    def of(cls, split: datasets.Dataset) -> Samples:
        """The samples of a data set with the columns `input_ids` and `label`, and maybe
        `token_type_ids`."""
        columns = split.with_format("numpy")
        ids = [np.asarray(row, dtype=np.int32) for row in columns[TOKEN_IDS]]
        labels = np.asarray(split[LABEL][:])
        if labels.dtype.kind == "f":
            labels = labels.astype(np.float32)
        types = None
        if TYPE_IDS in split.column_names:
            types = np.concatenate([np.asarray(row, dtype=np.int8) for row in columns[TYPE_IDS]])
        return cls(np.concatenate(ids), np.cumsum([0, *map(len, ids)]), labels, types=types)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @functools.cached_property
    def lengths(self) -> Rows:
        """Tokens of each sample."""
        return np.diff(self.starts)

    def weight(self, rows: Rows) -> int:
        """What the samples at `rows` weigh in a mean of losses: one each."""
        return len(rows)

    def in_epoch(self, seed: int, epoch: int) -> Samples:
        """As an epoch of a training sees them: the same each time, for the same arguments."""
        return self

    def fingerprint(self) -> str:
        """What tells this data apart from other data."""
        digest = hashlib.sha256()
        for array in (self.token_ids, self.starts, self.labels, self.types):
            if array is not None:
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()[:16]

    def tokens(self, row: int) -> Rows:
        """The token ids of one sample."""
        ids: Rows = self.token_ids[self.starts[row] : self.starts[row + 1]]
        return ids

    def places(self, rows: Rows) -> tuple[Rows, Rows, Rows]:
        """Of each token of the samples at `rows`, one sample after the other: its position in
        `token_ids`; the number of its sample among `rows`; its position in that sample."""
        lengths = self.lengths[rows]
        owners = np.repeat(np.arange(len(rows)), lengths)
        within = np.arange(len(owners)) - (np.cumsum(lengths) - lengths)[owners]
        return self.starts[rows][owners] + within, owners, within

    def types_of(self, row: int) -> Rows:
        """The types of the tokens of one sample, of `types` that are there."""
        assert self.types is not None
        types: Rows = self.types[self.starts[row] : self.starts[row + 1]]
        return types


class Layout(Protocol):
    """How the samples of a batch are laid into tensors."""

    balanced: ClassVar[bool]
    """Whether batches need like sums of tokens, rather than samples of like length."""

    def tensors(self, samples: Samples, rows: Rows) -> Batch:
        """What the model takes, for the samples at `rows`, at most `size` of them."""

    def describe(self) -> str:
        """The shapes, for the log."""

    def places(self, samples: Samples, rows: Rows) -> int:
        """Tokens computed for the samples at `rows`, padding included."""


@dataclass(frozen=True)
class Packed:
    """Samples end to end in blocks of one shape (`recipe.models.packed_encoders`)."""

    shape: Shape
    size: int
    pad_id: int
    first_position: int
    balanced: ClassVar[bool] = True
    typed: bool = field(default=False, kw_only=True)
    """Whether the model takes the types of tokens."""

    def tensors(self, samples: Samples, rows: Rows) -> Batch:
        """input_ids, position_ids, segments and maybe token_type_ids [rows, length], first
        [size].

        A batch that the shape has no room for gets the blocks that it lacks.
        """
        lengths = samples.lengths[rows]
        blocks = self.shape.place(lengths)
        by_block = np.argsort(blocks, kind="stable")
        first_in_block = np.searchsorted(blocks[by_block], blocks[by_block])
        ends = np.cumsum(lengths[by_block])
        starts, numbers = np.empty_like(lengths), np.empty_like(lengths)
        starts[by_block] = ends - lengths[by_block] - (ends - lengths[by_block])[first_in_block]
        numbers[by_block] = np.arange(len(rows)) - first_in_block + 1
        assert (starts + lengths <= self.shape.length).all()
        first = np.zeros(self.size, dtype=np.int64)
        first[: len(rows)] = blocks * self.shape.length + starts
        source, owners, within = samples.places(rows)
        to = first[owners] + within
        count = max(self.shape.rows, int(blocks.max(initial=0)) + 1)
        ids = np.full(count * self.shape.length, self.pad_id)
        positions = np.full_like(ids, self.first_position)
        segments, types = np.zeros_like(ids), np.zeros_like(ids)
        ids[to] = samples.token_ids[source]
        positions[to] += within
        segments[to] = numbers[owners]
        arrays = {"input_ids": ids, "position_ids": positions, "segments": segments}
        if self.typed:
            assert samples.types is not None
            types[to] = samples.types[source]
            arrays[TYPE_IDS] = types
        in_blocks = {name: array.reshape(count, -1) for name, array in arrays.items()}
        return {name: torch.from_numpy(a) for name, a in {**in_blocks, "first": first}.items()}

    def describe(self) -> str:
        """The block shape."""
        return f"packed into {self.shape.rows} blocks of {self.shape.length} tokens"

    def places(self, samples: Samples, rows: Rows) -> int:
        """The tokens of all blocks of the shape."""
        return self.shape.tokens


@dataclass(frozen=True)
class Padded:
    """A sample in each row, padded to one of a few lengths."""

    lengths: tuple[int, ...]
    size: int
    pad_id: int
    balanced: ClassVar[bool] = False
    typed: bool = field(default=False, kw_only=True)
    """Whether the model takes the types of tokens."""

    def tensors(self, samples: Samples, rows: Rows) -> Batch:
        """input_ids, attention_mask and maybe token_type_ids [size, one of the lengths]."""
        length = self._length(samples, rows)
        ids = np.full((self.size, length), self.pad_id)
        mask, types = np.zeros_like(ids), np.zeros_like(ids)
        # A row without a sample attends to one token: attention to none has no value.
        mask[:, 0] = 1
        source, owners, within = samples.places(rows)
        ids[owners, within] = samples.token_ids[source]
        mask[owners, within] = 1
        if self.typed:
            assert samples.types is not None
            types[owners, within] = samples.types[source]
        arrays = {"input_ids": ids, "attention_mask": mask}
        if self.typed:
            arrays[TYPE_IDS] = types
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _length(self, samples: Samples, rows: Rows) -> int:
        longest = int(samples.lengths[rows].max(initial=1))
        return next(length for length in self.lengths if length >= longest)

    def describe(self) -> str:
        """The lengths."""
        return f"padded to {' or '.join(map(str, self.lengths))} tokens"

    def places(self, samples: Samples, rows: Rows) -> int:
        """The tokens of all rows."""
        return self.size * self._length(samples, rows)


@dataclass(frozen=True, kw_only=True)
class World:
    """The processes that share each optimizer step."""

    processes: int = 1
    rank: int = 0


@dataclass(frozen=True, kw_only=True)
class Training:
    """Batches of a training: a pure function of (data, seed, epoch, world)."""

    samples: Samples
    size: int
    """Samples in a batch of one process."""
    accumulation: int = 1
    seed: int = 0
    world: World = World()

    def epoch(self, epoch: int, balanced: bool) -> Epoch:
        """The batches of an epoch; nothing is computed of any other epoch."""
        size = self.size * self.world.processes * self.accumulation
        steps = packing.steps(self.samples.lengths, size, self.seed, epoch, balanced)
        return Epoch(self, self.samples.in_epoch(self.seed, epoch), steps, balanced)

    def rows(self, epochs: int, balanced: bool) -> list[Rows]:
        """The rows of every batch of all processes in the first `epochs` epochs."""
        return [
            rows
            for epoch in range(epochs)
            for batch in self.epoch(epoch, balanced)
            for rows, _ in batch
        ]


class Epoch:
    """For each batch of an epoch, for each process: its rows, and the weight of the step.

    A step is split over processes and accumulated batches when the first of these is asked for.
    """

    def __init__(
        self, training: Training, samples: Samples, steps: Sequence[Rows], balanced: bool
    ) -> None:
        self._training, self._steps, self._balanced = training, steps, balanced
        self.samples = samples
        """As this epoch sees them."""
        self._split = functools.lru_cache(maxsize=1)(self._split_step)

    def __len__(self) -> int:
        return len(self._steps) * self._training.accumulation

    def __getitem__(self, number: int) -> list[tuple[Rows, int]]:
        step, part = divmod(number, self._training.accumulation)
        processes = self._training.world.processes
        batches, weight = self._split(step)
        return [(rows, weight) for rows in batches[part * processes : (part + 1) * processes]]

    def __iter__(self) -> Iterator[list[tuple[Rows, int]]]:
        return (self[number] for number in range(len(self)))

    def _split_step(self, number: int) -> tuple[list[Rows], int]:
        training, step = self._training, self._steps[number]
        parts = training.world.processes * training.accumulation
        lengths = training.samples.lengths
        batches = packing.split(step, lengths, parts, training.size, self._balanced)
        return batches, self.samples.weight(step)


class _Drawn(Dataset[Batch]):
    """The batches of one process, by (epoch, number)."""

    def __init__(self, training: Training, layout: Layout) -> None:
        self._training, self._layout = training, layout
        self._epoch = functools.lru_cache(maxsize=1)(training.epoch)

    def __len__(self) -> int:
        return len(self._training.samples)

    def __getitem__(self, at: tuple[int, int]) -> Batch:
        epoch, number = at
        drawn = self._epoch(epoch, self._layout.balanced)
        rows, total = drawn[number][self._training.world.rank]
        return _finish(drawn.samples, self._layout, rows, self._training.size, total)


class _Numbers(BatchSampler):
    """(epoch, number) of each batch of an epoch."""

    def __init__(self, count: int) -> None:
        self._count, self._epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer at the start of each epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[list[Any]]:
        return iter([[(self._epoch, number)] for number in range(self._count)])


class _Loader(DataLoader[Batch]):
    """Hands the Trainer's word of a new epoch on."""

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer at the start of each epoch."""
        assert isinstance(self.batch_sampler, _Numbers)
        self.batch_sampler.set_epoch(epoch)


def training_loader(
    training: Training, layout: Layout, pin_memory: bool, workers: int = 0
) -> DataLoader[Batch]:
    """The batches of this process for one epoch after the other.

    Nothing is drawn from the global random state, so that it depends on the model alone.
    """
    at_once = training.size * training.world.processes * training.accumulation
    steps = -(-len(training.samples) // at_once)
    return _Loader(
        _Drawn(training, layout),
        batch_sampler=_Numbers(steps * training.accumulation),
        collate_fn=_only,
        generator=torch.Generator(),
        pin_memory=pin_memory,
        num_workers=workers,
    )


def _only(batches: Sequence[Batch]) -> Batch:
    (batch,) = batches
    return batch


def evaluation_batches(
    samples: Samples, layout: Layout, size: int, world: World
) -> Iterator[Batch]:
    """This process's share of the batches of an evaluation; each process gets as many.

    The batches are the same for any number of processes: it only decides who computes which.
    """
    batches = packing.in_order(samples.lengths, size, layout.balanced)
    none = np.empty(0, dtype=np.int64)
    batches += [none] * (-len(batches) % world.processes)
    weight = samples.weight(np.arange(len(samples)))
    for rows in batches[world.rank :: world.processes]:
        yield _finish(samples, layout, rows, size, weight)


def _finish(samples: Samples, layout: Layout, rows: Rows, size: int, total: int) -> Batch:
    labels = np.zeros((size, *samples.labels.shape[1:]), dtype=samples.labels.dtype)
    labels[: len(rows)] = samples.labels[rows]
    placed = np.full(size, -1)
    placed[: len(rows)] = rows
    return {
        **layout.tensors(samples, rows),
        "labels": torch.from_numpy(labels),
        "rows": torch.from_numpy(placed),
        # A number would become a constant of the computation, and another one another graph; on
        # torch-xla a tensor without dimensions too, if it is 1.
        "total": torch.tensor([float(total)]),
    }
