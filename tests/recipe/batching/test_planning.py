"""Planning: what any plan of batches holds to, how full it is, and that its cost is linear."""

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as some

from recipe.batching import batches, flat, packing
from recipe.batching.batches import Batch, Layout, Packed, Padded, Training, World
from recipe.batching.document_batches import DocumentLayout, Documents
from recipe.batching.packing import Rows, Shape
from recipe.batching.samples import Samples, sharded
from recipe.data.layout.shards import Hosts
from recipe.errors import CheckpointError
from recipe.storage import checkpoints
from recipe.storage.checkpoints import Checkpoint
from tests.support.packed_batches import PAD, documents_of, engine, samples_of

LENGTHS = some.one_of(
    some.lists(some.integers(1, 70), min_size=1, max_size=300),
    # All of one length; one giant among tiny ones; a few of many lengths, as documents have them.
    some.builds(lambda length, count: [length] * count, some.integers(1, 90), some.integers(1, 300)),
    some.builds(lambda giant, count: [2] * count + [giant], some.integers(3, 2000),
                some.integers(1, 300)),
    some.lists(some.sampled_from([1, 3, 8, 40, 300, 512]), min_size=1, max_size=200),
)  # fmt: skip


def processes_of(parts: Sequence[Samples], host_of: Sequence[int]) -> list[Any]:
    """The samples as each process has them, on hosts that have one part each."""
    names = tuple(f"algo-{host}" for host in host_of)
    exchanged = [(np.diff(part.starts), part.labels, part.fingerprint()) for part in parts]
    results = []
    for rank, host in enumerate(host_of):
        hosts = Hosts(process_hosts=names, rank=rank)
        object.__setattr__(hosts, "gather", lambda value: exchanged)
        results.append(sharded(parts[host], hosts))
    return results


def drawn(seed: int, count: int, kind: str) -> Rows:
    """Lengths as data has them."""
    random = np.random.default_rng(seed)
    values = {
        "tweets": lambda: random.normal(28, 12, count),
        "documents": lambda: np.exp(random.normal(5.3, 1.0, count)),
        "uniform": lambda: random.integers(1, 512, count),
    }[kind]()
    return np.clip(values, 3, 80 if kind == "tweets" else 1024).astype(np.int64)


@settings(max_examples=40)
@given(
    LENGTHS,
    some.one_of(some.integers(1, 48), some.sampled_from([64, 100, 255, 1024, 4096])),
    some.booleans(),
    some.integers(0, 2**32 - 1),
    some.integers(0, 3),
)
@example([5] * 97, 32, True, 0, 0)
@example([5, 9] * 16, 32, True, 0, 0)
def test_each_sample_is_once_in_an_epoch_and_a_plan_is_a_function_of_its_arguments(
    lengths: list[int], size: int, balanced: bool, seed: int, epoch: int
) -> None:
    sample_losses = np.asarray(lengths)
    first, again = (packing.steps(sample_losses, size, seed, epoch, balanced) for _ in range(2))
    assert [step.tolist() for step in first] == [step.tolist() for step in again]
    evaluated = packing.ordered_batches(sample_losses, size, balanced)
    for plan in (first, evaluated):
        assert sorted(np.concatenate(plan).tolist()) == list(range(len(lengths)))
    full, rest = divmod(len(lengths), size)
    assert [len(step) for step in first] == [size] * full + [rest] * (rest > 0)
    assert sorted(map(len, evaluated)) == sorted(map(len, first))


@settings(max_examples=40)
@given(
    LENGTHS, some.integers(1, 40), some.sampled_from([1, 2, 3, 8]), some.integers(1, 3),
    some.booleans(),
)  # fmt: skip
def test_processes_and_accumulated_batches_share_the_steps_of_one_process(
    lengths: list[int], size: int, processes: int, accumulation: int, balanced: bool
) -> None:
    samples = samples_of(lengths)
    shared = batches.Training(
        samples=samples, size=size, accumulation=accumulation, seed=3,
        world=World(processes=processes),
    )  # fmt: skip
    whole = batches.Training(samples=samples, size=size * processes * accumulation, seed=3)
    one, many = whole.epoch(1, balanced), shared.epoch(1, balanced)
    assert len(many) == len(one) * accumulation
    for number, ((rows, total),) in enumerate(one):
        first = number * accumulation
        parts = [part for index in range(accumulation) for part in many[first + index]]
        assert len(parts) == processes * accumulation
        assert all(len(part) <= size and weight == total for part, weight in parts)
        assert sorted(row for part, _ in parts for row in part) == sorted(rows)


