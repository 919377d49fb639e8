"""Choose what a job trains, evaluates and tests on, from the splits of its data."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data import values
from recipe.data.column_names import ADDRESS
from recipe.data.files.part import SourceFile, moved, split_address
from recipe.data.layout import shards
from recipe.data.layout.shards import Hosts
from recipe.data.reading import Reading, describe_files
from recipe.errors import DataError
from recipe.settings import DataSettings

SHARE = 0.1
"""The share of the training data that is held out if there is no other data to evaluate on."""
Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class DataSets:
    """The data sets of a job by their use. Each task adds what it detected."""

    train: datasets.Dataset
    evaluation: datasets.Dataset
    test: datasets.Dataset | None
    """Present if there is validation data as well; otherwise it is `evaluation`."""
    notes: list[str]
    """What was detected, one line each."""
    sharded: frozenset[str] = frozenset()
    """Which of `train`, `evaluation` and `test` have the rows of this host only."""
    sources: Sequence[SourceFile] = ()
    """The files of the job, of all hosts."""
    addresses: Mapping[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    """`Part.addresses` of the rows of `train`, `evaluation` and `test`, of all hosts."""

    def where(self, use: str, row: int) -> str:
        """Return the file and line of a row, for messages.

        Args:
            use: `train`, `evaluation` or `test`.
            row: Its number in the data set.
        """
        if (address := self._source_of(use, row)) is None:
            return f"row {row} of the {use} data"
        source, number = address
        return source.where(number)

    def entry(self, use: str, row: int) -> dict[str, Any]:
        """Return the file and line of a row by keys, as `SourceFile.entry`."""
        if (address := self._source_of(use, row)) is None:
            return {"row": row}
        source, number = address
        return source.entry(number)

    def _source_of(self, use: str, row: int) -> tuple[SourceFile, int] | None:
        addresses = self.addresses.get(use, ())
        if not 0 <= row < len(addresses):
            return None
        position, number = split_address(int(addresses[row]))
        return self.sources[position], number


def data_set(tables: Sequence[pa.Table]) -> datasets.Dataset:
    """Return tables of one schema as a data set."""
    # A random fingerprint replaces the hash of all rows, by which nothing is cached here.
    return datasets.Dataset(pa.concat_tables(tables), fingerprint=uuid.uuid4().hex)


def build(
    reading: Reading,
    tables: Mapping[str, Sequence[pa.Table]],
    settings: DataSettings,
    what: str,
    count: Callable[[pa.Table], str],
) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of `DataSets` except `notes`, and lines about the files and the choice.

    Args:
        tables: The rows of each split.
        what: What a row is, for the error if a split has none.
        count: Returns the amount of data in words.
    """
    built, lines = {}, []
    for split, split_tables in tables.items():
        built[split] = data_set(split_tables)
        if not len(built[split]):
            raise DataError(f"The {split} data has no {what}.", "Give some, or leave it out.")
        amount = count(built[split].data.table)
        lines.append(describe_files(reading.files_of(split), amount))
    uses, rule = assign(built, reading, settings)
    return uses, [*lines, rule]


def assign(
    built: Mapping[str, datasets.Dataset],
    reading: Reading,
    settings: DataSettings,
    strata: Callable[[datasets.Dataset], Array] | None = None,
    hosts: Hosts = shards.ONE,
) -> tuple[dict[str, Any], str]:
    """Return the fields of `DataSets` except `notes`, and a line that explains the choice.

    Args:
        built: The data sets by split; `train` is one of them. They may have the column ADDRESS.
        strata: Returns the class ids [rows] of a data set: the same share of each class is held
            out.
    """
    sharded = frozenset().union(*hosts.gather(reading.sharded)) & built.keys()
    train, validation, test = (built.get(split) for split in ("train", "validation", "test"))
    assert train is not None  # `reading` checks that
    if validation is not None:
        rule = "evaluation: on the validation data"
        rule += ", test data after training" if test is not None else ""
    elif test is not None:
        validation, test, rule = test, None, "evaluation: on the test data"
        sharded = frozenset({"test": "validation"}.get(split, split) for split in sharded)
    elif not (settings.evaluates or settings.predicts):
        # The engine lays out a batch of it, and never computes one.
        validation = train.select(range(min(1, len(train))))
        rule = "evaluation: none (eval_strategy=no); all rows train"
        sharded |= {"validation"} if "train" in sharded else set()
    else:
        row_strata = strata(train) if strata else np.zeros(len(train), dtype=np.int8)
        row_strata = row_strata.astype(np.min_scalar_type(int(row_strata.max(initial=0))))
        # One host may have too few rows while all together have enough.
        can = hosts.gather(len(row_strata) > len(np.unique(row_strata)))
        if hosts.sharded and any(can) and not can[hosts.position]:
            kept, held_out = np.arange(len(row_strata)), np.arange(0)
        else:
            kept, held_out = hold_out(row_strata, settings.seed)
        train, validation = train.select(kept), train.select(held_out)
        how = (" by their hosts" if hosts.sharded else "") + (", stratified" if strata else "")
        count, rows = sum(hosts.gather(len(held_out))), sum(hosts.gather(len(row_strata)))
        rule = f"evaluation: {count} of {rows} training rows held out{how}, seed {settings.seed}"
        sharded |= {"validation"} if "train" in sharded else set()
    names = {"train": "train", "validation": "evaluation", "test": "test"}
    uses = frozenset(names[split] for split in sharded)
    chosen = {"train": train, "evaluation": validation, "test": test}
    return {**_addressed(chosen, reading.sources, hosts, uses), "sharded": uses}, rule


