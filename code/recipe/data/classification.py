"""From a job's channels to labelled splits: texts and class ids, and what was found on the way.

No tokenising here (`tokens`) and no batching (`batches`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import random
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from recipe.data import columns, labels, shards, values
from recipe.data.column_names import LABEL, PAIR, TEXT, TOKEN_IDS, TYPE_IDS
from recipe.data.columns import Columns
from recipe.data.evidence import Evidence, Recognised
from recipe.data.files import text_files
from recipe.data.files.part import Part
from recipe.data.labels import Labels, Shape
from recipe.data.layout import channels as layout
from recipe.data.layout.class_names import ClassNames
from recipe.data.reading import read_parts
from recipe.data.shards import Hosts
from recipe.errors import DataError, Problems
from recipe.hyperparameters import Hyperparameters

HELD_OUT = 0.1
_AT_ONCE = 10_000
Array = npt.NDArray[Any]
_FEWEST_COMMON = 10
_COMMON_SHARE = 0.01
_KINDS = {
    labels.SINGLE: pa.int64(),
    labels.SEVERAL: pa.list_(pa.float32()),
    labels.NUMBER: pa.float32(),
}


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Data sets with the columns `text` (or `input_ids`, where it came tokenised) and `label`; of
    pairs with `text_pair`, too.

    A label is a class id, a float, or a float (0 or 1) for each class, as `labels.problem` says.
    """

    train: datasets.Dataset
    evaluation: datasets.Dataset
    test: datasets.Dataset | None
    """Present where there is validation data beside it; else it is `evaluation`."""
    labels: Labels
    found: list[str]
    """What was detected, one line each."""
    text_columns: tuple[str, ...] = (TEXT,)
    """The names of the columns of texts in the training data: one, or two of pairs."""
    sharded: frozenset[str] = frozenset()
    """Which of `train`, `evaluation` and `test` have this host's rows only."""


@dataclass(frozen=True, kw_only=True)
class _Read:
    """One part and the columns chosen in it."""

    part: Part
    columns: Columns


@dataclass(frozen=True, kw_only=True)
class _Distinct:
    """The labels of one part: rows without their texts, one of each label, which other hosts are
    told."""

    part: Part
    column: str
    rows: int
    """Of the whole part."""

    def named(self, names: Mapping[int, str]) -> _Distinct:
        """With names for its classes."""
        return dataclasses.replace(self, part=_with_names(self.part, self.column, names))


def load(channels: Mapping[str, Path], hyperparameters: Hyperparameters) -> Splits:
    """Read, label and split the data of a job's channels.

    Raises:
        DataError: names the channel, file, line or column that cannot be used, and the remedy.
    """
    hosts = shards.of_job()
    with hosts.together():
        places = layout.find(channels, hyperparameters.dataset_config_name, hosts.sharded)
        notes = list(places.notes)
        parts = read_parts(places, notes, functools.partial(text_files.units, notes=notes))
        first = next((part for split, part in parts if split == "train" and hosts.sharded), None)
        own = None if first is None else _first_columns(first, hyperparameters)
    like = next((each for each in hosts.each(own) if each is not None), None)
    if like is None and hosts.sharded:
        raise DataError("No host has training data.", "Give rows to train on.")
    with hosts.together():
        read = _read_splits(parts, hyperparameters, notes, like)
        like = like or read["train"][0].columns
    of_hosts = hosts.each({split: [_distinct(each) for each in of] for split, of in read.items()})
    distinct: dict[str, list[_Distinct]] = defaultdict(list)
    for of_host in of_hosts:
        for split, each in of_host.items():
            distinct[split] += each
    if hyperparameters.problem_type != labels.NUMBER:
        known_names = list(itertools.chain.from_iterable(hosts.each(places.class_names)))
        names = _names_of_classes(distinct, known_names, notes)
        if names is not None:
            read = {split: [_named(each, names) for each in of] for split, of in read.items()}
            distinct = {split: [each.named(names) for each in of] for split, of in distinct.items()}
    trained = [(each.part, each.column) for each in distinct["train"]]
    shape = labels.shape_of(trained, hyperparameters.label_separator, hyperparameters.problem_type)
    if shape.problem == labels.SINGLE and hyperparameters.problem_type is None:
        values.check_classes(trained)
    known = _classes(distinct["train"], shape)
    with hosts.together():
        built = {split: _build(split, each, shape, known) for split, each in read.items()}
        for split in distinct.keys() - built.keys():
            built[split] = _without_rows(like, known)
        _check_overlap(built, places.guessed, notes)
    found = [_describe(split, each) for split, each in read.items()]
    strata = _column if known.problem == labels.SINGLE else None
    train, evaluation, test, rule = assign(built, strata, hyperparameters, hosts)
    sharded = frozenset(itertools.chain.from_iterable(hosts.each(places.sharded)))
    return Splits(
        train=train,
        evaluation=evaluation,
        test=test,
        labels=known,
        found=[*notes, *found, rule, *_describe_labels(known, train, hosts)],
        text_columns=like.read,
        sharded=uses_of(sharded, set(built)),
    )