@pytest.mark.parametrize("kind", ["tweets", "documents"])
@pytest.mark.parametrize("processes", [2, 8])
def test_processes_have_like_sums_of_tokens(kind: str, processes: int) -> None:
    lengths = drawn(0, 3000, kind)
    worst = []
    for step in packing.steps(lengths, 32 * processes, 1, 0, True)[:-1]:
        parts = packing.split(step, lengths, processes, 32, True)
        sums = [int(lengths[part].sum()) for part in parts]
        worst.append(max(sums) / np.mean(sums))
    assert np.mean(worst) < 1.02


@settings(max_examples=30)
@given(LENGTHS, some.integers(1, 40), some.integers(0, 5))
def test_every_batch_of_every_epoch_has_the_first_one_s_shape_or_blocks_more(
    lengths: list[int], size: int, epoch: int
) -> None:
    samples = samples_of(lengths)
    training = batches.Training(samples=samples, size=size, seed=1)
    of_first = [samples.lengths[rows] for rows in training.rows(1, True)]
    layout = Packed(packing.shape(of_first), size, PAD, 0)
    assert all(layout.shape.holds(step) for step in of_first)
    for ((rows, _),) in training.epoch(epoch, True):
        batch = layout.tensors(samples, rows)
        assert batch["input_ids"].shape[0] >= layout.shape.rows
        assert batch["input_ids"].shape[1] == layout.shape.length


@pytest.mark.parametrize("kind", ["tweets", "documents", "uniform"])
@pytest.mark.parametrize("size", [4, 32, 1024])
def test_later_epochs_hardly_ever_need_another_shape(kind: str, size: int) -> None:
    lengths = drawn(1, 4096, kind)
    shape = packing.shape([lengths[step] for step in packing.steps(lengths, size, 5, 0, True)])
    later = [step for epoch in (1, 2) for step in packing.steps(lengths, size, 5, epoch, True)]
    needed = [int(shape.assign_blocks(lengths[step]).max()) + 1 for step in later]
    assert sum(step > shape.rows for step in needed) <= len(needed) // 50
    assert max(needed) <= shape.rows + 1


def test_a_batch_without_room_gets_a_block_more_and_nothing_is_cut() -> None:
    samples = samples_of([60, 60, 60, 3])
    batch = Packed(Shape(2, 64), 4, PAD, 0).tensors(samples, np.arange(4))
    assert batch["input_ids"].shape == (3, 64)
    assert int((batch["input_ids"] != PAD).sum()) == 183
    with pytest.raises(ValueError, match="a sample of 60 tokens in blocks of 32"):
        Shape(9, 32).assign_blocks(samples.lengths)


@pytest.mark.parametrize(("kind", "size", "share"), [
    *((kind, size, 0.95) for kind in ("tweets", "documents", "uniform") for size in (64, 2048)),
    # What laying out every batch in every shape (quadratic) gave of small batches.
    ("tweets", 8, 0.966), ("documents", 8, 0.970), ("documents", 32, 0.987), ("uniform", 8, 0.960),
])  # fmt: skip
def test_as_many_tokens_are_real_as_before(kind: str, size: int, share: float) -> None:
    lengths = drawn(1, 4096, kind)
    steps = packing.steps(lengths, size, 5, 0, True)
    shape = packing.shape([lengths[step] for step in steps])
    assert lengths.sum() / (len(steps) * shape.tokens) > share - 0.01


def test_samples_meet_others_in_each_epoch() -> None:
    """Of those who shared a step of 64, about as many as by chance share one again."""
    lengths = drawn(3, 4096, "documents")
    with_whom = []
    for epoch in range(2):
        step_of = np.empty(len(lengths), dtype=int)
        for number, step in enumerate(packing.steps(lengths, 64, 5, epoch, True)):
            step_of[step] = number
        with_whom.append(step_of[:, None] == step_of)
    other_seed, first = (packing.steps(lengths, 64, seed, 0, True)[0] for seed in (6, 5))
    assert set(other_seed) != set(first)
    again = (with_whom[0] & with_whom[1]).sum() - len(lengths)
    assert again / (with_whom[0].sum() - len(lengths)) < 3 * 64 / 4096


