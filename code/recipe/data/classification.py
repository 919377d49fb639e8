"""Load the texts and labels of a job's channels, by split."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data import held_out, labels, values
from recipe.data.classes import class_checks, label_columns
from recipe.data.column_names import ADDRESS, LABEL, PAIR, TEXT, TOKEN_IDS, TYPE_IDS
from recipe.data.files import formats
from recipe.data.files.part import HeaderHint, Part, is_number, token_data
from recipe.data.files.spool import spooled_column
from recipe.data.held_out import DataSets, data_set
from recipe.data.labels import Labels, LabelShape
from recipe.data.layout import shards
from recipe.data.layout.shards import Hosts
from recipe.data.layout.splits import TRAIN
from recipe.data.reading import ChannelFiles, ReadFile, describe_files, read_columns
from recipe.errors import DataError, join_names
from recipe.settings import DataSettings
from recipe.task_table import TASKS

Array = npt.NDArray[Any]
_FEW_NUMBERS = 1_000
_PLAIN = (".txt", ".text", "")


@dataclass(frozen=True, kw_only=True)
class Splits(DataSets):
    """Data sets with the columns `text` (or `input_ids`, if it came tokenized) and `label`, and
    `text_pair` for pairs.

    A label is a class id, a float (or one for each column of numbers), or a float (0 or 1) for each
    class, as `labels.problem` says.
    """

    labels: Labels


_KINDS = {
    labels.SINGLE: pa.int64(),
    labels.SEVERAL: pa.list_(pa.float32()),
    labels.NUMBER: pa.float32(),
}
"""What the labels of each problem are in a table."""


def _kind(known: Labels) -> pa.DataType:
    kind = _KINDS[known.problem]
    return pa.list_(kind) if known.problem == labels.NUMBER and len(known.names) > 1 else kind


def load(channels: Mapping[str, Path], settings: DataSettings) -> Splits:
    """Read, label and split the data of a job's channels. Raise DataError, which names the channel,
    file, line or column that cannot be used, and the remedy."""
    hosts, notes = shards.job_hosts(), list[str]()
    reading = read_columns(
        channels,
        TASKS["text-classification"],
        settings,
        notes,
        functools.partial(_read, header=settings.names_in_header),
        hosts=hosts,
    )
    inputs = {role: reading.columns[role] for role in (TEXT, PAIR, TOKEN_IDS)
              if role in reading.columns}  # fmt: skip
    names = reading.columns.columns[LABEL]
    label = ",".join(names)
    settings = _with_problem(reading, names, settings, hosts)
    columns = names if settings.problem_type == labels.NUMBER and len(names) > 1 else ()
    distinct = extreme_numbers if columns else distinct_labels
    with hosts.together():
        read = reading.converted(
            functools.partial(_labelled, texts=inputs.values(), settings=settings, notes=notes)
        )
    of_hosts = hosts.gather([
        (distinct(part, label), part.table.num_rows, _empty_labels(part, label))
        for part in read.get("train", ())
    ])  # fmt: skip
    trained, rows, empty = zip(*itertools.chain(*of_hosts), strict=True)
    if len(names) > 1 and not columns:
        label_columns.check_alike(trained, label)
    missing, trains, rows_of_all = settings.missing_labels, settings.trains, sum(rows)
    shape = labels.shape_of(
        trained, label, settings.label_separator, settings.problem_type, missing, columns
    )
    if trains and settings.problem_type is None and settings.class_names is None:
        class_checks.CHECKS[shape.problem](trained, label, rows_of_all, missing)
    for part, count, total in zip(trained, empty, rows, strict=True):
        shape.check_filled(part, label, count, total)
    spelled = [row_label for part in trained for row_label in shape.spell(part, label)]
    known = labels.classes(trained[0], label, spelled, shape, rows_of_all, trains)
    written = known
    if settings.class_names is not None and settings.problem_type != labels.NUMBER:
        written, known = labels.name_codes(trained, label, known, settings.class_names)
    splits = set().union(*hosts.gather(set(read)))
    with hosts.together():
        built = {
            split: _build(split, parts, inputs, label, shape, written)
            for split, parts in read.items()
        }
        for split in splits - built.keys():  # its rows are all on other hosts
            kinds = {TOKEN_IDS: pa.large_list(pa.int64())}
            fields = [(role, kinds.get(role, pa.large_string())) for role in inputs]
            schema = pa.schema([*fields, (LABEL, _kind(known))])
            built[split] = data_set([schema.empty_table()])
    findings = [
        describe_files(
            reading.files_of(split),
            f"{sum(part.table.num_rows for part in parts)} rows",
            more_read=(TYPE_IDS, "attention_mask") if TOKEN_IDS in reading.columns else (),
        )
        for split, parts in read.items()
    ]
    is_single = known.problem == labels.SINGLE
    strata = functools.partial(values.read_column, name=LABEL) if is_single else None
    uses, rule = held_out.assign(built, reading, settings, strata, hosts)
    return Splits(
        **uses,
        labels=known,
        notes=[*notes, *findings, rule, *_describe_labels(known, uses["train"], hosts)],
    )


def _read(path: Path, header: HeaderHint) -> Part:
    """Return the rows of a file. Raises DataError if it is plain text, such as `pos/1.txt`."""
    is_plain = path.suffix.lower() in _PLAIN or path.suffix[1:].isdigit()  # 20 Newsgroups' 49960
    if is_plain and path.is_file() and not formats.is_structured(path):
        formats.read_texts(path, "document")  # raises the error of a format that is not read
        raise DataError(
            f"{path} is a plain text, without a label.",
            "Give task=masked-lm (task=causal-lm for a decoder) to learn the texts alone. Or write "
            "rows of a text and a label, of folders of classes such as by: python -c "
            '\'import json, pathlib; [print(json.dumps({"text": path.read_text(), '
            '"label": path.parts[1]})) for path in pathlib.Path("train").rglob("*") '
            "if path.is_file()]' > train.jsonl.",
        )
    part = formats.read(path, header=header)
    if part.format == "CoNLL":
        raise token_data(str(path), "it has a word and its tags on each line")
    return part


def _labelled(
    file: ReadFile, texts: Collection[str], settings: DataSettings, notes: list[str]
) -> Part:
    """Return a file with one column of labels, without rows that have none."""
    part, names = file.part, file.columns.columns[LABEL]
    for name in names:
        part = labels.labelled(part, name, settings.missing_labels)
    if unlabelled := file.part.table.num_rows - part.table.num_rows:
        notes.append(f"{unlabelled} rows of {part.path} have no label and are not used.")
    is_trained = file.split == TRAIN
    part, label = label_columns.one_label_column(part, names, settings, is_trained)
    part = label_columns.listed_labels(part, label)
    rows, lacking = part.table.num_rows, []
    for column in texts:
        values.check_texts(part, column)
        empty = values.empty_texts(part, column)
        lacking.append(rows > 1 and empty == rows)  # a file of one row may be of many
        if empty:
            notes.append(f"{empty} rows of {part.path} have no text in column {column!r}: "
                         "they are learned as empty texts.")  # fmt: skip
    if lacking and all(lacking):
        shown = " and ".join(map(repr, texts))
        raise DataError(
            f"{part.path} has no text in any row of {shown}.",
            "Name the column of the texts by text_column.",
        )
    for name in names if settings.problem_type == labels.NUMBER else [label]:
        values.check_labels(part, name)
    label_columns.check_not_of_words(part, label, texts)
    return part


def _with_problem(
    reading: ChannelFiles, names: Sequence[str], settings: DataSettings, hosts: Hosts
) -> DataSettings:
    """Return settings that say whether several columns of labels hold numbers, as they do if they
    hold nothing else and one has fractions."""
    if len(names) < 2 or settings.problem_type or settings.class_names is not None:
        return settings
    parts = [file.part for file in reading.files_of("train")]
    kinds = [label_columns.kinds_of_labels(part, names, settings) for part in parts]
    if set().union(*hosts.gather(set().union(*kinds))) != {label_columns.FRACTIONS}:
        return settings
    with hosts.together():
        for name in names if settings.trains and parts else ():
            class_checks.check_numbers(parts, name, 0)
    return dataclasses.replace(settings, problem_type=labels.NUMBER)


def _describe_labels(known: Labels, train: datasets.Dataset, hosts: Hosts) -> list[str]:
    train_labels = values.read_column(train, LABEL)
    rows = dict(zip(hosts.names, hosts.gather(len(train)), strict=True))
    of_hosts = join_names([f"{name} {count}" for name, count in rows.items()])
    lines = [f"sharded: training rows of each host: {of_hosts}"] if hosts.sharded else []
    if known.problem == labels.NUMBER:
        columns = train_labels.reshape(-1, len(known.names)).T
        for name, numbers in zip(known.names, columns, strict=True):
            ranges = hosts.gather(
                (numbers.min(), numbers.max(), float(numbers.sum())) if len(numbers) else None
            )
            least, most, sums = zip(*filter(None, ranges), strict=True)
            mean = sum(sums) / sum(rows.values())
            what = "label" if len(columns) == 1 else name
            span = f"from {min(least):g} to {max(most):g}"
            lines.append(f"{what}: a number {span}, {mean:.3g} on average")
        return lines
    counts: Counter[str] = Counter()
    for host_counts in hosts.gather(rows_of_classes(known, train_labels)):
        counts.update(host_counts)
    sizes = join_names([f"{name} ({counts[name]} rows)" for name in known.names])
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
    split: str,
    parts: Sequence[Part],
    inputs: Mapping[str, str],
    label: str,
    shape: LabelShape,
    known: Labels,
) -> datasets.Dataset:
    """Return the rows of a split with their inputs and encoded labels.

    Args:
        inputs: The columns of texts or token ids, by their roles.
    """
    tables = []
    for part in parts:
        columns = {
            role: values.token_ids(part, column)
            if role == TOKEN_IDS
            else values.texts(part, column)
            for role, column in inputs.items()
        }
        if TOKEN_IDS in inputs and TYPE_IDS in part.table.column_names:
            columns[TYPE_IDS] = values.token_ids(part, TYPE_IDS)
        columns[LABEL] = encoded(split, part, label, shape, known)
        tables.append(pa.table({**columns, ADDRESS: part.addresses()}))
    if len({tuple(table.column_names) for table in tables}) > 1:
        raise DataError(
            f"Some files of the {split} data have {TYPE_IDS}, and others have not: "
            f"{', '.join(str(part.path) for part in parts)}.",
            "Give them in all files.",
        )
    return data_set(tables)


def encoded(
    split: str, part: Part, column: str, shape: LabelShape, known: Labels
) -> pa.ChunkedArray:
    """Return the labels of all rows, encoded some rows at a time to keep few Python objects."""
    kind = _kind(known)

    only = dataclasses.replace(part, table=part.table.select([column]))

    def batches() -> Iterator[pa.Array]:
        for first, batch in only.batches([column]):
            rows, codes = np.arange(batch.num_rows), None
            if not pa.types.is_nested(batch[column].type):
                rows, codes = _firsts(batch[column])
            try:
                spelled = shape.spell(only.select(first + rows), column)
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
                    f"the training data ({join_names(known.names)}).",
                    "Give training rows of that label, remove it, or list it in missing_labels to "
                    "leave its rows out.",
                )
            labels_of_rows = pa.array([known.encode(label) for label in spelled], kind)
            yield labels_of_rows if codes is None else labels_of_rows.take(pa.array(codes))

    return spooled_column(kind, batches())


def _empty_labels(part: Part, column: str) -> int:
    """Return how many rows have no label; 0 if labels are lists."""
    is_nested = pa.types.is_nested(part.table.schema.field(column).type)
    return 0 if is_nested else len(labels.empty_labels(part, column))


def distinct_labels(part: Part, column: str) -> Part:
    """Return the first row of each label, without other columns; of numbers with fractions, which
    cannot be classes, those of a few."""
    rows: list[int] = []
    known: set[Any] = set()
    has_fraction = False
    for first, batch in part.batches([column]):
        values_ = batch[column]
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
            has_fraction = has_fraction or labels.is_fraction(str(cell))
    return dataclasses.replace(part, table=part.table.select([column])).select(rows)


def extreme_numbers(part: Part, column: str) -> Part:
    """Return the rows with the least and the largest number of each column, in lists of these."""
    cells = part.table[column].combine_chunks()
    if not len(cells):
        return part
    numbers = cells.flatten().to_numpy().reshape(len(cells), -1)
    rows = np.union1d(numbers.argmin(axis=0), numbers.argmax(axis=0))
    return dataclasses.replace(part, table=part.table.select([column])).select(rows)


def _firsts(column: pa.Array) -> tuple[Array, Array]:
    """Return the first row of each value, in the order of the rows, and each row's value by its
    position among these."""
    if pa.types.is_null(column.type):
        return np.arange(min(1, len(column))), np.zeros(len(column), dtype=np.int64)
    encoded = column.dictionary_encode(null_encoding="encode")
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    # Values are numbered in the order in which they come.
    return np.unique(codes, return_index=True)[1], codes