def _column(split: datasets.Dataset) -> Array:
    """The labels [rows] or [rows, classes]."""
    batches = split.select_columns([LABEL]).with_format("numpy").iter(_AT_ONCE)
    parts = [np.asarray(batch[LABEL]) for batch in batches]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def uses_of(sharded: frozenset[str], splits: Collection[str]) -> frozenset[str]:
    """Which of the data sets that `assign` makes of `splits` are sharded."""
    evaluation = next((each for each in ("validation", "test") if each in splits), "train")
    test = "test" if "validation" in splits and "test" in splits else ""
    uses = {"train": "train", "evaluation": evaluation, "test": test}
    return frozenset(use for use, split in uses.items() if split in sharded)


def _first_columns(part: Part, hyperparameters: Hyperparameters) -> Columns:
    part, label = values.with_indicators(values.with_words(part), hyperparameters.label_column)
    return _choose(part, hyperparameters, label, None)


def recognise(evidence: Evidence) -> Recognised | None:
    """Whether the first rows have texts and a label for each; never certain (see Recognised)."""
    part, given = evidence.part, evidence.hyperparameters
    if part is None:
        return None
    try:
        part, label = values.with_indicators(values.with_words(part), given.label_column)
        chosen = _choose(part, given, label, None)
        for column in chosen.read:
            part = values.with_texts(part, column)
        values.with_labels(part, chosen.label)
    except DataError:
        return None
    return Recognised(reason=f"column {chosen.label} holds labels of texts", certain=False)


def _read_splits(
    parts: Sequence[tuple[str, Part]],
    hyperparameters: Hyperparameters,
    notes: list[str],
    like: Columns | None,
) -> dict[str, list[_Read]]:
    """The parts of each split with the columns chosen in them.

    Args:
        like: The columns of the training data, where another host's decide; else those of the
            first part.
    """
    read: dict[str, list[_Read]] = {}
    problems = Problems()
    for split, part in parts:
        with problems.noted():
            if split == "test" and like is not None and not columns.has_label(part, like.label):
                notes.append(f"{part.path} has no column of labels and is not used.")
                continue
            if split == "test" and like is not None and not columns.has_text(part, like):
                notes.append(f"{part.path} has no column of texts and is not used.")
                continue
            part = values.with_words(part)
            part, label = values.with_indicators(part, hyperparameters.label_column)
            chosen = _choose(part, hyperparameters, label, like)
            like = like or chosen
            if split != "train" and labels.is_unlabelled(part, chosen.label):
                notes.append(f"{part.path} has no labels and is not used.")
                continue
            rows = part.table.num_rows
            part = labels.labelled(part, chosen.label, is_pair=chosen.pair is not None)
            if unlabelled := rows - part.table.num_rows:
                notes.append(f"{unlabelled} rows of {part.path} have no label and are not used.")
            for column in chosen.read:
                part = values.with_texts(part, column)
            part = values.with_labels(part, chosen.label)
            read.setdefault(split, []).append(_Read(part=part, columns=chosen))
    problems.check()
    return read


def _choose(
    part: Part, hyperparameters: Hyperparameters, label: str | None, like: Columns | None
) -> Columns:
    text, pair = hyperparameters.text_column, hyperparameters.text_pair_column
    return columns.choose(part, text, label, like, pair)


def _distinct(read: _Read) -> _Distinct:
    """The first row of each label."""
    column = read.columns.label
    values_ = read.part.table[column]
    if pa.types.is_nested(values_.type):
        first: dict[str, int] = {}
        for at, row in enumerate(values_.to_pylist()):
            first.setdefault(json.dumps(row, default=str), at)
        rows = list(first.values())
    else:
        rows = firsts(values_)[0].tolist()
    only = dataclasses.replace(read.part, table=read.part.table.select([column]))
    return _Distinct(part=only.select(rows), column=column, rows=len(values_))


