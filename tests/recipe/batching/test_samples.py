"""Samples of which each host has its own. test_round_trip.py trains and evaluates each row once."""

from typing import Any

import numpy as np
import pytest

from recipe.batching.batches import Training, World
from recipe.batching.document_batches import Documents
from recipe.batching.samples import Samples, sharded

# The hosts of six processes, and the rows of each host.
HOSTS = ("a", "a", "b", "c", "c", "c")
ROWS = {"a": 401, "b": 0, "c": 1_000}


def host_samples(name: str) -> Samples:
    """Samples whose tokens and labels tell their host and row."""
    random = np.random.default_rng(ord(name))
    lengths = random.integers(1, 60, ROWS[name])
    rows = np.arange(ROWS[name]) + 10_000 * (ord(name) - ord("a"))
    starts = np.cumsum([0, *lengths])
    return Samples(np.repeat(rows, lengths).astype(np.int32), starts, rows)


@pytest.fixture(scope="module")
def processes() -> list[Samples]:
    """The samples that each process sees after they have told each other."""
    sent: list[Any] = []
    none = (np.zeros(0, np.uint8), np.zeros(0, np.int64), "")

    def send(value: Any) -> list[Any]:
        sent.append(value)
        return [none] * len(HOSTS)

    for rank, host in enumerate(HOSTS):
        sharded(host_samples(host), HOSTS, rank, send)
    group = [
        sharded(host_samples(host), HOSTS, rank, lambda _: sent) for rank, host in enumerate(HOSTS)
    ]
    assert all(rows == [401, 0, 1_000] for _, rows in group)
    return [samples for samples, _ in group]


def test_all_see_the_same_rows_and_each_the_tokens_of_its_own(processes: list[Samples]) -> None:
    assert len({samples.fingerprint() for samples in processes}) == 1
    labels = np.concatenate([host_samples(name).labels for name in ROWS])
    for samples, host in zip(processes, HOSTS, strict=True):
        assert len(samples) == 1_401
        assert samples.labels.tolist() == labels.tolist()
        assert samples.shards is not None
        for row in samples.shards.rows("abc".index(host)):
            assert set(samples.tokens(row)) == {labels[row]}
            assert len(samples.tokens(row)) == samples.lengths[row]
    with pytest.raises(IndexError, match="on another host"):
        processes[0].tokens(401)
    with pytest.raises(IndexError, match="on another host"):
        processes[5].token_positions(np.asarray([500, 3]))


def test_epochs_differ_and_are_the_same_each_time(processes: list[Samples]) -> None:
    training = Training(samples=processes[0], size=4, world=World(processes=len(HOSTS)))
    first, again, second = (
        [rows.tolist() for batch in training.epoch(epoch, True) for rows, _ in batch]
        for epoch in (0, 0, 1)
    )
    assert first == again
    assert first != second


def test_documents_weigh_the_same_on_every_host() -> None:
    starts = np.asarray([0, 3, 5])
    learned = np.asarray([False, True, True, False, True])
    local_documents = Documents(np.arange(5), starts, np.asarray([2, 1]), learned)
    none = Documents(np.empty(0), np.zeros(1, dtype=int), np.empty(0, dtype=int), np.empty(0))
    exchanged = [
        (np.diff(documents.starts), documents.labels, documents.fingerprint())
        for documents in (local_documents, none)
    ]
    both = [
        sharded(documents, ("x", "y"), rank, lambda _: exchanged)[0]
        for rank, documents in enumerate((local_documents, none))
    ]
    assert [documents.weight(np.asarray([0, 1])) for documents in both] == [3, 3]
    assert both[0].successors(1)[1].tolist() == [4]
    assert isinstance(both[1], Documents)


def test_64_hosts_of_8_processes_have_like_many_tokens_in_each_step() -> None:
    rows, names = 10_000, [f"algo-{host}" for host in range(64) for _ in range(8)]
    # Every host has the same lengths, in an order of its own, and the last one a tenth fewer rows.
    lengths = np.clip(np.random.default_rng(0).lognormal(3, 0.7, rows), 3, 128).astype(np.uint8)
    exchanged: list[Any] = [None] * len(names)
    for host in range(64):
        local_lengths = np.random.default_rng(host).permutation(lengths)[
            : rows - (host == 63) * rows // 10
        ]
        exchanged[host * 8] = local_lengths, np.zeros(len(local_lengths), dtype=np.int64), str(host)
    first = Samples(np.zeros(0), np.cumsum([0, *exchanged[0][0]]), exchanged[0][1])
    samples, _ = sharded(first, names, 0, lambda _: exchanged)
    training = Training(samples=samples, size=32, world=World(processes=len(names)))
    epoch = training.epoch(0, True)
    seen = np.zeros(len(samples), dtype=int)
    for number in range(len(epoch)):
        batches = [batch for batch, _ in epoch[number]]
        np.add.at(seen, np.concatenate(batches), 1)
        tokens = np.asarray([samples.lengths[batch].sum() for batch in batches[: 63 * 8]])
        assert tokens.max() <= 1.02 * tokens.mean()
    assert (seen == 1).all()