def _addressed(
    chosen: Mapping[str, datasets.Dataset | None],
    sources: Sequence[SourceFile],
    hosts: Hosts = shards.ONE,
    sharded: Collection[str] = (),
) -> dict[str, Any]:
    """Return data sets without the column ADDRESS, `sources` and `addresses`.

    Args:
        sharded: The data sets of which this host has its own rows.
    """
    plain, addresses = dict(chosen), dict[str, npt.NDArray[np.int64]]()
    for use, rows in chosen.items():
        if rows is not None and ADDRESS in rows.column_names:
            plain[use] = rows.remove_columns(ADDRESS)
            addresses[use] = values.column(rows, ADDRESS)
    if hosts.sharded:
        none = np.empty(0, np.int64)
        of_hosts = hosts.gather((sources, {use: addresses.get(use, none) for use in sharded}))
        firsts = np.cumsum([0, *(len(theirs) for theirs, _ in of_hosts)]).tolist()
        addresses = {use: moved(rows, firsts[hosts.position]) for use, rows in addresses.items()}
        for use in sharded:  # as `Samples` number the rows of all hosts
            starts = zip(of_hosts, firsts[:-1], strict=True)
            addresses[use] = np.concatenate(
                [moved(rows[use], first) for (_, rows), first in starts]
            )
        sources = [source for theirs, _ in of_hosts for source in theirs]
    return {**plain, "sources": sources, "addresses": addresses}


def assign_groups(
    built: Mapping[str, datasets.Dataset], column: str, reading: Reading, settings: DataSettings
) -> tuple[dict[str, Any], str]:
    """Return the same as `assign`, but hold out queries (the values of `column`) with all their
    rows."""
    train = built["train"]
    if len(built) > 1 or not (settings.evaluates or settings.predicts):
        return assign(built, reading, settings)
    # If two queries have the same 64-bit hash, they only stay together.
    tables = values.tables(train.select_columns([column]))
    hashes = [pd.util.hash_array(table[column].to_numpy()) for table in tables]
    _, firsts, numbers = np.unique(np.concatenate(hashes), return_index=True, return_inverse=True)
    _, held_out = hold_out(np.zeros(len(firsts), np.int64), settings.seed)
    # Queries are numbered in the order in which they first appear.
    is_held_out = np.isin(numbers, np.argsort(firsts)[held_out])
    rows, kept = np.flatnonzero(is_held_out), np.flatnonzero(~is_held_out)
    rule = (
        f"evaluation: {len(held_out)} queries held out of the training data, with their "
        f"{len(rows)} rows, seed {settings.seed}"
    )
    chosen = {"train": train.select(kept), "evaluation": train.select(rows), "test": None}
    return _addressed(chosen, reading.sources), rule


def hold_out(class_ids: Sequence[int] | Array, seed: int) -> tuple[Array, Array]:
    """Return positions to keep and to hold out: `SHARE` of each class, the same for a seed.

    A class keeps at least one row. The shares are rounded so that their sum is the share of all
    rows, and at least one row is held out.

    Raises:
        DataError: no class has two rows.
    """
    ids = np.asarray(class_ids)
    by_class = np.argsort(ids, kind="stable")
    keys, sizes = np.unique(ids, return_counts=True)
    parts = np.split(by_class, np.cumsum(sizes)[:-1])
    positions = dict(zip(keys.tolist(), parts, strict=True))
    held_rows = max(1, round(len(class_ids) * SHARE))
    counts = {key: int(len(rows) * SHARE) for key, rows in positions.items()}
    by_remainder = sorted(counts, key=lambda key: (len(positions[key]) * SHARE) % 1, reverse=True)
    for key in [key for key in by_remainder if len(positions[key]) > counts[key] + 1]:
        if sum(counts.values()) < held_rows:
            counts[key] += 1
    if not any(counts.values()):
        raise DataError(
            f"There are {len(class_ids)} training rows, too few to hold any out.",
            "Give more rows, or evaluation data in a channel called test.",
        )
    drawn = random.Random(seed)
    chosen = [
        positions[key][drawn.sample(range(len(positions[key])), counts[key])]
        for key in sorted(counts)
    ]
    held_out = np.sort(np.concatenate(chosen))
    is_kept = np.ones(len(ids), bool)
    is_kept[held_out] = False
    return np.flatnonzero(is_kept), held_out
