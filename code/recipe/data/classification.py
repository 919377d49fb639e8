"""Load the texts and labels of a job's channels, by split."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from recipe.data import class_checks, held_out, labels, values
from recipe.data.column_names import LABEL, PAIR, TEXT, TOKEN_IDS, TYPE_IDS
from recipe.data.files import text_files
from recipe.data.files.part import Part, is_number, is_string
from recipe.data.files.spool import spooled_column
from recipe.data.held_out import DataSets, data_set
from recipe.data.labels import Labels, LabelShape
from recipe.data.layout import shards
from recipe.data.layout.shards import Hosts
from recipe.data.reading import Reading, describe_files, read_columns
from recipe.errors import DataError, Problems, listed
from recipe.settings import DataSettings
from recipe.task_table import TASKS

Array = npt.NDArray[Any]
_FEW_NUMBERS = 1_000


@dataclass(frozen=True, kw_only=True)
class Splits(DataSets):
    """Data sets with the columns `text` (or `input_ids`, if it came tokenized) and `label`, and
    `text_pair` for pairs.

    A label is a class id, a float, or a float (0 or 1) for each class, as `labels.problem` says.
    """

    labels: Labels
    text_columns: tuple[str, ...] = (TEXT,)
    """The names of the columns of texts in the training data: one, or two of pairs."""


_KINDS = {
    labels.SINGLE: pa.int64(),
    labels.SEVERAL: pa.list_(pa.float32()),
    labels.NUMBER: pa.float32(),
}
"""What the labels of each problem are in a table."""


@dataclass(frozen=True, kw_only=True)
class LabelledPart:
    """The rows of a file, and the columns of texts (or token ids) and labels in it."""

    part: Part
    texts: tuple[str, ...]
    """One, or the two of a pair in their order."""
    label: str
    rows: int
    """Those of the file, also where `part` has the first of each label only."""

    def named(self, names: Mapping[int, str]) -> LabelledPart:
        """Return it with names for the integers that are its labels."""
        codes = sorted(names)
        part = values.with_positions(self.part, self.label, codes)
        part = part.named(self.label, [names[code] for code in codes])
        return dataclasses.replace(self, part=part)


def load(channels: Mapping[str, Path], settings: DataSettings) -> Splits:
    """Read, label and split the data of a job's channels.

    Raises:
        DataError: names the channel, file, line or column that cannot be used, and the remedy.
    """
    hosts, notes = shards.job_hosts(), list[str]()
    reading = read_columns(
        channels,
        TASKS["text-classification"],
        settings,
        notes,
        units=functools.partial(text_files.units, notes=notes, header=settings.names_in_header),
        hosts=hosts,
        check=values.check_no_tags,
    )
    texts_read = tuple(
        reading.columns[role] for role in (TEXT, PAIR, TOKEN_IDS) if role in reading.columns
    )
    with hosts.together():
        read = _labelled(reading, settings, notes)
    are_classes = settings.problem_type in (labels.SINGLE, labels.SEVERAL)
    has_codes = are_classes or bool(settings.label_separator)
    of_hosts = hosts.gather({
        split: [distinct_labels(part, has_codes) for part in parts]
        for split, parts in read.items()
    })  # fmt: skip
    distinct: dict[str, list[LabelledPart]] = defaultdict(list)
    for of_host in of_hosts:
        for split, of_split in of_host.items():
            distinct[split] += of_split
    if settings.problem_type != labels.NUMBER:
        names = _names_of_classes(distinct, settings.class_names)
        if names is not None:
            for parts in (*read.values(), *distinct.values()):
                parts[:] = [part.named(names) for part in parts]
    trained = [(read_part.part, read_part.label) for read_part in distinct["train"]]
    train_rows = sum(read_part.rows for read_part in distinct["train"])
    shape = labels.shape_of(trained, settings.label_separator, settings.problem_type)
    if settings.problem_type is None:
        class_checks.CHECKS[shape.problem](trained, train_rows)
    spelled = [label for part, column in trained for label in shape.spell(part, column)]
    known = labels.classes(*trained[0], spelled, shape.problem, train_rows)
    with hosts.together():
        built = {split: _build(split, parts, shape, known) for split, parts in read.items()}
        for split in distinct.keys() - built.keys():  # its rows are all on other hosts
            texts = dict.fromkeys((TEXT, PAIR)[: len(texts_read)], pa.large_string())
            is_ids = TOKEN_IDS in reading.columns
            inputs = {TOKEN_IDS: pa.large_list(pa.int64())} if is_ids else texts
            schema = pa.schema([*inputs.items(), (LABEL, _KINDS[known.problem])])
            built[split] = data_set([schema.empty_table()])
    findings = [
        describe_files(
            reading.files_of(split),
            f"{sum(part.rows for part in parts)} rows",
            more_read=(TYPE_IDS, "attention_mask") if TOKEN_IDS in reading.columns else (),
        )
        for split, parts in read.items()
    ]
    is_single = known.problem == labels.SINGLE
    strata = functools.partial(values.column, name=LABEL) if is_single else None
    uses, rule = held_out.assign(built, settings, strata, hosts, reading.sharded)
    return Splits(
        **uses,
        labels=known,
        notes=[*notes, *findings, rule, *_describe_labels(known, uses["train"], hosts)],
        text_columns=texts_read,
    )


def _labelled(
    reading: Reading, settings: DataSettings, notes: list[str]
) -> dict[str, list[LabelledPart]]:
    """Return the files of each split with one column of labels, without rows that have none."""
    read: dict[str, list[LabelledPart]] = {}
    problems = Problems()
    for file in reading.files:
        with problems.noted():
            texts = tuple(file.columns[role] for role in (TEXT, PAIR, TOKEN_IDS)
                          if role in file.columns)  # fmt: skip
            part, names = file.part, file.columns.columns[LABEL]
            for name in names:
                part = labels.labelled(part, name, settings.missing_labels)
            if unlabelled := file.part.table.num_rows - part.table.num_rows:
                notes.append(f"{unlabelled} rows of {part.path} have no label and are not used.")
            part, label = values.one_label_column(part, names)
            for column in texts:
                values.check_texts(part, column)
                if empty := values.empty_texts(part, column):
                    notes.append(f"{empty} rows of {part.path} have no text in column {column!r}: "
                                 "they are learned as empty texts.")  # fmt: skip
            part = values.with_labels(part, label)
            rows = part.table.num_rows
            labelled = LabelledPart(part=part, texts=texts, label=label, rows=rows)
            read.setdefault(file.split, []).append(labelled)
    problems.check()
    return read


def _names_of_classes(
    distinct: Mapping[str, Sequence[LabelledPart]], class_names: str | None
) -> Mapping[int, str] | None:
    """Return the names of the integers that are labels, by the hyperparameter class_names."""
    if class_names is None:
        return None
    names = labels.listed_names(class_names)
    codes: set[int] = set()
    for labelled in itertools.chain.from_iterable(distinct.values()):
        of_part = values.integers(labelled.part, labelled.label)
        if of_part is None or labelled.label in labelled.part.class_names:
            raise DataError(
                f"class_names is given, and the labels in column {labelled.label!r} of "
                f"{labelled.part.path} have names already.",
                "Leave class_names out: it names labels that are integers.",
            )
        codes |= of_part - {-1}
    first = 0 if 0 in codes else 1
    if not codes <= set(range(first, first + len(names))) or (first and len(names) not in codes):
        raise DataError(
            f"class_names has {len(names)} names, and the labels are "
            f"{listed(list(map(str, sorted(codes))))}.",
            "Give a name for each number from 0 on (or exactly from 1 to the last one).",
        )
    return dict(enumerate(names, first))


def _describe_labels(known: Labels, train: datasets.Dataset, hosts: Hosts) -> list[str]:
    train_labels = values.column(train, LABEL)
    rows = dict(zip(hosts.names, hosts.gather(len(train)), strict=True))
    of_hosts = listed([f"{name} {count}" for name, count in rows.items()])
    lines = [f"sharded: training rows of each host: {of_hosts}"] if hosts.sharded else []
    if known.problem == labels.NUMBER:
        ranges = hosts.gather(
            (train_labels.min(), train_labels.max(), float(train_labels.sum()))
            if len(train_labels)
            else None
        )
        least, most, sums = zip(*filter(None, ranges), strict=True)
        mean = sum(sums) / sum(rows.values())
        lines.append(f"label: a number from {min(least):g} to {max(most):g}, {mean:.3g} on average")
        return lines
    counts: Counter[str] = Counter()
    for of_host in hosts.gather(rows_of_classes(known, train_labels)):
        counts.update(of_host)
    sizes = listed([f"{name} ({counts[name]} rows)" for name in known.names])
    how = " (any number per row)" if known.problem == labels.SEVERAL else ""
    return [*lines, f"{len(known.names)} labels{how}: {sizes}"]


def rows_of_classes(known: Labels, encoded_labels: Sequence[Any] | Array) -> dict[str, int]:
    """Return how many of the encoded labels have each class."""
    encoded = np.asarray(encoded_labels)
    if known.problem == labels.SINGLE:
        counts = np.bincount(encoded, minlength=len(known.names))
    else:
        counts = encoded.reshape(-1, len(known.names)).sum(axis=0)
    return dict(zip(known.names, counts.astype(int).tolist(), strict=True))


def _build(
    split: str, parts: Sequence[LabelledPart], shape: LabelShape, known: Labels
) -> datasets.Dataset:
    """Return the rows of a split with their inputs and encoded labels."""
    tables = []
    for read in parts:
        table = read.part.table
        if read.texts == (TOKEN_IDS,):
            has_types = TYPE_IDS in table.column_names
            names = (TOKEN_IDS, TYPE_IDS)[: 1 + has_types]
            inputs = {name: values.token_ids(read.part, name) for name in names}
        else:
            texts = [table[column] for column in read.texts]
            strings = [
                column
                if is_string(column.type)
                else pa.chunked_array(
                    [[None if value is None else str(value) for value in column.to_pylist()]],
                    pa.large_string(),
                )
                for column in texts
            ]
            inputs = {
                name: pc.fill_null(pc.cast(column, pa.large_string()), "")
                for name, column in zip((TEXT, PAIR), strings, strict=False)
            }
        tables.append(
            pa.table({**inputs, LABEL: encoded(split, read.part, read.label, shape, known)})
        )
    if len({tuple(table.column_names) for table in tables}) > 1:
        raise DataError(
            f"Some files of the {split} data hold texts and others {TOKEN_IDS}: "
            f"{', '.join(str(read.part.path) for read in parts)}.",
            "Give one kind.",
        )
    return data_set(tables)


def encoded(
    split: str, part: Part, column: str, shape: LabelShape, known: Labels
) -> pa.ChunkedArray:
    """Return the labels of all rows, encoded some rows at a time to keep few Python objects."""
    kind = _KINDS[known.problem]

    def pieces() -> Iterator[pa.Array]:
        for first, piece in part.pieces(column):
            rows, codes = np.arange(piece.table.num_rows), None
            if not pa.types.is_nested(piece.table[column].type):
                rows, codes = _firsts(piece.table[column])
            try:
                spelled = shape.spell(piece.select(rows), column)
            except DataError:
                shape.spell(part, column)  # which knows how many rows are affected
                raise
            strange = next(
                (index for index, label in enumerate(spelled) if known.unknown(label)), None
            )
            if strange is not None:
                raise DataError(
                    f"{part.where(first + int(rows[strange]))} has the label "
                    f"{known.unknown(spelled[strange])!r}, which is in the {split} data but not in "
                    f"the training data ({listed(known.names)}).",
                    "Give training rows of that label, remove it, or list it in missing_labels to "
                    "leave its rows out.",
                )
            labels_of_rows = pa.array([known.encode(label) for label in spelled], kind)
            yield labels_of_rows if codes is None else labels_of_rows.take(pa.array(codes))

    return spooled_column(kind, pieces())


def distinct_labels(labelled: LabelledPart, has_codes: bool) -> LabelledPart:
    """Return the first row of each label, without other columns.

    Numbers with fractions that cannot be classes are reduced to a few.

    Args:
        has_codes: Whether numbers with fractions may be classes, or a string several labels.
    """
    part, column = labelled.part, labelled.label
    rows: list[int] = []
    known: set[Any] = set()
    has_fraction = False
    for first, piece in part.pieces(column):
        values_ = piece.table[column]
        if pa.types.is_nested(values_.type):
            cells = [json.dumps(row, default=str) for row in values_.to_pylist()]
            new = np.arange(len(cells))
        else:
            new = _firsts(values_)[0]
            cells = values_.take(pa.array(new)).to_pylist()
        for index, cell in zip(new.tolist(), cells, strict=True):
            if cell in known:
                continue
            if (
                has_fraction
                and len(rows) >= _FEW_NUMBERS
                and is_number(str(cell))
                and math.isfinite(float(cell))
            ):
                continue
            known.add(cell)
            rows.append(first + index)
            has_fraction = has_fraction or (not has_codes and labels.is_fraction(str(cell)))
    only = dataclasses.replace(part, table=part.table.select([column]))
    return dataclasses.replace(labelled, part=only.select(rows))


def _firsts(column: pa.ChunkedArray) -> tuple[Array, Array]:
    """Return the first row of each value, in the order of the rows, and each row's value by its
    position among these."""
    if pa.types.is_null(column.type):
        return np.arange(min(1, len(column))), np.zeros(len(column), dtype=np.int64)
    encoded = column.combine_chunks().dictionary_encode(null_encoding="encode")
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    # Values are numbered in the order in which they come.
    return np.unique(codes, return_index=True)[1], codes
