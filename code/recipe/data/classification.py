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

from recipe.data import column_content, columns, held_out, labelled_rows, labels, values
from recipe.data.column_names import (
    GRADE_NAMES,
    LABEL,
    LABEL_NAMES,
    PAIR,
    SURE_LABELS,
    TEXT,
    TEXT_NAMES,
    TOKEN_IDS,
    TYPE_IDS,
    plain,
)
from recipe.data.evidence import Evidence, Recognised
from recipe.data.files import text_files
from recipe.data.files.part import Part, is_list, is_string
from recipe.data.held_out import DataSets
from recipe.data.labelled_rows import Read
from recipe.data.labels import Labels
from recipe.data.layout import channels as layout
from recipe.data.layout import shards
from recipe.data.layout.shards import Hosts
from recipe.data.reading import accepted, describe, read_parts
from recipe.data.text_columns import Columns, of_labelled_texts
from recipe.errors import DataError, Problems, listed
from recipe.settings import DataSettings

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
    hosts = shards.of_job()
    with hosts.together():
        places = layout.find(channels, settings.dataset_config_name, hosts.sharded)
        notes = list(places.notes)
        parts = read_parts(places, notes, functools.partial(text_files.units, notes=notes))
        first = next((part for split, part in parts if split == "train" and hosts.sharded), None)
        local = None if first is None else _choose(first, settings, None, [])[1]
    like = hosts.first(local)
    with hosts.together():
        read = _read_splits(parts, settings, notes, like)
        like = like or read["train"][0].columns
    first_rows = functools.partial(_distinct, settings=settings)
    of_hosts = hosts.each({split: [*map(first_rows, of)] for split, of in read.items()})
    distinct: dict[str, list[_Distinct]] = defaultdict(list)
    for of_host in of_hosts:
        for split, of_split in of_host.items():
            distinct[split] += of_split
    if settings.problem_type != labels.NUMBER:
        names = _names_of_classes(distinct, settings.class_names)
        if names is not None:
            for of in read.values():
                of[:] = [_named(part, names) for part in of]
            distinct = {split: [part.named(names) for part in of] for split, of in distinct.items()}
    trained = [(column.part, column.column) for column in distinct["train"]]
    shape = labels.shape_of(trained, settings.label_separator, settings.problem_type)
    if shape.problem == labels.SINGLE and settings.problem_type is None:
        values.check_classes(trained)
    spelled = [label for part, column in trained for label in shape.spell(part, column)]
    train_rows = sum(column.rows for column in distinct["train"])
    known = labels.classes(*trained[0], spelled, shape.problem, train_rows)
    with hosts.together():
        built = {split: labelled_rows.build(split, of, shape, known) for split, of in read.items()}
        for split in distinct.keys() - built.keys():  # its rows are all on other hosts
            texts = dict.fromkeys((TEXT, PAIR)[: len(like.read)], pa.large_string())
            inputs = {TOKEN_IDS: pa.large_list(pa.int64())} if like.text == TOKEN_IDS else texts
            schema = pa.schema([*inputs.items(), (LABEL, labelled_rows.KINDS[known.problem])])
            built[split] = held_out.data_set([schema.empty_table()])
    findings = [_describe(split, of) for split, of in read.items()]
    strata = _column if known.problem == labels.SINGLE else None
    uses, rule = held_out.assign(built, settings, strata, hosts, places.sharded)
    return Splits(
        **uses,
        labels=known,
        found=[*notes, *findings, rule, *_describe_labels(known, uses["train"], hosts)],
        text_columns=like.read,
    )


def _named(read: Read, names: Mapping[int, str]) -> Read:
    return dataclasses.replace(read, part=_with_names(read.part, read.columns.label, names))


def _column(split: datasets.Dataset) -> Array:
    """Return the labels [rows] or [rows, classes]."""
    labels_of_rows: Array = values.column(split, LABEL)
    return labels_of_rows


def recognise(evidence: Evidence) -> Recognised | None:
    """Return that the first rows have texts and a label for each.

    Not certain are completions of prompts, labels beside lists of texts or beside answers to
    prefer, numbers for pairs of texts, and columns that have to be named first.
    """
    part, settings = evidence.part, evidence.settings
    if part is None:
        return None
    try:
        part, chosen = _choose(part, settings, None, [])
        for column in chosen.read:
            values.check_texts(part, column)
        part = values.with_labels(part, chosen.label)
    except DataError as error:
        if not column_content.possible_labels(part, part.table.column_names):
            return None
        reason = error.message.removesuffix(".")
        remedy = error.remedy or "Name them in text_column and label_column."
        return Recognised(reason=reason, certain=False, remedy=remedy)
    different = {str(value) for value in part.table[chosen.label].to_pylist()}
    if column_content.is_text(part, chosen.label) and len(different) > max(
        2, part.table.num_rows // 2
    ):
        return None  # most rows have different texts
    reason = f"column {chosen.label} holds labels of {' and '.join(chosen.read)}"
    read = {*chosen.read, chosen.label}
    is_other = bool(read & {*(evidence.prompts or ())[1:]})
    if chosen.pair is not None and plain(chosen.label) not in SURE_LABELS:
        is_grade = plain(chosen.label) in GRADE_NAMES
        is_other |= is_grade or labels.shape_of([(part, chosen.label)]).problem == labels.NUMBER
    is_other |= None not in (evidence.named(["chosen"]), evidence.named(["rejected"]))
    for name in set(part.table.column_names) - read:
        kind = part.table.schema.field(name).type
        is_other |= is_list(kind) and (
            is_string(kind.value_type) or pa.types.is_nested(kind.value_type)
        )
    return Recognised(reason=reason, certain=not is_other)


