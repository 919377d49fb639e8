"""Batches of portions: what a step has is told by numbers alone."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from recipe.batching.batches import Padded, Samples, Training, World, finish, training_loader
from recipe.batching.packing import Shape
from recipe.batching.portions import Announced, Plan, Streamed

_ALONE = World()


class _Known:
    """Portions whose samples are there: of each row as many as `pieces` says."""

    def __init__(self, plan: Plan, pieces: Sequence[int]) -> None:
        self.plan, self._pieces = plan, np.asarray(pieces)
        self.one_each = bool((self._pieces == 1).all())
        self.asked: list[int] = []

    def read(self, place: int) -> Samples:
        self.asked.append(place)
        rows = self.plan.rows_of(self.plan.at(place)[1])
        owners = np.repeat(rows, self._pieces[rows])
        lengths = 2 + owners % 7
        starts = np.concatenate([[0], np.cumsum(lengths)])
        # Each token is the number of its row.
        return Samples(np.repeat(owners, lengths), starts, owners)

    def samples(self, place: int) -> int:
        return int(self._pieces[self.plan.rows_of(self.plan.at(place)[1])].sum())

    def made(self) -> list[Samples]:
        return [self.read(0)]

    def records(self) -> bytes:
        return b"{}"

    def expect(self, records: bytes) -> None:
        raise AssertionError


def _streamed(
    rows: int, size: int, pieces: Sequence[int] | None = None, limit: int | None = None,
    samples: int = 6, world: World = _ALONE, accumulation: int = 1,
) -> Streamed:  # fmt: skip
    plan = Plan(rows=rows, size=size, seed=5)
    portions = _Known(plan, [1] * rows if pieces is None else pieces)
    return Streamed(
        samples=Announced.by(np.arange(rows), "digest", portions),
        portions=portions,
        limit=limit,
        size=samples // world.processes // accumulation,
        at_once=samples,
        accumulation=accumulation,
        seed=3,
        world=world,
    )


def _steps(training: Training, epoch: int) -> list[list[int]]:
    """The rows of the data in each step, of all its processes, sorted."""
    drawn, processes = training.epoch(epoch, balanced=True), training.world.processes
    steps = []
    for step in range(training.steps()):
        rows_of_step = []
        for part, rank in itertools.product(range(training.accumulation), range(processes)):
            samples, rows, _, _ = drawn.of(step * training.accumulation + part, rank)
            rows_of_step += samples.labels[rows].tolist()
        steps.append(sorted(rows_of_step))
    return steps


@pytest.mark.parametrize(("rows", "size"), [(100, 18), (100, 20), (7, 18), (36, 18), (1, 1)])
def test_an_epoch_has_each_row_once(rows: int, size: int) -> None:
    training = _streamed(rows, size)
    orders = [_steps(training, epoch) for epoch in range(3)]
    for steps in orders:
        assert sorted(itertools.chain(*steps)) == list(range(rows))
        # Fewer only where a portion ends, and never none.
        assert all(len(step) == 6 for step in steps) or (size % 6 or rows % 6)
        assert all(steps)
    if rows == 100:
        assert orders[0] != orders[1] != orders[2] != orders[0]
        assert _steps(training, 1) == orders[1]
    assert len(training_loader(training, Padded((8,), 6, 0), pin_memory=False)) == len(orders[0])


@pytest.mark.parametrize(("processes", "accumulation"), [(1, 2), (2, 1), (3, 1), (3, 2), (2, 3)])
def test_the_samples_of_a_step_are_those_of_any_world(processes: int, accumulation: int) -> None:
    alone = _streamed(70, 25, samples=12)
    cut = _streamed(70, 25, samples=12, world=World(processes=processes), accumulation=accumulation)
    for epoch in range(2):
        assert _steps(cut, epoch) == _steps(alone, epoch)


def test_the_first_portion_is_a_sample_of_all_rows() -> None:
    plan = Plan(rows=100_000, size=10_000, seed=1)
    dealt = [plan.rows_of(portion) for portion in range(plan.count)]
    assert np.array_equal(np.sort(np.concatenate(dealt)), np.arange(plan.rows))
    # A tenth of each tenth of the file, give or take five standard deviations.
    shares = [np.bincount(rows // 10_000, minlength=10) for rows in dealt]
    assert abs(np.asarray(shares) - 1_000).max() < 5 * 30
    assert [plan.at(place)[1] for place in range(10)] == list(range(10))
    later = [plan.at(place) for place in range(10, 30)]
    assert sorted(portion for epoch, portion in later if epoch == 1) == list(range(10))
    assert later[9] == (1, 9)
    assert [portion for _, portion in later[:10]] != [portion for _, portion in later[10:]]


def test_samples_of_an_unknown_number_are_each_drawn_once_in_a_pass() -> None:
    pieces = [0, 1, 2, 3, 1] * 12
    training = _streamed(60, 13, pieces, limit=50)
    assert training.steps() == 50
    steps = [step for step in _steps(training, 0) if step]
    seen: list[int] = []
    wanted = np.repeat(np.arange(60), pieces).tolist()
    while len(seen) < len(wanted):
        seen += steps.pop(0)
    # A pass ends with a step, as each portion does; what follows is the next pass.
    assert sorted(seen) == wanted
    seen = []
    while len(seen) < len(wanted):
        seen += steps.pop(0)
    assert sorted(seen) == wanted


def test_a_portion_is_read_when_its_first_step_is_asked_for() -> None:
    training = _streamed(100, 20)
    known = training.portions
    assert isinstance(known, _Known)
    drawn = training.epoch(0, balanced=True)
    for number in range(4):
        drawn.of(number, 0)
    assert known.asked == [0]
    drawn.of(4, 0)
    assert known.asked == [0, 1]
    # A job that goes on in the fourth portion reads no other one.
    known.asked.clear()
    training.epoch(1, balanced=True).of(3 * 4 + 1, 0)
    assert known.asked == [5 + 3]


def test_the_rows_of_a_batch_are_named_as_those_of_the_data() -> None:
    training = _streamed(100, 20)
    drawn = training.epoch(0, balanced=True)
    samples, rows, total, first = drawn.of(9, 0)
    batch = finish(samples, Padded((8,), 6, 0), rows, 6, total, first)
    numbers = [number for number in batch["rows"].tolist() if number >= 0]
    listed = ", ".join(map(str, samples.labels[rows].tolist()))
    assert training.named(numbers) == f"the rows {listed} of the training data, counted from 0"
    limited = dataclasses.replace(training, limit=9)
    listed = ", ".join(map(str, rows.tolist()))
    assert limited.named(numbers) == (
        f"the samples {listed} of portion {first >> 32} of the training data, from 0"
    )


def test_a_sample_longer_than_those_of_the_first_portion_has_a_place() -> None:
    shape = Shape(6, 40)
    assert shape.fitting(np.asarray([40, 3])) == shape
    lengths = np.asarray([90, 3, 3, 30])
    longer = shape.fitting(lengths)
    assert longer == Shape(2, 160)
    assert longer.place(lengths).max() < 2
    layout = Padded((8, 16), 4, 0)
    samples = Samples(np.arange(30), np.asarray([0, 21, 30]), np.zeros(2, int))
    batch = layout.tensors(samples, np.arange(2))
    assert batch["input_ids"].shape == (4, 24)
    assert batch["attention_mask"].sum(1).tolist() == [21, 9, 21, 21]


def test_portions_that_cannot_be_planned_are_refused() -> None:
    with pytest.raises(ValueError, match="portions of 0 rows"):
        Plan(rows=5, size=0, seed=0)
    with pytest.raises(ValueError, match="portions of 2097153 rows"):
        Plan(rows=5, size=(1 << 21) + 1, seed=0)
