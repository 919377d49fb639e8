"""What a job trains on, evaluates on and tests on, of the splits of its data."""

from __future__ import annotations

import math
import random
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa  # type: ignore[import-untyped]
from datasets.table import InMemoryTable

from recipe.data import shards
from recipe.data.files.spool import spooled
from recipe.data.shards import Hosts
from recipe.errors import DataError
from recipe.hyperparameters import Hyperparameters

SHARE = 0.1
"""Of the training data, where there is no other to evaluate on."""
_AT_ONCE = 10_000
_NUMBERS_AT_ONCE = 1 << 20
_FEW = 1_000
Array = npt.NDArray[Any]


def assign(
    built: Mapping[str, datasets.Dataset],
    strata: Callable[[datasets.Dataset], Array] | None,
    hyperparameters: Hyperparameters,
    hosts: Hosts = shards.ONE,
) -> tuple[datasets.Dataset, datasets.Dataset, datasets.Dataset | None, str]:
    """Training, evaluation and (beside validation data) test data, and in a line how they came.

    Args:
        strata: The class ids [rows] of a data set; the same share of each is held out.
    """
    train, validation, test = (built.get(split) for split in ("train", "validation", "test"))
    assert train is not None  # `read_parts` has seen to it
    if validation is not None:
        also = ", test data after training" if test is not None else ""
        return train, validation, test, f"evaluation: on the validation data{also}"
    if test is not None:
        return train, test, None, "evaluation: on the test data"
    if not (hyperparameters.evaluates or hyperparameters.predicts):
        # The engine lays out a batch of it, and never computes one.
        rule = "evaluation: none was asked for, so that all rows train"
        return train, train.select(range(min(1, len(train)))), None, rule
    row_strata = strata(train) if strata else np.zeros(len(train), dtype=np.int8)
    row_strata = row_strata.astype(np.min_scalar_type(int(row_strata.max(initial=0))))
    # The rows of a host may be too few, those of all are not.
    can = hosts.each(len(row_strata) > len(np.unique(row_strata)))
    if hosts.sharded and any(can) and not can[hosts.names.index(hosts.of_processes[hosts.rank])]:
        kept, held_out = np.arange(len(row_strata)), np.arange(0)
    else:
        kept, held_out = hold_out(row_strata, SHARE, hyperparameters.seed)
    how = "stratified, " if strata else ""
    count = sum(hosts.each(len(held_out)))
    where = " by their hosts" if hosts.sharded else ""
    rule = f"evaluation: {count} training rows held out{where}, {how}seed {hyperparameters.seed}"
    return _rows_of(train, kept), _rows_of(train, held_out), None, rule


def _rows_of(split: datasets.Dataset, numbers: Array) -> datasets.Dataset:
    """`split.select(numbers)`, of many rows with their numbers in a mapped file: that writes them
    in memory, and pickles them for a name that nothing here caches by."""
    if split._indices is not None or not len(numbers):
        return split.select(numbers)
    schema = pa.schema([("indices", pa.uint64())])
    pieces = range(0, len(numbers), _NUMBERS_AT_ONCE)
    whole = spooled(
        schema,
        (
            pa.table([pa.array(numbers[at : at + _NUMBERS_AT_ONCE], pa.uint64())], schema=schema)
            for at in pieces
        ),
    )
    return datasets.Dataset(
        split.data,
        info=split.info.copy(),
        split=split.split,
        indices_table=InMemoryTable(whole),
        fingerprint=uuid.uuid4().hex,
    )


def assign_groups(
    built: Mapping[str, datasets.Dataset], column: str, hyperparameters: Hyperparameters
) -> tuple[datasets.Dataset, datasets.Dataset, datasets.Dataset | None, str]:
    """As `assign`; held out are queries (the values of `column`), with all of their rows."""
    train = built["train"]
    needs_evaluation = hyperparameters.evaluates or hyperparameters.predicts
    if len(built) > 1 or not needs_evaluation:
        return assign(built, None, hyperparameters)
    # A number of 64 bits for each query: two different ones of the same would only stay together.
    batches = train.select_columns([column]).with_format("arrow").iter(_AT_ONCE)
    hashes = [pd.util.hash_array(batch[column].to_numpy()) for batch in batches]
    _, firsts, numbers = np.unique(np.concatenate(hashes), return_index=True, return_inverse=True)
    _, held_out = hold_out(np.zeros(len(firsts), np.int64), SHARE, hyperparameters.seed)
    # Queries are counted as they come.
    is_held_out = np.isin(numbers, np.argsort(firsts)[held_out])
    rows, kept = np.flatnonzero(is_held_out), np.flatnonzero(~is_held_out)
    rule = (
        f"evaluation: {len(held_out)} queries held out of the training data, with their "
        f"{len(rows)} rows, seed {hyperparameters.seed}"
    )
    return _rows_of(train, kept), _rows_of(train, rows), None, rule


def uses_of(sharded: frozenset[str], splits: Collection[str]) -> frozenset[str]:
    """Which of the data sets that `assign` makes of `splits` are sharded."""
    evaluation = next((each for each in ("validation", "test") if each in splits), "train")
    test = "test" if "validation" in splits and "test" in splits else ""
    uses = {"train": "train", "evaluation": evaluation, "test": test}
    return frozenset(use for use, split in uses.items() if split in sharded)


def hold_out(class_ids: Sequence[int] | Array, share: float, seed: int) -> tuple[Array, Array]:
    """Positions to keep and to hold out, `share` of each class, the same for the same seed.

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
    held_rows = max(1, round(len(class_ids) * share))
    counts = {key: int(len(rows) * share) for key, rows in positions.items()}
    by_remainder = sorted(counts, key=lambda key: (len(positions[key]) * share) % 1, reverse=True)
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
        positions[key][sample(drawn, len(positions[key]), counts[key])] for key in sorted(counts)
    ]
    held_out = np.sort(np.concatenate(chosen))
    is_kept = np.ones(len(ids), bool)
    is_kept[held_out] = False
    return np.flatnonzero(is_kept), held_out


def sample(drawn: random.Random, count: int, size: int) -> Array:
    """`drawn.sample(range(count), size)`, int64 [size], by arrays: its lists and sets of all rows
    are of some 40 bytes a row."""
    if size < _FEW:
        return np.array(drawn.sample(range(count), size), np.int64)
    result = np.empty(size, np.int64)
    # As there: where few are drawn of many, one is drawn again that was drawn before.
    if count <= 21 + 4 ** math.ceil(math.log(size * 3, 4)):
        pool = np.arange(count)
        for at in range(size):
            place = drawn.randrange(count - at)
            result[at] = pool[place]
            pool[place] = pool[count - at - 1]
        return result
    is_drawn = np.zeros(count, bool)
    for at in range(size):
        number = drawn.randrange(count)
        while is_drawn[number]:
            number = drawn.randrange(count)
        is_drawn[number] = True
        result[at] = number
    return result