def _read_splits(
    parts: Sequence[tuple[str, Part]],
    settings: DataSettings,
    notes: list[str],
    like: Columns | None,
) -> dict[str, list[Read]]:
    """Return the parts of each split with their columns.

    Args:
        like: The columns of the training data, if another host decides; by default those of the
            first part.
    """
    read: dict[str, list[Read]] = {}
    problems = Problems()
    for split, part in parts:
        with problems.noted():
            if split == "test" and like is not None and not _has_label(part, like.label):
                notes.append(f"{part.path} has no column of labels and is not used.")
                continue
            if split == "test" and like is not None and not _has_text(part, like):
                notes.append(f"{part.path} has no column of texts and is not used.")
                continue
            part, chosen = _choose(part, settings, like, notes)
            like = like or chosen
            if split != "train" and labels.is_unlabelled(part, chosen.label):
                notes.append(f"{part.path} has no labels and is not used.")
                continue
            rows = part.table.num_rows
            part = labels.labelled(part, chosen.label, is_pair=chosen.pair is not None)
            if unlabelled := rows - part.table.num_rows:
                notes.append(f"{unlabelled} rows of {part.path} have no label and are not used.")
            for column in chosen.read:
                values.check_texts(part, column)
                if empty := values.empty_texts(part, column):
                    notes.append(f"{empty} rows of {part.path} have no text in column {column!r}: "
                                 "they are learned as empty texts.")  # fmt: skip
            part = values.with_labels(part, chosen.label)
            read.setdefault(split, []).append(Read(part=part, columns=chosen))
    problems.check()
    return read


def _choose(
    part: Part, settings: DataSettings, like: Columns | None, notes: list[str]
) -> tuple[Part, Columns]:
    """Return the rows that an annotator accepted, and the columns to read of them."""
    columns.check_named(part, settings)
    for name in part.table.column_names:
        if plain(name) in (*TEXT_NAMES, "tokens", "words"):
            values.check_untagged(part, name)
    label = settings.label_column
    part, label = values.with_indicators(accepted(part, label, notes), label)
    return part, of_labelled_texts(part, settings, label, like)


def _distinct(read: Read, settings: DataSettings) -> _Distinct:
    """Return the first row of each label."""
    column, are_cut = read.columns.label, settings.label_separator is not None
    only = labelled_rows.distinct(read.part, column, are_cut)
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


def _describe(split: str, parts: Sequence[Read]) -> str:
    rows = sum(read.part.table.num_rows for read in parts)
    read = []
    columns_read: set[str] = set()
    for texts, label in sorted({(one.columns.read, one.columns.label) for one in parts}):
        shown = f"text column {texts[0]!r}"
        if len(texts) > 1:
            shown = f"pairs of the text columns {texts[0]!r} and {texts[1]!r}, in this order"
        read.append(f"{shown}, label column {label!r}")
        columns_read |= {*texts, label, *label.split(",")}
    columns_read |= {TYPE_IDS, "attention_mask"} if TOKEN_IDS in columns_read else set()
    return describe(
        split, [one.part for one in parts], f"{rows} rows", "; ".join(read), columns_read
    )


def _describe_labels(known: Labels, train: datasets.Dataset, hosts: Hosts) -> list[str]:
    train_labels = _column(train)
    rows = dict(zip(hosts.names, hosts.each(len(train)), strict=True))
    of_hosts = listed([f"{name} {count}" for name, count in rows.items()])
    lines = [f"sharded: training rows of each host: {of_hosts}"] if hosts.sharded else []
    if known.problem == labels.NUMBER:
        ranges = hosts.each(
            (train_labels.min(), train_labels.max(), float(train_labels.sum()))
            if len(train_labels)
            else None
        )
        least, most, sums = zip(*filter(None, ranges), strict=True)
        mean = sum(sums) / sum(rows.values())
        lines.append(f"label: a number from {min(least):g} to {max(most):g}, {mean:.3g} on average")
        return lines
    counts: Counter[str] = Counter()
    for of_host in hosts.each(rows_of_classes(known, train_labels)):
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


def _has_text(part: Part, like: Columns) -> bool:
    """Return whether `part` has the text columns of the training data, or another with texts."""
    names = part.table.column_names
    nested = any(pa.types.is_nested(kind) for kind in part.table.schema.types)
    return (
        set(like.read) <= set(names)
        or nested
        or any(column_content.is_text(part, name) for name in names)
    )


def _has_label(part: Part, label: str) -> bool:
    """Return whether `part` has the label column of the training data (several with commas, if
    they are indicators), or one with a name that such columns have.
    """
    names = part.table.column_names
    whole = label in names or set(label.split(",")) <= set(names)
    return whole or columns.first_known(part, LABEL_NAMES) is not None