@settings(max_examples=25)
@given(some.lists(some.integers(2, 60), min_size=1, max_size=60), some.integers(1, 9))
def test_each_learned_token_has_its_place_also_where_there_are_more(
    lengths: list[int], size: int
) -> None:
    def learned_once(documents: Documents, rows: Rows, batch: dict[str, Any], most: int) -> None:
        real = batch["targets"] >= 0
        assert len(real) >= most
        assert int(real.sum()) == documents.weight(rows)
        ids = batch["input_ids"].flatten()
        assert (ids[batch["positions"][real] + 1] == batch["targets"][real]).all()
        for index, row in enumerate(rows):
            tokens = documents.successors(row)[1].tolist()
            assert batch["targets"][real & (batch["owners"] == index)].tolist() == tokens

    documents = documents_of(lengths)
    for rows in packing.steps(documents.lengths, size, 0, 0, True):
        for most in (1, documents.weight(rows), documents.weight(rows) + 5):
            of_rows = [documents.lengths[rows]]
            for layout in (
                DocumentLayout(Packed(packing.shape(of_rows), size, PAD, 0), most),
                DocumentLayout(Padded(packing.buckets(of_rows), size, PAD), most),
            ):
                learned_once(documents, rows, layout.tensors(documents, rows), most)


def test_padding_is_that_of_the_best_lengths() -> None:
    """Of all choices of at most four lengths, tried one by one."""
    random = np.random.default_rng(0)
    for _ in range(20):
        of_steps = [random.integers(1, 40, 3) for _ in range(random.integers(1, 12))]
        tops = sorted({-(-int(step.max()) // 4) * 4 for step in of_steps})

        def computed_tokens(chosen: tuple[int, ...], of_steps: Any = of_steps) -> int:
            return sum(min(c for c in chosen if c >= step.max()) for step in of_steps)

        every = [
            chosen
            for count in range(1, 5)
            for chosen in itertools.combinations(tops, count)
            if chosen[-1] == tops[-1]
        ]
        assert computed_tokens(packing.buckets(of_steps)) == min(map(computed_tokens, every))


def test_a_checkpoint_of_another_plan_is_refused(tmp_path: Path) -> None:
    job = dict(engine(tmp_path).job)
    checkpoints.check_same(Checkpoint(tmp_path, job, False), job)
    name = "version of the plan of batches"
    assert job[name] == packing.VERSION
    for version in (None, packing.VERSION + 1):
        with pytest.raises(CheckpointError, match=rf"{name} was .* and is"):
            checkpoints.check_same(Checkpoint(tmp_path, {**job, name: version}, False), job)


@pytest.mark.parametrize("count", [1, 3, 64, 1_001])
def test_any_part_of_a_random_order_is_that_of_the_whole(count: int) -> None:
    whole = packing.permuted(0, count, count, (3, 1))
    assert np.sort(whole).tolist() == list(range(count))
    cuts = [*range(0, count, 7), count]
    parts = [packing.permuted(*cut, count, (3, 1)) for cut in itertools.pairwise(cuts)]
    assert np.array_equal(np.concatenate(parts), whole)
    if count > 60:
        assert not np.array_equal(packing.permuted(0, count, count, (3, 2)), whole)
        # What is near by does not stay near by, and no place is preferred.
        assert np.abs(np.diff(whole)).mean() == pytest.approx(count / 3, rel=0.25)
        assert abs(np.corrcoef(np.arange(count), whole)[0, 1]) < 0.25


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("size", [1, 48])
def test_a_large_epoch_is_planned_as_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, balanced: bool, size: int
) -> None:
    monkeypatch.setattr(packing, "PORTION", 500)
    lengths = np.clip(np.random.default_rng(0).lognormal(3, 0.7, 4_321), 3, 128).astype(np.uint8)
    lengths[4_000] = 250
    planned: list[int] = []
    plan = packing._planned

    def watched(order: Any, *others: Any) -> Any:
        planned.append(len(order))
        return plan(order, *others)

    monkeypatch.setattr(packing, "_planned", watched)
    steps = packing.steps(lengths, size, 0, 1, balanced)
    assert planned == [] and len(steps) == -(-4_321 // size)
    in_order = list(steps)
    assert len(planned) == -(-4_321 // (500 // size * size)), "each portion once"
    assert np.sort(np.concatenate(in_order)).tolist() == list(range(4_321))
    assert {len(step) for step in in_order[:-1]} == {size}
    # A training that is resumed asks for no step before.
    planned.clear()
    again = packing.steps(lengths, size, 0, 1, balanced)
    for index in (len(steps) - 1, len(steps) // 2, len(steps) // 2 + 1):
        assert np.array_equal(again[index], in_order[index])
    assert len(planned) <= 3
    other = packing.steps(lengths, size, 0, 2, balanced)
    assert not np.array_equal(np.concatenate([other[0], other[1]]),
                              np.concatenate(in_order[:2]))  # fmt: skip
    if balanced and size == 48:
        tokens = np.asarray([int(lengths[step].astype(int).sum()) for step in in_order[:-1]])
        assert np.ptp(tokens) / tokens.mean() < 0.25


def test_the_shape_of_a_large_epoch_takes_its_longest_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = np.random.default_rng(0).integers(3, 40, 3_000)
    lengths[2_900] = 120
    samples = samples_of(lengths)
    monkeypatch.setattr(packing, "PORTION", 400)
    trainings = [
        batches.Training(samples=samples, size=16 // count, world=World(processes=count))
        for count in (1, 2)
    ]
    for training in trainings:
        drawn = training.typical(True)
        assert sum(map(len, drawn)) == 400 // 16 * 16 + 1
        shape = packing.shape([lengths[rows] for rows in drawn])
        assert shape.length >= 120
        for rows in training.rows(1, True):
            shape.assign_blocks(lengths[rows])  # raises where there is no place
    of_steps = [
        [np.sort(np.concatenate([rows for rows, _ in batch])) for batch in training.epoch(0, True)]
        for training in trainings
    ]
    assert all(map(np.array_equal, *of_steps)), "the same steps for any number of processes"


def test_documents_weigh_the_same_on_every_host_and_only_one_has_the_tokens() -> None:
    starts = np.asarray([0, 3, 5])
    learned = np.asarray([False, True, True, False, True])
    local_documents = Documents(np.arange(5), starts, np.asarray([2, 1]), learned)
    none = Documents(np.empty(0), np.zeros(1, dtype=int), np.empty(0, dtype=int), np.empty(0))
    both = processes_of((local_documents, none), (0, 1))
    assert [documents.weight(np.asarray([0, 1])) for documents in both] == [3, 3]
    assert both[0].successors(1)[1].tolist() == [4]
    assert isinstance(both[1], Documents)
    with pytest.raises(IndexError, match="on another host"):
        both[1].tokens(0)
    with pytest.raises(IndexError, match="on another host"):
        both[1].token_positions(np.asarray([1, 0]))


def test_64_hosts_of_8_processes_have_like_many_tokens_in_each_step() -> None:
    rows, host_of = 3_000, [host for host in range(64) for _ in range(8)]
    # Every host has the same lengths, in an order of its own, and the last one a tenth fewer rows.
    lengths = np.clip(np.random.default_rng(0).lognormal(3, 0.7, rows), 3, 128).astype(np.uint8)
    parts = []
    for host in range(64):
        local_lengths = np.random.default_rng(host).permutation(lengths)[
            : rows - (host == 63) * rows // 10
        ]
        labels = np.zeros(len(local_lengths), dtype=np.int64)
        parts.append(Samples(np.zeros(0), np.cumsum([0, *local_lengths]), labels))
    samples = processes_of(parts, host_of)[0]
    training = batches.Training(samples=samples, size=32, world=World(processes=len(host_of)))
    epoch = training.epoch(0, True)
    seen = np.zeros(len(samples), dtype=int)
    for number in range(len(epoch)):
        parts = [part for part, _ in epoch[number]]
        np.add.at(seen, np.concatenate(parts), 1)
        tokens = np.asarray([samples.lengths[part].sum() for part in parts[: 63 * 8]])
        assert tokens.max() <= 1.02 * tokens.mean()
    assert (seen == 1).all()


@settings(max_examples=25)
# The rows of each host, and how many processes it has.
# Tokens of a row from 2 on, so that padding is none; then its label, which tells the row.
@given(
    some.lists(
        some.tuples(
            some.lists(some.lists(some.integers(2, 99), min_size=1, max_size=15), max_size=20),
            some.integers(1, 3),
        ),
        min_size=1,
        max_size=3,
    ).filter(lambda hosts: any(rows for rows, _ in hosts)),
    some.integers(1, 6),
    some.integers(1, 3),
    some.sampled_from(["blocks", "one row", "padded"]),
    some.integers(0, 2),
)
def test_every_row_is_in_one_batch_of_an_epoch_and_of_an_evaluation(
    hosts: list[tuple[list[list[int]], int]], size: int, accumulation: int, kind: str, epoch: int
) -> None:
    def tokenized(rows: Sequence[list[int]], first: int) -> Samples:
        """Samples of rows whose token types follow from their ids."""
        ids = np.array([token for row in rows for token in row], np.int32)
        starts = np.cumsum([0, *map(len, rows)])
        labels = np.arange(first, first + len(rows))
        return Samples(ids, starts, labels, types=(ids % 2).astype(np.int8))

    def rows_of(batch: Batch) -> list[tuple[int, int, list[int]]]:
        """The row number, label and tokens of each sample of a batch, after checks of its other tensors."""
        ids, types = batch["input_ids"].flatten(), batch["token_type_ids"].flatten()
        width = batch["input_ids"].shape[1]
        is_padded = "attention_mask" in batch
        firsts = range(0, len(ids), width) if is_padded else batch["first"].tolist()
        mask = batch["attention_mask" if is_padded else "segments"].flatten()
        results = []
        for first, row, label in zip(
            firsts, batch["rows"].tolist(), batch["labels"].tolist(), strict=True
        ):
            if row < 0:  # a place without a sample repeats the first one
                assert not is_padded or (ids[first : first + width] == ids[:width]).all()
                continue
            end = first // width * width + width
            count = int((mask[first:end] == mask[first]).long().cumprod(0).sum())
            tokens = ids[first : first + count]
            assert (types[first : first + count] == tokens % 2).all()
            if not is_padded:
                assert batch["position_ids"].flatten()[first : first + count].tolist() == list(
                    range(count)
                )
            results.append((row, label, tokens.tolist()))
        used = sum(len(tokens) for *_, tokens in results)
        assert is_padded or int((ids != PAD).sum()) == used, "nothing but these samples"
        assert (ids[mask == 0] == PAD).all()
        return results

    def layout_of(kind: str, size: int, lengths: list[Any]) -> Layout:
        if kind == "padded":
            return Padded(packing.buckets(lengths), size, PAD, typed=True)
        shape = flat.row(lengths) if kind == "one row" else packing.shape(lengths)
        return Packed(shape, size, PAD, 0, typed=True)

    rows = [row for of_host, _ in hosts for row in of_host]
    firsts = np.cumsum([0, *(len(of_host) for of_host, _ in hosts)]).tolist()
    parts = [tokenized(of_host, first) for (of_host, _), first in zip(hosts, firsts, strict=False)]
    # Processes of the hosts alternate.
    turns = range(max(count for _, count in hosts))
    host_of = [host for turn in turns for host, (_, count) in enumerate(hosts) if turn < count]
    of_processes = processes_of(parts, host_of) if len(hosts) > 1 else parts * hosts[0][1]
    assert len({samples.fingerprint() for samples in of_processes}) == 1
    expected = Counter((number, number, tuple(row)) for number, row in enumerate(rows))
    trained: Counter[Any] = Counter()
    evaluated: Counter[Any] = Counter()
    weights, counts = [], set()
    for rank, samples in enumerate(of_processes):
        world = World(processes=len(of_processes), rank=rank)
        training = Training(
            samples=samples, size=size, accumulation=accumulation, seed=7, world=world
        )
        lengths = [samples.lengths[items] for items in training.typical(kind != "padded")]
        layout = layout_of(kind, size, lengths)
        loader: Any = batches.training_loader(training, layout, pin_memory=False)
        loader.set_epoch(epoch)
        trained_batches = list(loader)
        # The host with most rows for a process decides.
        of_hosts = [-(-len(of_host) // (size * count * accumulation)) for of_host, count in hosts]
        assert (
            len(trained_batches) == training.steps() * accumulation == max(of_hosts) * accumulation
        )
        trained.update(
            (row, label, tuple(ids))
            for batch in trained_batches
            for row, label, ids in rows_of(batch)
        )
        weights.append([int(batch["total"]) for batch in trained_batches][::accumulation])
        evaluation = list(batches.evaluation_batches(samples, layout, size, world))
        counts.add(len(evaluation))
        assert all(int(batch["total"]) == len(rows) for batch in evaluation)
        evaluated.update(
            (row, label, tuple(ids)) for batch in evaluation for row, label, ids in rows_of(batch)
        )
    assert trained == expected
    assert evaluated == expected
    assert len(counts) == 1 and all(of_rank == weights[0] for of_rank in weights)
    assert sum(weights[0]) == len(rows)
    if len(hosts) > 1:  # a row more of each host, at most
        assert max(weights[0]) - min(weights[0]) <= len(hosts)
