"""Batches of data that is made tokens while it is trained on, a portion of its rows at a time.

The rows are dealt to portions at random, so that each portion is a sample of all rows. A portion is
planned as an epoch of its rows is, and portions follow each other in an order drawn anew for each
epoch. What a step has is a pure function of the data, the seed, the epoch, and the step's number;
how quickly tokens are made decides only how long somebody waits.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from recipe.batching.batches import Epoch, Samples, Training
from recipe.batching.packing import PORTION, Rows, permuted

_DEALT, _ORDERED = 1, 2
_NUMBERS = 32
"""Bits of a sample's number in its portion; those above are the portion's."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which rows each portion has, and which portions follow each other."""

    rows: int
    """Of the data, one at least."""
    size: int
    """Rows of a portion; the last one may have fewer."""
    seed: int

    def __post_init__(self) -> None:
        if not 0 < self.size <= PORTION:
            raise ValueError(f"portions of {self.size} rows")

    @property
    def count(self) -> int:
        """How many portions there are."""
        return -(-self.rows // self.size)

    def rows_of(self, portion: int) -> Rows:
        """The numbers of a portion's rows, ascending."""
        end = min(self.rows, (portion + 1) * self.size)
        return np.sort(permuted(portion * self.size, end, self.rows, (self.seed, _DEALT)))

    def order(self, epoch: int) -> Rows:
        """The portions as they follow each other in an epoch: in the first one as they are
        numbered, the one with fewer rows always last."""
        if epoch == 0:
            return np.arange(self.count)
        random = np.random.default_rng((self.seed, _ORDERED, epoch))
        return np.append(random.permutation(self.count - 1), self.count - 1)

    def at(self, place: int) -> tuple[int, int]:
        """The epoch and the portion at a place in the order of all portions of all epochs."""
        epoch, within = divmod(place, self.count)
        return epoch, int(self.order(epoch)[within])

    def rows_in(self, portion: int) -> int:
        """How many rows a portion has."""
        return min(self.size, self.rows - portion * self.size)

    def named(self, portion: int, numbers: Sequence[int]) -> str:
        """Some rows of a portion, by their numbers in it, in words."""
        rows = ", ".join(map(str, self.rows_of(portion)[list(numbers)].tolist()))
        return f"the rows {rows} of the training data, counted from 0"

    def key(self) -> list[int]:
        """Tells it apart from other plans."""
        return [self.rows, self.size, self.seed]


@dataclass(frozen=True, kw_only=True)
class FilePlan:
    """As `Plan`, of portions that are files, each with the rows that are in them."""

    files: Sequence[Sequence[str]]
    """The names of each portion's."""
    sizes: Sequence[int]
    """Rows of each portion; 0 where nobody knows."""
    seed: int

    @property
    def count(self) -> int:
        """How many portions there are."""
        return len(self.files)

    @property
    def rows(self) -> int:
        """Of the data."""
        return sum(self.sizes)

    def order(self, epoch: int) -> Rows:
        """The portions as they follow each other in an epoch: in the first one as they are
        numbered."""
        if epoch == 0:
            return np.arange(self.count)
        return np.random.default_rng((self.seed, _ORDERED, epoch)).permutation(self.count)

    def at(self, place: int) -> tuple[int, int]:
        """The epoch and the portion at a place in the order of all portions of all epochs."""
        epoch, within = divmod(place, self.count)
        return epoch, int(self.order(epoch)[within])

    def rows_in(self, portion: int) -> int:
        """How many rows a portion has, where that is known."""
        return self.sizes[portion]

    def named(self, portion: int, numbers: Sequence[int]) -> str:
        """Some rows of a portion, by their numbers in it, in words."""
        listed = ", ".join(map(str, numbers))
        return f"the rows {listed}, counted from 0, of {', '.join(self.files[portion])}"

    def key(self) -> list[int]:
        """Tells it apart from other plans of these files."""
        return [*self.sizes, self.seed]


class Portions(Protocol):
    """Where the samples of portions are read."""

    @property
    def plan(self) -> Plan | FilePlan: ...

    @property
    def one_each(self) -> bool:
        """Whether each row is one sample."""

    def samples(self, place: int) -> int:
        """How many samples the portion at a place has; may wait until that is known."""

    def read(self, place: int) -> Samples:
        """The samples of the portion at a place; waits until they are made."""

    def made(self) -> list[Samples]:
        """The samples of the portions that are made by now, one at least."""

    def records(self) -> bytes:
        """What is known of the portions that were made, as a checkpoint keeps it."""

    def expect(self, records: bytes) -> None:
        """See that portions are as a checkpoint's `records` say, from now on."""


@dataclass(frozen=True)
class Announced(Samples):
    """What is known of data before it is made tokens: its rows and, if the task has any, labels."""

    digest: str
    """Tells the data, how it is made tokens, and its portions apart from others."""
    portions: Portions

    @classmethod
    def by(cls, labels: Rows, digest: str, portions: Portions) -> Announced:
        """Rows with these labels, [rows, ...], and no token yet."""
        return cls(np.empty(0, np.int32), np.zeros(1, np.int64), labels, digest, portions)

    def __len__(self) -> int:
        return len(self.labels)

    def fingerprint(self) -> str:
        """What tells this data apart from other data."""
        return self.digest


class Later:
    """A data set of which nobody needs the tokens yet.

    Args:
        rows: How many it has.
        digest: Tells the data, and how it is made tokens, apart from others.
        make: Gives its samples; asked once, when they are first needed.
    """

    def __init__(self, rows: int, digest: str, make: Callable[[], Samples]) -> None:
        self._rows, self._digest, self._make = rows, digest, make

    def __len__(self) -> int:
        return self._rows

    def fingerprint(self) -> str:
        """What tells this data apart from other data."""
        return self._digest

    @functools.cached_property
    def samples(self) -> Samples:
        """Its samples; waits until they are made."""
        return self._make()


def needed(samples: Samples | Later) -> Samples:
    """The samples of a data set whose tokens are needed now."""
    return samples.samples if isinstance(samples, Later) else samples


class Needed(Mapping[str, Samples]):
    """Data sets by name, of which each is waited for when it is looked up."""

    def __init__(self, every: Mapping[str, Samples | Later]) -> None:
        self._every = every

    def __getitem__(self, name: str) -> Samples:
        return needed(self._every[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._every)

    def __len__(self) -> int:
        return len(self._every)


@dataclass(frozen=True, kw_only=True)
class Streamed(Training):
    """Batches of a training on portions."""

    portions: Portions
    limit: int | None = None
    """Steps of the whole run, where a row may become several samples or none: the steps of an epoch
    are not known then, and the whole run counts as one."""

    def steps(self) -> int:
        """Optimizer steps of an epoch, which has one shorter step for each portion at most."""
        if self.limit is not None:
            return self.limit
        plan = self.portions.plan
        return sum(-(-plan.rows_in(each) // self.samples_of_a_step) for each in range(plan.count))

    def epoch(self, epoch: int, balanced: bool) -> Epoch:
        """The batches of an epoch; a portion is waited for when its first batch is asked for."""
        return _StreamedEpoch(self, epoch, balanced)

    def first_part(self) -> Training:
        """That on the first portion."""
        return self.part(0)

    def part(self, place: int) -> Training:
        """The training on the portion at a place in the order of all."""
        _, portion = self.portions.plan.at(place)
        seed = np.random.SeedSequence((self.seed, portion)).generate_state(1)[0]
        return Training(
            samples=self.portions.read(place),
            size=self.size,
            accumulation=self.accumulation,
            at_once=self.at_once,
            seed=int(seed),
            world=self.world,
        )

    def named(self, numbers: Sequence[int]) -> str:
        """Which rows those of a batch are, in words."""
        portion, own = 0, [number & ((1 << _NUMBERS) - 1) for number in numbers]
        if numbers:
            portion = numbers[0] >> _NUMBERS
        if self.limit is not None:
            listed = ", ".join(map(str, own))
            return f"the samples {listed} of portion {portion} of the training data, from 0"
        return self.portions.plan.named(portion, own)

    def epoch_lengths(self) -> Rows:
        """Tokens of as many samples as an epoch has: of the portions made by now, repeated for
        those that are not."""
        lengths = np.concatenate([each.text_lengths for each in self.portions.made()])
        count = self.portions.plan.rows
        if self.limit is not None:
            count = self.limit * self.samples_of_a_step
        return np.resize(lengths, count)


class _StreamedEpoch(Epoch):
    """The batches of an epoch (or, of samples whose number is not known, of the whole run)."""

    def __init__(self, training: Streamed, epoch: int, balanced: bool) -> None:
        super().__init__(training, training.samples, [], balanced)
        self._streamed = training
        before = 0 if training.limit is not None else epoch
        self._first_place = before * training.portions.plan.count
        self._firsts = [0]
        """The number of the first step of each portion that was looked at, and of the next one."""
        self._part = functools.lru_cache(maxsize=2)(self._read)

    def __len__(self) -> int:
        return self._streamed.steps() * self._streamed.accumulation

    def __getitem__(self, number: int) -> list[tuple[Rows, int]]:
        place, own = self._locate(number)
        return self._part(place)[0][own]

    def of(self, number: int, rank: int) -> tuple[Samples, Rows, int, int]:
        """See `Epoch.of`; numbers of rows begin with the number of the portion."""
        place, own = self._locate(number)
        drawn, portion = self._part(place)
        samples, rows, total, _ = drawn.of(own, rank)
        return samples, rows, total, portion << _NUMBERS

    def _locate(self, number: int) -> tuple[int, int]:
        """The place of the portion that a batch is of, and the batch's number there."""
        training = self._streamed
        step, part = divmod(number, training.accumulation)
        while self._firsts[-1] <= step:
            place = self._first_place + len(self._firsts) - 1
            samples = training.portions.samples(place)
            self._firsts.append(self._firsts[-1] - (-samples // training.samples_of_a_step))
        at = bisect_right(self._firsts, step) - 1
        return self._first_place + at, (step - self._firsts[at]) * training.accumulation + part

    def _read(self, place: int) -> tuple[Epoch, int]:
        epoch, portion = self._streamed.portions.plan.at(place)
        return self._streamed.part(place).epoch(epoch, self.balanced), portion