def _names_of_classes(
    distinct: Mapping[str, Sequence[_Distinct]], known: Sequence[ClassNames], notes: list[str]
) -> Mapping[int, str] | None:
    """The names for the integers in the columns of labels that a file beside them has.

    Raises:
        DataError: two files give them different names.
    """
    parts = [each for of_split in distinct.values() for each in of_split]
    columns_of_labels = {each.column for each in parts}
    codes = [values.integers(each.part, each.column) for each in parts]
    seen = {code for of_part in codes for code in of_part or ()}
    texts = {text for each in parts for text in values.strings(each.part, each.column)}
    used: tuple[str, Mapping[int, str]] | None = None
    for each in [one for one in known if one.column is None or one.column in columns_of_labels]:
        names = each.of(seen)
        if any(one.column in one.part.class_names for one in parts):
            why = "the data has names of its own"
        elif texts and texts <= set(each.names.values()):
            why = "the labels are names already, and agree"
        elif any(of_part is None for of_part in codes):
            why = "the labels are no integers"
        elif isinstance(names, str):
            why = names
        elif used is None:
            used = each.source, names
            continue
        elif any(names[code] != used[1][code] for code in seen - {-1}):
            raise DataError(
                f"{used[0]} and {each.source} give the classes different names: "
                f"{_some(list(used[1].values()))}; {_some(list(names.values()))}.",
                "Keep the one that is right.",
            )
        else:
            continue
        notes.append(f"the names of classes in {each.source} are not used: {why}.")
    if used is None:
        return None
    notes.append(f"classes: called as in {used[0]}: {_some(list(used[1].values()))}")
    return used[1]


def _named(read: _Read, names: Mapping[int, str]) -> _Read:
    return dataclasses.replace(read, part=_with_names(read.part, read.columns.label, names))


def _with_names(part: Part, column: str, names: Mapping[int, str]) -> Part:
    part = values.with_positions(part, column, sorted(names))
    return part.named(column, [names[key] for key in sorted(names)])


def _check_overlap(built: Mapping[str, datasets.Dataset], guessed: bool, notes: list[str]) -> None:
    """See that what was guessed to be training data does not hold the rows of the others."""
    keys = [name for name in built["train"].column_names if name != LABEL]
    if not set(keys) <= {TEXT, PAIR}:
        return
    # A number of 64 bits for each text: two different ones of the same are none of ten.
    train = _hashes(built["train"], keys)
    for split in [name for name in built if name != "train"]:
        rows = np.unique(_hashes(built[split], keys))
        again = int(np.isin(rows, train).sum())
        if guessed and again >= max(_FEWEST_COMMON, len(rows) / 2):
            raise DataError(
                f"{again} of the {len(rows)} texts of the {split} data are in the files without a "
                "split in their names, too, which would be trained on.",
                "Name the files of training data train, and leave the others out.",
            )
        if again > len(rows) * _COMMON_SHARE:
            notes.append(
                f"{again} of the {len(rows)} texts of the {split} data are training rows, too."
            )


def _hashes(split: datasets.Dataset, columns: Sequence[str]) -> Array:
    """A number for each row, the same for the same texts."""
    parts = [np.empty(0, dtype=np.uint64)]
    for batch in split.select_columns(list(columns)).with_format("arrow").iter(_AT_ONCE):
        both = [pd.util.hash_array(batch[name].to_numpy()) for name in columns]
        parts.append(functools.reduce(lambda first, second: first * np.uint64(31) + second, both))
    return np.concatenate(parts)


def _classes(train: Sequence[_Distinct], shape: Shape) -> Labels:
    spelled = [label for each in train for label in shape.spell(each.part, each.column)]
    rows = sum(each.rows for each in train)
    return labels.classes(train[0].part, train[0].column, spelled, shape.problem, rows)


def _without_rows(like: Columns, known: Labels) -> datasets.Dataset:
    """What a host has of a split whose rows are all on others."""
    texts = dict.fromkeys((TEXT, PAIR)[: len(like.read)], pa.large_string())
    kinds = {TOKEN_IDS: pa.large_list(pa.int64())} if like.text == TOKEN_IDS else texts
    schema = pa.schema([*kinds.items(), (LABEL, _KINDS[known.problem])])
    return datasets.Dataset(schema.empty_table(), fingerprint=uuid.uuid4().hex)


