"""Rows to tokens to batches and back, for any processes, hosts and layouts: nothing lost or twice."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as some

from recipe.batching import batches, flat, packing
from recipe.batching.batches import Batch, Layout, Packed, Padded, Training, World
from recipe.batching.samples import Samples, sharded

PAD = 1


def tokenised(rows: Sequence[list[int]], first: int) -> Samples:
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
    def layout_of(kind: str, size: int, lengths: list[Any]) -> Layout:
        if kind == "padded":
            return Padded(packing.buckets(lengths), size, PAD, typed=True)
        shape = flat.row(lengths) if kind == "one row" else packing.shape(lengths)
        return Packed(shape, size, PAD, 0, typed=True)

    def processes_of(
        hosts: Sequence[tuple[list[list[int]], int]],
    ) -> tuple[list[Samples], list[list[int]]]:
        """The samples as each process has them, and all rows. Processes of the hosts alternate."""
        rows = [row for of_host, _ in hosts for row in of_host]
        firsts = np.cumsum([0, *(len(of_host) for of_host, _ in hosts)]).tolist()
        of_hosts = [
            tokenised(of_host, first) for (of_host, _), first in zip(hosts, firsts, strict=False)
        ]
        if len(hosts) == 1:
            return of_hosts * hosts[0][1], rows
        turns = range(max(count for _, count in hosts))
        host_of = [host for turn in turns for host, (_, count) in enumerate(hosts) if turn < count]
        names = [f"algo-{host}" for host in host_of]
        sent: list[Any] = []

        def send(value: Any) -> list[Any]:
            sent.append(value)
            return [(np.zeros(0, np.uint8), np.zeros(0, np.int64), "")] * len(names)

        for rank, host in enumerate(host_of):
            sharded(of_hosts[host], names, rank, send)
        return [
            sharded(of_hosts[host], names, rank, lambda _: sent)[0]
            for rank, host in enumerate(host_of)
        ], rows

    of_processes, rows = processes_of(hosts)
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
