"""Choose what a job trains, evaluates and tests on, from the splits of its data."""

from __future__ import annotations

import random
import re
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
from recipe.data.files.part import SourceFile, shift_addresses, split_address
from recipe.data.layout import shards
from recipe.data.layout.shards import Hosts
from recipe.data.reading import ChannelFiles, describe_files
from recipe.errors import DataError, did_you_mean, join_names
from recipe.settings import DataSettings

Array = npt.NDArray[Any]
Locate = Callable[[int], str]
_WHOLE = re.compile(r"^(-?\d+)\.0+$")
_MOST_EXCESS = 1.5
"""How many times the wanted rows groups that are held out may have."""


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
    inputs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The columns of the training data that are no targets, by their roles."""

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
    reading: ChannelFiles,
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
    reading: ChannelFiles,
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
    built, dropped = _drop_repeated(built, settings)
    train, validation, test = (built.get(split) for split in ("train", "validation", "test"))
    assert train is not None  # `reading` checks that
    is_held_out = False
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
        is_held_out = True
        row_strata = strata(train) if strata else np.zeros(len(train), dtype=np.int8)
        row_strata = row_strata.astype(np.min_scalar_type(int(row_strata.max(initial=0))))
        # One host may have too few rows while all together have enough.
        can = hosts.gather(len(row_strata) > len(np.unique(row_strata)))
        if hosts.sharded and any(can) and not can[hosts.position]:
            kept, held_out = np.arange(len(row_strata)), np.arange(0)
        else:
            kept, held_out = hold_out(row_strata, settings.seed, settings.validation_split)
        how = (" by their hosts" if hosts.sharded else "") + (", stratified" if strata else "")
        how += f", seed {settings.seed}"
        if settings.validation_group or settings.validation_date:
            kept, held_out, how = _hold_out_by(train, reading, settings, hosts)
            how = f": {how}"
        train, validation = train.select(kept), train.select(held_out)
        count, rows = sum(hosts.gather(len(held_out))), sum(hosts.gather(len(row_strata)))
        rule = f"evaluation: {count} of {rows} training rows held out{how}"
        sharded |= {"validation"} if "train" in sharded else set()
    if not is_held_out and (unused := _hold_out_settings(settings)):
        rule += f"; {' and '.join(unused)} not used: no training rows are held out"
    names = {"train": "train", "validation": "evaluation", "test": "test"}
    uses = frozenset(names[split] for split in sharded)
    chosen = {"train": train, "evaluation": validation, "test": test}
    return {**_addressed(chosen, reading, hosts, uses), "sharded": uses}, rule + dropped


def _hold_out_settings(settings: DataSettings) -> list[str]:
    """Return the hyperparameters about the hold-out that are given."""
    names = ["validation_group", "validation_date"]
    given = [name for name in names if getattr(settings, name)]
    is_default = settings.validation_split == DataSettings.validation_split
    return given if is_default else ["validation_split", *given]


def _hold_out_by(
    train: datasets.Dataset, reading: ChannelFiles, settings: DataSettings, hosts: Hosts
) -> tuple[Array, Array, str]:
    """Return the rows to keep and to hold out by validation_group or validation_date, and how.

    Raises:
        DataError: both are given, channels are sharded, or the column cannot be used.
    """
    group, date, share = (
        settings.validation_group, settings.validation_date, settings.validation_split
    )  # fmt: skip
    setting = "validation_date" if group is None else "validation_group"
    if (group and date) or hosts.sharded:
        why = "sharded channels: a group may be on several hosts" if hosts.sharded else "the other"
        raise DataError(
            f"{setting} does not go with {why}.",
            "Give evaluation data in a channel called test, or leave it out.",
        )
    column = str(date if group is None else group)
    cells, locate = cells_of_rows(train, reading, column, setting)
    if group is None:
        return hold_out_newest(cells, column, share, locate)
    return hold_out_groups(cells, column, settings.seed, share, locate)


def _drop_repeated(
    built: Mapping[str, datasets.Dataset], settings: DataSettings
) -> tuple[Mapping[str, datasets.Dataset], str]:
    """Return the data sets without training rows that repeat another one, if drop_duplicates is
    given, and how many these are, in words."""
    train = built["train"]
    if not settings.drop_duplicates or not len(train):
        return built, ""
    # What identifies a row differs, though rows are equal.
    names = [name for name in train.column_names if name not in (ADDRESS, "id", "place")]
    hashes = np.concatenate(
        [values.hash_rows(table) for table in values.tables(train.select_columns(names))]
    )
    firsts = np.sort(np.unique(hashes, return_index=True)[1])
    count = len(train) - len(firsts)
    rows = f"; drop_duplicates leaves out {count} of {len(train)} training rows"
    return {**built, "train": train.select(firsts)}, rows


def _addressed(
    chosen: Mapping[str, datasets.Dataset | None],
    reading: ChannelFiles,
    hosts: Hosts = shards.ONE,
    sharded: Collection[str] = (),
) -> dict[str, Any]:
    """Return data sets without the column ADDRESS, `sources`, `addresses` and `inputs`.

    Args:
        sharded: The data sets of which this host has its own rows.
    """
    plain, addresses = dict(chosen), dict[str, npt.NDArray[np.int64]]()
    sources: Sequence[SourceFile] = reading.sources
    for use, rows in chosen.items():
        if rows is not None and ADDRESS in rows.column_names:
            plain[use] = rows.remove_columns(ADDRESS)
            addresses[use] = values.read_column(rows, ADDRESS)
    if hosts.sharded:
        none = np.empty(0, np.int64)
        of_hosts = hosts.gather((sources, {use: addresses.get(use, none) for use in sharded}))
        firsts = np.cumsum([0, *(len(theirs) for theirs, _ in of_hosts)]).tolist()
        addresses = {
            use: shift_addresses(rows, firsts[hosts.position]) for use, rows in addresses.items()
        }
        for use in sharded:  # as `Samples` number the rows of all hosts
            starts = zip(of_hosts, firsts[:-1], strict=True)
            addresses[use] = np.concatenate(
                [shift_addresses(rows[use], first) for (_, rows), first in starts]
            )
        sources = [source for theirs, _ in of_hosts for source in theirs]
    inputs = reading.columns.inputs
    return {**plain, "sources": sources, "addresses": addresses, "inputs": inputs}


def assign_groups(
    built: Mapping[str, datasets.Dataset],
    column: str,
    reading: ChannelFiles,
    settings: DataSettings,
) -> tuple[dict[str, Any], str]:
    """Return the same as `assign`, but hold out queries (the values of `column`) with all their
    rows."""
    is_by_column = settings.validation_group or settings.validation_date
    if len(built) > 1 or is_by_column or not (settings.evaluates or settings.predicts):
        return assign(built, reading, settings)
    built, dropped = _drop_repeated(built, settings)
    train = built["train"]
    # If two queries have the same 64-bit hash, they only stay together.
    tables = values.tables(train.select_columns([column]))
    hashes = [pd.util.hash_array(table[column].to_numpy()) for table in tables]
    _, firsts, numbers = np.unique(np.concatenate(hashes), return_index=True, return_inverse=True)
    _, held_out = hold_out(
        np.zeros(len(firsts), np.int64), settings.seed, settings.validation_split
    )
    # Queries are numbered in the order in which they first appear.
    is_held_out = np.isin(numbers, np.argsort(firsts)[held_out])
    rows, kept = np.flatnonzero(is_held_out), np.flatnonzero(~is_held_out)
    rule = (
        f"evaluation: {len(held_out)} queries held out of the training data, with their "
        f"{len(rows)} rows, seed {settings.seed}"
    )
    chosen = {"train": train.select(kept), "evaluation": train.select(rows), "test": None}
    return _addressed(chosen, reading), rule + dropped


def hold_out(class_ids: Sequence[int] | Array, seed: int, share: float) -> tuple[Array, Array]:
    """Return positions to keep and to hold out: `share` of each class, the same for a seed.

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
    counts = {key: min(int(len(rows) * share), len(rows) - 1) for key, rows in positions.items()}
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
        positions[key][drawn.sample(range(len(positions[key])), counts[key])]
        for key in sorted(counts)
    ]
    return _divided(len(ids), np.sort(np.concatenate(chosen)))