def _build(split: str, parts: Sequence[_Read], shape: Shape, known: Labels) -> datasets.Dataset:
    tables = [
        pa.table({**_inputs(each), LABEL: _encoded(split, each, shape, known)}) for each in parts
    ]
    if len({tuple(table.column_names) for table in tables}) > 1:
        raise DataError(
            f"Some files of the {split} data hold texts and others {TOKEN_IDS}: "
            f"{', '.join(str(each.part.path) for each in parts)}.",
            "Give one kind.",
        )
    # A name instead of a hash of all rows, which nothing here caches by.
    return datasets.Dataset(pa.concat_tables(tables), fingerprint=uuid.uuid4().hex)


def _inputs(read: _Read) -> dict[str, pa.Array]:
    if read.columns.text == TOKEN_IDS:
        has_types = TYPE_IDS in read.part.table.column_names
        return {name: token_ids(read.part, name) for name in (TOKEN_IDS, TYPE_IDS)[: 1 + has_types]}
    found = {}
    for name, column in zip((TEXT, PAIR), read.columns.read, strict=False):
        values_ = read.part.table[column]
        if pa.types.is_string(values_.type) or pa.types.is_large_string(values_.type):
            found[name] = pc.fill_null(pc.cast(values_, pa.large_string()), "")
        else:
            texts = ["" if value is None else str(value) for value in values_.to_pylist()]
            found[name] = pa.array(texts, pa.large_string())
    return found


def token_ids(part: Part, name: str = TOKEN_IDS) -> pa.Array:
    """The column `input_ids` (or `token_type_ids`) without what its `attention_mask` says is
    padding."""
    kind = pa.large_list(pa.int64())
    columns_ = [name, "attention_mask"] if "attention_mask" in part.table.column_names else [name]
    kept = []
    for batch in part.table.select(columns_).to_batches(_AT_ONCE):
        rows = batch[name].to_pylist()
        if len(columns_) > 1:
            masks = batch["attention_mask"].to_pylist()
            rows = [
                [token for token, real in zip(ids, mask, strict=True) if real]
                for ids, mask in zip(rows, masks, strict=True)
            ]
        kept.append(pa.array(rows, kind))
    return pa.chunked_array(kept, kind)


def _encoded(split: str, read: _Read, shape: Shape, known: Labels) -> pa.Array:
    part, column = read.part, read.columns.label
    rows, codes = np.arange(part.table.num_rows), None
    if not pa.types.is_nested(part.table[column].type):
        rows, codes = firsts(part.table[column])
    try:
        spelled = shape.spell(part.select(rows.tolist()), column)
    except DataError:
        shape.spell(part, column)  # which knows how many rows are so
        raise
    strange = next((at for at, label in enumerate(spelled) if known.unknown(label)), None)
    if strange is not None:
        raise DataError(
            f"{part.where(int(rows[strange]))} has the label {known.unknown(spelled[strange])!r}, "
            f"which is in the {split} data but not in the training data ({_some(known.names)}).",
            "Give training rows of that label, or remove it.",
        )
    encoded = pa.array([known.encode(label) for label in spelled], _KINDS[known.problem])
    return encoded if codes is None else encoded.take(pa.array(codes))


def firsts(column: pa.ChunkedArray) -> tuple[Array, Array]:
    """The first row of each value of a column, in the order of the rows; and for each row the
    position of its value among these."""
    if pa.types.is_null(column.type):
        return np.arange(min(1, len(column))), np.zeros(len(column), dtype=np.int64)
    encoded = column.combine_chunks().dictionary_encode(null_encoding="encode")
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    # Values are numbered as they come.
    return np.unique(codes, return_index=True)[1], codes


