"""Make batches of token ids. The one place that knows how samples share a tensor.

A batch holds the model's inputs and, for the engine, `labels` [samples]; `rows` [samples], the
position of each sample in its data set, -1 in a place without a sample; and `total`, the weight of
the samples of the whole optimizer step, over all processes and accumulated batches.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset

from recipe.batching import packing
from recipe.batching.flat import Row
from recipe.batching.packing import ALIGNMENT, Rows, Shape
from recipe.batching.samples import Samples as Samples
from recipe.data.column_names import TYPE_IDS

Batch = dict[str, Any]


class Layout(Protocol):
    """How the samples of a batch are laid into tensors."""

    @property
    def balanced(self) -> bool:
        """Return whether batches should have similar sums of tokens rather than samples of similar
        lengths."""

    def tensors(self, samples: Samples, rows: Rows) -> Batch:
        """Return what the model takes, for the samples at `rows`, at most `size` of them."""

    def describe(self) -> str:
        """Return the shapes, for the log."""

    def computed_tokens(self, samples: Samples, rows: Rows) -> int:
        """Return the tokens computed for the samples at `rows`, padding included."""


@dataclass(frozen=True)
class Packed:
    """Samples end to end in blocks of one shape (`recipe.models.packed_encoders`)."""

    shape: Shape | Row
    size: int
    pad_id: int
    first_position: int
    balanced: ClassVar[bool] = True
    typed: bool = field(default=False, kw_only=True)
    """Whether the model takes the types of tokens."""

    def tensors(self, samples: Samples, rows: Rows) -> Batch:
        """Return input_ids, position_ids, segments and maybe token_type_ids [rows, length], first
        [size]; a row without blocks also has starts (int32) and longest (a number).

        A batch that does not fit into the shape gets more blocks, or a longer row.
        """
        lengths = samples.lengths[rows]
        shape = self.shape.fitting(lengths)
        blocks = shape.assign_blocks(lengths)
        by_block = np.argsort(blocks, kind="stable")
        first_in_block = np.searchsorted(blocks[by_block], blocks[by_block])
        ends = np.cumsum(lengths[by_block])
        starts, numbers = np.empty_like(lengths), np.empty_like(lengths)
        starts[by_block] = ends - lengths[by_block] - (ends - lengths[by_block])[first_in_block]
        numbers[by_block] = np.arange(len(rows)) - first_in_block + 1
        assert (starts + lengths <= shape.length).all()
        first = np.zeros(self.size, dtype=np.int64)
        first[: len(rows)] = blocks * shape.length + starts
        source, owners, within = samples.token_positions(rows)
        to = first[owners] + within
        count = max(shape.rows, int(blocks.max(initial=0)) + 1)
        ids = np.full(count * shape.length, self.pad_id)
        positions = np.full_like(ids, self.first_position)
        segments, types = np.zeros_like(ids), np.zeros_like(ids)
        ids[to] = samples.token_ids[source]
        begins = np.arange(len(within)) - within
        positions[to] = packing.text_positions(ids[to], begins, self.first_position)
        segments[to] = numbers[owners]
        arrays = {"input_ids": ids, "position_ids": positions, "segments": segments}
        if self.typed:
            assert samples.types is not None
            types[to] = samples.types[source]
            arrays[TYPE_IDS] = types
        in_blocks = {name: array.reshape(count, -1) for name, array in arrays.items()}
        batch: Batch = {
            name: torch.from_numpy(a) for name, a in {**in_blocks, "first": first}.items()
        }
        if isinstance(shape, Row):
            batch["starts"] = torch.from_numpy(shape.starts(lengths, self.size))
            batch["longest"] = shape.longest
        return batch

    def describe(self) -> str:
        """Return the block shape."""
        if isinstance(self.shape, Row):
            return f"end to end in one row of {self.shape.length} tokens"
        blocks = "1 block" if self.shape.rows == 1 else f"{self.shape.rows} blocks"
        return f"packed into {blocks} of {self.shape.length} tokens"

    def computed_tokens(self, samples: Samples, rows: Rows) -> int:
        """Return the tokens of all blocks of the shape."""
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
        """Return input_ids, attention_mask and maybe token_type_ids [size, one of the lengths]."""
        length = self._length(samples, rows)
        ids = np.full((self.size, length), self.pad_id)
        mask, types = np.zeros_like(ids), np.zeros_like(ids)
        source, owners, within = samples.token_positions(rows)
        ids[owners, within] = samples.token_ids[source]
        mask[owners, within] = 1
        if self.typed:
            assert samples.types is not None
            types[owners, within] = samples.types[source]
        # A place without a sample repeats another sample, and its outputs are ignored: attention to
        # no token is NaN, and the heads of T5 and BART look for an end token in each row.
        if len(rows):
            for array in (ids, mask, types):
                array[len(rows) :] = array[0]
        elif len(samples.starts) > 1:
            return Padded.tensors(self, samples, np.array([samples.first]))
        else:
            mask[:, 0] = 1
        arrays = {"input_ids": ids, "attention_mask": mask}
        if self.typed:
            arrays[TYPE_IDS] = types
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _length(self, samples: Samples, rows: Rows) -> int:
        longest = int(samples.lengths[rows].max(initial=1))
        aligned = -(-longest // ALIGNMENT) * ALIGNMENT
        return next((length for length in self.lengths if length >= longest), aligned)

    def describe(self) -> str:
        """Return the lengths."""
        return f"padded to {' or '.join(map(str, self.lengths))} tokens"

    def computed_tokens(self, samples: Samples, rows: Rows) -> int:
        """Return the tokens of all rows."""
        return self.size * self._length(samples, rows)


@dataclass(frozen=True)
class CompositeLayout:
    """Base of layouts whose batches hold more tensors than those of their texts."""

    texts: Packed | Padded

    @property
    def balanced(self) -> bool:
        """Return whether batches need similar sums of tokens."""
        return self.texts.balanced

    def laid(self, samples: Samples, rows: Rows) -> tuple[Batch, Rows]:
        """Return the tensors of the texts, and where in the flattened tokens each text begins."""
        batch = self.texts.tensors(samples, rows)
        if "first" in batch:
            return batch, batch.pop("first").numpy()
        return batch, np.arange(self.texts.size) * batch["input_ids"].shape[1]

    def describe(self) -> str:
        """Return the shapes of the texts, for the log."""
        return self.texts.describe()

    def computed_tokens(self, samples: Samples, rows: Rows) -> int:
        """Return the tokens computed for the texts, padding included."""
        return self.texts.computed_tokens(samples, rows)


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
    """Samples in a batch of one process, at most."""
    accumulation: int = 1
    step_samples: int | None = None
    """Samples in a step of all processes; None for as many as their batches have room for."""
    seed: int = 0
    world: World = World()

    @property
    def samples_per_step(self) -> int:
        """Over all processes and accumulated batches; the last step of an epoch may have fewer."""
        return self.step_samples or self.size * self.world.processes * self.accumulation

    def steps(self) -> int:
        """Return the steps of an epoch, of the host that has the most rows per process."""
        shards = self.samples.shards
        if shards is None:
            return -(-len(self.samples) // self.samples_per_step)
        return max(
            -(-len(shards.rows(host)) // (self.size * len(shards.ranks(host)) * self.accumulation))
            for host in range(shards.hosts)
        )

    def epoch(self, epoch: int, balanced: bool) -> Epoch:
        """Return the batches of an epoch, without computing any other epoch.

        If the data is sharded over hosts, each host spreads its rows evenly over the steps, so that
        all hosts end together: a host with fewer rows than another adds fewer to each step.
        """
        lengths, shards = self.samples.lengths, self.samples.shards
        if shards is None:
            size = self.samples_per_step
            host_steps = [packing.steps(lengths, size, self.seed, epoch, balanced)]
            return Epoch(self, self.samples.draw_epoch(self.seed, epoch), host_steps, balanced)
        host_steps = []
        for host in range(shards.hosts):
            rows, seed = shards.rows(host), (self.seed, epoch, host)
            dealt = packing.spread(lengths[rows], self.steps(), seed, balanced)
            host_steps.append([rows[step] for step in dealt])
        return Epoch(self, self.samples.draw_epoch(self.seed, epoch), host_steps, balanced)

    def rows(self, epochs: int, balanced: bool) -> list[Rows]:
        """Return the rows of every batch of all processes in the first `epochs` epochs."""
        drawn = (self.epoch(epoch, balanced) for epoch in range(epochs))
        return [rows for epoch in drawn for batch in epoch for rows, _ in batch]

    def typical(self, balanced: bool) -> list[Rows]:
        """Return the rows of batches of all processes, from which a shape is chosen. These are the
        batches of the first epoch, or of its first portion if the data is large; the longest sample
        is included."""
        samples = self.samples
        if len(samples) <= packing.PORTION or type(samples) is not Samples or samples.shards:
            return self.rows(1, balanced)
        epoch = self.epoch(0, balanced)
        steps = max(1, packing.PORTION // self.samples_per_step)
        rows = [
            batch_rows for step in range(steps * self.accumulation) for batch_rows, _ in epoch[step]
        ]
        return [*rows, np.asarray([samples.lengths.argmax()])]


class Epoch:
    """The batches of an epoch: for each process its rows, and the weight of the step.

    A step is split over processes and accumulated batches when its first batch is requested.

    Args:
        host_steps: The rows of each step, by host if the data is sharded over hosts.
    """

    def __init__(
        self,
        training: Training,
        samples: Samples,
        host_steps: Sequence[Sequence[Rows]],
        balanced: bool,
    ) -> None:
        self._training, self._host_steps, self.balanced = training, host_steps, balanced
        self.samples = samples
        """The samples as this epoch masks or augments them."""
        self._split = functools.lru_cache(maxsize=1)(self._split_step)

    def __len__(self) -> int:
        return len(self._host_steps[0]) * self._training.accumulation

    def __getitem__(self, number: int) -> list[tuple[Rows, int]]:
        step, part = divmod(number, self._training.accumulation)
        processes = self._training.world.processes
        batches, weight = self._split(step)
        return [(rows, weight) for rows in batches[part * processes : (part + 1) * processes]]

    def __iter__(self) -> Iterator[list[tuple[Rows, int]]]:
        return (self[number] for number in range(len(self)))

    def _split_step(self, number: int) -> tuple[list[Rows], int]:
        """Return the rows of each batch: first the first accumulated batch of all processes."""
        training, steps = self._training, [steps[number] for steps in self._host_steps]
        samples, processes = self.samples, training.world.processes
        ranks = [list(range(processes))]
        if samples.shards is not None:
            ranks = [samples.shards.ranks(host) for host in range(samples.shards.hosts)]
        batches: list[Rows] = [np.empty(0, dtype=np.int64)] * (processes * training.accumulation)
        for step, step_ranks in zip(steps, ranks, strict=True):
            parts = len(step_ranks) * training.accumulation
            dealt = packing.split(step, samples.lengths, parts, training.size, self.balanced)
            for index, rows in enumerate(dealt):
                accumulated, process = divmod(index, len(step_ranks))
                batches[accumulated * processes + step_ranks[process]] = rows
        return batches, samples.weight(np.concatenate(steps))


class _EpochDataset(Dataset[Batch]):
    """The batches of one process, by (epoch, number)."""

    def __init__(self, training: Training, layout: Layout) -> None:
        self._training, self._layout = training, layout
        self._epoch = functools.lru_cache(maxsize=1)(training.epoch)

    def __len__(self) -> int:
        return len(self._training.samples)

    def __getitem__(self, key: tuple[int, int]) -> Batch:
        epoch, number = key
        drawn = self._epoch(epoch, self._layout.balanced)
        rows, total = drawn[number][self._training.world.rank]
        return finish(drawn.samples, self._layout, rows, self._training.size, total)


class _Numbers(BatchSampler):
    """(epoch, number) of each batch of an epoch."""

    def __init__(self, count: int) -> None:
        self._count, self._epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; the Trainer calls it as a method of the loader."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[list[Any]]:
        return iter([[(self._epoch, number)] for number in range(self._count)])


def training_loader(
    training: Training, layout: Layout, pin_memory: bool, workers: int = 0
) -> DataLoader[Batch]:
    """Return a loader of the batches of this process, one epoch after the other.

    It leaves the global random state to the model.
    """
    numbers = _Numbers(training.steps() * training.accumulation)
    loader: Any = DataLoader(
        _EpochDataset(training, layout),
        batch_sampler=numbers,
        collate_fn=itemgetter(0),
        generator=torch.Generator(),
        pin_memory=pin_memory,
        num_workers=workers,
    )
    loader.set_epoch = numbers.set_epoch
    return loader  # type: ignore[no-any-return]


def evaluation_batches(
    samples: Samples, layout: Layout, size: int, world: World
) -> Iterator[Batch]:
    """Yield this process's share of the batches of an evaluation; every process gets the same
    number.

    The batches do not depend on the number of processes, only their distribution does. If the data
    is sharded over hosts, the processes of a host compute its rows.
    """
    shards, none = samples.shards, np.empty(0, dtype=np.int64)
    if shards is None:
        batches = packing.ordered_batches(samples.lengths, size, layout.balanced)
        mine, count = batches[world.rank :: world.processes], -(-len(batches) // world.processes)
    else:
        mine, count = [], 0
        for host in range(shards.hosts):
            rows, ranks = shards.rows(host), shards.ranks(host)
            batches = [
                rows[batch]
                for batch in packing.ordered_batches(samples.lengths[rows], size, layout.balanced)
            ]
            count = max(count, -(-len(batches) // len(ranks)))
            if world.rank in ranks:
                mine = batches[ranks.index(world.rank) :: len(ranks)]
    weight = samples.weight(np.arange(len(samples)))
    for rows in [*mine, *[none] * (count - len(mine))]:
        yield finish(samples, layout, rows, size, weight)


def finish(samples: Samples, layout: Layout, rows: Rows, size: int, total: int) -> Batch:
    """Return a batch of the samples at `rows`, at most `size`: the model's inputs, and `labels`,
    `rows` and `total` (see the module's docstring).

    Args:
        total: The weight of the samples of the whole step.
    """
    labels = np.zeros((size, *samples.labels.shape[1:]), dtype=samples.labels.dtype)
    labels[: len(rows)] = samples.labels[rows]
    placed = np.full(size, -1)
    placed[: len(rows)] = rows
    return {
        **layout.tensors(samples, rows),
        "labels": torch.from_numpy(labels),
        "rows": torch.from_numpy(placed),
        # A Python number would become a constant of the graph, so that another value needs another
        # graph. torch-xla does the same with a tensor without dimensions that is 1.
        "total": torch.tensor([float(total)]),
    }