def hold_out_groups(
    cells: Sequence[Any], column: str, seed: int, share: float, locate: Locate
) -> tuple[Array, Array, str]:
    """Return positions to keep and to hold out, and the choice in words: whole groups of rows with
    the same value, drawn until they have the share of the rows.

    Raises:
        DataError: a row has no value, or all have the same one.
    """
    _check_filled(cells, column, locate)
    # 7, 7.0 and "7 " are one customer, in files of different types.
    names = [_WHOLE.sub(r"\1", str(cell).strip()) for cell in cells]
    numbers, groups = pd.factorize(np.array(names, object))
    if len(groups) < 2:
        raise DataError(
            f"Column {column!r}, which validation_group names, is {groups[0]!r} in all rows.",
            "Name a column of groups, such as customers, or leave it out.",
        )
    sizes, wanted = np.bincount(numbers), share * len(numbers)
    chosen: list[int] = []
    for group in random.Random(seed).sample(range(len(groups)), len(groups)):
        held_rows = int(sizes[chosen].sum())
        if held_rows >= wanted or len(chosen) == len(groups) - 1:
            break
        if held_rows + sizes[group] <= _MOST_EXCESS * wanted:
            chosen.append(group)
    chosen = chosen or [int(sizes.argmin())]
    kept, held_out = _divided(len(numbers), np.flatnonzero(np.isin(numbers, chosen)))
    return kept, held_out, f"{len(chosen)} of {len(groups)} groups by {column!r}, seed {seed}"