def assign(
    built: Mapping[str, datasets.Dataset],
    strata: Callable[[datasets.Dataset], Any] | None,
    hyperparameters: Hyperparameters,
    hosts: Hosts = shards.ONE,
) -> tuple[datasets.Dataset, datasets.Dataset, datasets.Dataset | None, str]:
    """Training, evaluation and (beside validation data) test data, and in a line how they came.

    Args:
        strata: The class ids of a data set, of whose rows the same share is held out of each.
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
    given = strata(train) if strata else np.zeros(len(train), dtype=np.int64)
    # The rows of a host may be too few, those of all are not.
    can = hosts.each(len(given) > len(np.unique(given)))
    if hosts.sharded and any(can) and not can[hosts.names.index(hosts.of_processes[hosts.rank])]:
        kept, held_out = np.arange(len(given)), np.arange(0)
    else:
        kept, held_out = hold_out(given, HELD_OUT, hyperparameters.seed)
    how = "stratified, " if strata else ""
    count = sum(hosts.each(len(held_out)))
    where = " by their hosts" if hosts.sharded else ""
    rule = f"evaluation: {count} training rows held out{where}, {how}seed {hyperparameters.seed}"
    return train.select(kept), train.select(held_out), None, rule


def hold_out(class_ids: Sequence[int] | Array, share: float, seed: int) -> tuple[Array, Array]:
    """Positions to keep and to hold out, `share` of each class, the same for the same seed.

    A class keeps at least one row. The shares are rounded so that their sum is the share of all
    rows, and at least one row is held out.

    Raises:
        DataError: no class has two rows.
    """
    ids = np.asarray(class_ids)
    by_class = np.argsort(ids, kind="stable")
    keys, starts = np.unique(ids[by_class], return_index=True)
    positions = dict(zip(keys.tolist(), np.split(by_class, starts[1:]), strict=True))
    wanted = max(1, round(len(class_ids) * share))
    counts = {key: int(len(rows) * share) for key, rows in positions.items()}
    by_remainder = sorted(counts, key=lambda key: (len(positions[key]) * share) % 1, reverse=True)
    for key in [key for key in by_remainder if len(positions[key]) > counts[key] + 1]:
        if sum(counts.values()) < wanted:
            counts[key] += 1
    if not any(counts.values()):
        raise DataError(
            f"There are {len(class_ids)} training rows, too few to hold any out.",
            "Give more rows, or evaluation data in a channel called test.",
        )
    sample = random.Random(seed).sample
    chosen = [
        positions[key][sample(range(len(positions[key])), counts[key])] for key in sorted(counts)
    ]
    held_out = np.sort(np.concatenate(chosen))
    return np.delete(np.arange(len(ids)), held_out), held_out


def _describe(split: str, parts: Sequence[_Read]) -> str:
    rows = sum(each.part.table.num_rows for each in parts)
    kinds = ", ".join(sorted({each.part.format for each in parts}))
    chosen = sorted({(each.columns.read, each.columns.label) for each in parts})
    read = "; ".join(f"{_shown(texts)}, label column {label!r}" for texts, label in chosen)
    where = str(parts[0].part.path) if len(parts) == 1 else f"{len(parts)} files"
    taken = {name for texts, label in chosen for name in (*texts, label)}
    others = {name for each in parts for name in each.part.table.column_names} - taken
    others -= {TYPE_IDS, "attention_mask"} if TOKEN_IDS in taken else set()
    unread = f"; not read: {_some(sorted(others))}" if others else ""
    return f"{split} data: {rows} rows from {where}, {kinds}; {read}{unread}"


def _shown(texts: Sequence[str]) -> str:
    if len(texts) == 1:
        return f"text column {texts[0]!r}"
    return f"pairs of the text columns {texts[0]!r} and {texts[1]!r}, in this order"


def _describe_labels(known: Labels, train: datasets.Dataset, hosts: Hosts) -> list[str]:
    given = _column(train)
    rows = dict(zip(hosts.names, hosts.each(len(train)), strict=True))
    listed = _some([f"{name} {count}" for name, count in rows.items()])
    lines = [f"sharded: training rows of each host: {listed}"] if hosts.sharded else []
    if known.problem == labels.NUMBER:
        told = hosts.each((given.min(), given.max(), float(given.sum())) if len(given) else None)
        least, most, sums = zip(*filter(None, told), strict=True)
        mean = sum(sums) / sum(rows.values())
        lines.append(f"label: a number from {min(least):g} to {max(most):g}, {mean:.3g} on average")
        return lines
    counts: Counter[str] = Counter()
    for each in hosts.each(rows_of_classes(known, given)):
        counts.update(each)
    sizes = _some([f"{name} ({counts[name]} rows)" for name in known.names])
    how = ", of which a row has any number" if known.problem == labels.SEVERAL else ""
    return [*lines, f"labels: {len(known.names)}{how}: {sizes}"]


def rows_of_classes(known: Labels, given: Sequence[Any] | Array) -> dict[str, int]:
    """How many of the encoded labels `given` have each class."""
    encoded = np.asarray(given)
    if known.problem == labels.SINGLE:
        counts = np.bincount(encoded, minlength=len(known.names))
    else:
        counts = encoded.reshape(-1, len(known.names)).sum(axis=0)
    return dict(zip(known.names, counts.astype(int).tolist(), strict=True))


def _some(names: Sequence[str], most: int = 20) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
