"""Load the texts and labels of a job's channels, by split."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data import class_checks, held_out, labelled_rows, labels, values
from recipe.data.column_names import LABEL, PAIR, TEXT, TOKEN_IDS, TYPE_IDS
from recipe.data.files import text_files
from recipe.data.files.part import Part, is_list
from recipe.data.held_out import DataSets
from recipe.data.labelled_rows import LabelledPart
from recipe.data.labels import Labels
from recipe.data.layout import shards
from recipe.data.layout.shards import Hosts
from recipe.data.reading import Read, Reading, describe_files, read_columns
from recipe.errors import DataError, Problems, listed
from recipe.settings import DataSettings
from recipe.task_table import TASKS

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Splits(DataSets):
    """Data sets with the columns `text` (or `input_ids`, if it came tokenized) and `label`, and
    `text_pair` for pairs.

    A label is a class id, a float, or a float (0 or 1) for each class, as `labels.problem` says.
    """

    labels: Labels
    text_columns: tuple[str, ...] = (TEXT,)
    """The names of the columns of texts in the training data: one, or two of pairs."""


@dataclass(frozen=True, kw_only=True)
class _Distinct:
    """The distinct labels of a part, one row for each, without texts; sent to other hosts."""

    part: Part
    column: str
    rows: int
    """The number of rows of the whole part."""

    def named(self, names: Mapping[int, str]) -> _Distinct:
        """Return it with names for its classes."""
        return dataclasses.replace(self, part=_with_names(self.part, self.column, names))


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
        functools.partial(text_files.units, notes=notes, header=settings.names_in_header),
        hosts,
        values.check_no_tags,
    )
    texts_read = tuple(
        reading.columns[role] for role in (TEXT, PAIR, TOKEN_IDS) if role in reading.columns
    )
    with hosts.together():
        read = _labelled(reading, settings, notes)
    first_rows = functools.partial(_distinct, settings=settings)
    of_hosts = hosts.gather({split: [*map(first_rows, parts)] for split, parts in read.items()})
    distinct: dict[str, list[_Distinct]] = defaultdict(list)
    for of_host in of_hosts:
        for split, of_split in of_host.items():
            distinct[split] += of_split
    if settings.problem_type != labels.NUMBER:
        names = _names_of_classes(distinct, settings.class_names)
        if names is not None:
            for labelled_parts in read.values():
                labelled_parts[:] = [_named(part, names) for part in labelled_parts]
            distinct = {
                split: [part.named(names) for part in parts] for split, parts in distinct.items()
            }
    trained = [(column.part, column.column) for column in distinct["train"]]
    shape = labels.shape_of(trained, settings.label_separator, settings.problem_type)
    if shape.problem == labels.SINGLE and settings.problem_type is None:
        class_checks.check_classes(trained, sum(c.rows for c in distinct["train"]))
    if shape.problem == labels.NUMBER and settings.problem_type is None:
        class_checks.check_numbers(trained)
    if shape.problem == labels.SEVERAL and settings.problem_type is None:
        lists = [
            (part, name)
            for part, name in trained
            if name not in part.class_names and is_list(part.table[name].type)
        ]
        class_checks.check_lists(lists, sum(c.rows for c in distinct["train"]))
    spelled = [label for part, column in trained for label in shape.spell(part, column)]
    train_rows = sum(column.rows for column in distinct["train"])
    known = labels.classes(*trained[0], spelled, shape.problem, train_rows)
    with hosts.together():
        built = {
            split: labelled_rows.build(split, parts, shape, known) for split, parts in read.items()
        }
        for split in distinct.keys() - built.keys():  # its rows are all on other hosts
            texts = dict.fromkeys((TEXT, PAIR)[: len(texts_read)], pa.large_string())
            is_ids = TOKEN_IDS in reading.columns
            inputs = {TOKEN_IDS: pa.large_list(pa.int64())} if is_ids else texts
            schema = pa.schema([*inputs.items(), (LABEL, labelled_rows.KINDS[known.problem])])
            built[split] = held_out.data_set([schema.empty_table()])
    findings = [_describe(reading.files_of(split), parts) for split, parts in read.items()]
    strata = _column if known.problem == labels.SINGLE else None
    uses, rule = held_out.assign(built, settings, strata, hosts, reading.sharded)
    return Splits(
        **uses,
        labels=known,
        notes=[*notes, *findings, rule, *_describe_labels(known, uses["train"], hosts)],
        text_columns=texts_read,
    )


def _named(read: LabelledPart, names: Mapping[int, str]) -> LabelledPart:
    return dataclasses.replace(read, part=_with_names(read.part, read.label, names))


def _column(split: datasets.Dataset) -> Array:
    """Return the labels [rows] or [rows, classes]."""
    labels_of_rows: Array = values.column(split, LABEL)
    return labels_of_rows


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
            labelled = LabelledPart(part=part, texts=texts, label=label)
            read.setdefault(file.split, []).append(labelled)
    problems.check()
    return read


def _distinct(read: LabelledPart, settings: DataSettings) -> _Distinct:
    """Return the first row of each label."""
    column = read.label
    has_codes = bool(settings.label_separator) or settings.problem_type in (
        labels.SINGLE,
        labels.SEVERAL,
    )
    only = labelled_rows.distinct(read.part, column, has_codes)
    return _Distinct(part=only, column=column, rows=read.part.table.num_rows)


def _names_of_classes(
    distinct: Mapping[str, Sequence[_Distinct]], class_names: str | None
) -> Mapping[int, str] | None:
    """Return the names of the integers that are labels, by the hyperparameter class_names.

    Raises:
        DataError: the labels are not integers, have names already, or need more or fewer names.
    """
    if class_names is None:
        return None
    names = labels.listed_names(class_names)
    codes: set[int] = set()
    for labelled in itertools.chain.from_iterable(distinct.values()):
        of_part = values.integers(labelled.part, labelled.column)
        if of_part is None or labelled.column in labelled.part.class_names:
            raise DataError(
                f"class_names is given, and the labels in column {labelled.column!r} of "
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


def _with_names(part: Part, column: str, names: Mapping[int, str]) -> Part:
    part = values.with_positions(part, column, sorted(names))
    return part.named(column, [names[key] for key in sorted(names)])


def _describe(files: Sequence[Read], labelled: Sequence[LabelledPart]) -> str:
    rows = sum(read.part.table.num_rows for read in labelled)
    ids = (TYPE_IDS, "attention_mask") if TOKEN_IDS in files[0].columns else ()
    return describe_files(files, f"{rows} rows", more_read=ids)


def _describe_labels(known: Labels, train: datasets.Dataset, hosts: Hosts) -> list[str]:
    train_labels = _column(train)
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