def hold_out_newest(
    cells: Sequence[Any], column: str, share: float, locate: Locate
) -> tuple[Array, Array, str]:
    """Return positions to keep and to hold out, and the choice in words: the rows of the latest
    dates or highest numbers. Rows of one date stay together.

    Raises:
        DataError: a cell is neither a date nor a number, or all are the same.
    """
    _check_filled(cells, column, locate)
    texts = pd.Series([str(cell) for cell in cells])
    times = pd.to_numeric(texts, errors="coerce")
    if times.isna().any():
        times = pd.to_datetime(texts, utc=True, format="ISO8601", errors="coerce")
    if times.isna().any():
        row = int(np.flatnonzero(times.isna())[0])
        raise DataError(
            f"{locate(row)} has {texts[row]!r} in column {column!r}, which validation_date names: "
            "it is not a date such as 2024-05-31 or 2024-05-31T13:00.",
            "Write all dates so, or numbers.",
        )
    count = max(1, round(share * len(times)))
    first = times.sort_values().iloc[-count]
    if (times >= first).all():
        first = times[times > first].min()
    is_held_out = (times >= first).to_numpy()
    if not is_held_out.any():
        raise DataError(
            f"Column {column!r}, which validation_date names, is {texts[0]!r} in all rows.",
            "Name a column of dates, or leave it out.",
        )
    kept, held_out = _divided(len(times), np.flatnonzero(is_held_out))
    return (
        kept,
        held_out,
        f"the newest by {column!r}, from {texts[held_out[times[held_out].argmin()]]} on",
    )


def cells_of_rows(
    train: datasets.Dataset, reading: ChannelFiles, column: str, setting: str
) -> tuple[list[Any], Locate]:
    """Return a column of the files for each row of the training data, read or not, and what names
    the location of a row.

    Raises:
        DataError: a file has no such column, or the task's rows have no addresses.
    """
    addresses = values.read_column(train, ADDRESS)
    positions, numbers = split_address(addresses)
    cells: Array = np.empty(len(addresses), object)
    for file in reading.files_of("train"):
        part, names = file.part, file.part.table.column_names
        if column not in names:
            raise DataError(
                f"Hyperparameter {setting} has value {column!r}, and {part.path} has no such "
                f"column, but {join_names(names)}.",
                did_you_mean(column, names) or "Name one of them.",
            )
        if pa.types.is_nested(part.table.schema.field(column).type):
            raise DataError(f"Column {column!r} of {part.path} holds lists.", "Name another one.")
        rows = np.flatnonzero(positions == part.position)
        lines = np.arange(part.table.num_rows) if part.lines is None else np.asarray(part.lines)
        chosen = part.table[column].take(pa.array(np.searchsorted(lines, numbers[rows])))
        cells[rows] = np.array([*chosen.to_pylist(), None], object)[:-1]

    def locate(row: int) -> str:
        return reading.sources[int(positions[row])].where(int(numbers[row]))

    return cells.tolist(), locate


def _check_filled(cells: Sequence[Any], column: str, locate: Locate) -> None:
    """Raise DataError if a row has no value."""
    empty = [row for row, cell in enumerate(cells) if str(cell).strip() in ("", "None", "nan")]
    if empty:
        raise DataError(
            f"{len(empty)} of {len(cells)} rows have no value in column {column!r}, the first at "
            f"{locate(empty[0])}.",
            "Fill them, or hold out by another column.",
        )


def _divided(count: int, held_out: Array) -> tuple[Array, Array]:
    is_kept = np.ones(count, bool)
    is_kept[held_out] = False
    return np.flatnonzero(is_kept), held_out
