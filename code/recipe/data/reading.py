"""Read the files of a layout into parts, each of one split."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data import values
from recipe.data.column_names import SPLIT_COLUMNS, SPLITS, split_of
from recipe.data.column_settings import check_ignored, quoted
from recipe.data.columns import Selection, select
from recipe.data.files import formats
from recipe.data.files.part import Part, is_string
from recipe.data.layout import channels as layout_of_channels
from recipe.data.layout import shards
from recipe.data.layout.channels import ChannelLayout
from recipe.data.layout.shards import Hosts
from recipe.data.layout.splits import ORDER, TRAIN
from recipe.errors import DataError, Problems, listed
from recipe.settings import DataSettings, separated
from recipe.spec import TaskSpec, normalized

Converted = TypeVar("Converted")
Unit = Callable[[], Part]
Units = Callable[[Sequence[Path]], Sequence[Unit]]
"""Returns a reader of each part of the files of a split; a part may combine several files."""

_MOST_VALUES = 10
_LONGEST_VALUE = 30  # characters
_UNUSED = {"unsup", "unsupervised", "unlabeled", "unlabelled", "unassigned", "unused", "none", ""}
_SPLIT_NAMES = tuple(map(normalized, SPLIT_COLUMNS))
_FLAGS = {
    f"{verb}{word}": split
    for split, words in SPLITS.items()
    for word in words
    for verb in ("is", "in")
}
"""Normalized names of columns that hold whether a row belongs to a split."""
_SURELY_SPLITS = {"split", "splits", "datasetsplit", "datasplit", "partition"}
_PERHAPS_FLAGS = {word for words in SPLITS.values() for word in words} - {"train"}
_OF_SPLITS = "has the split of each row"
TRUE = {"true", "1", "1.0", "yes"}
FALSE = {"false", "0", "0.0", "no"}


@dataclass(frozen=True, kw_only=True)
class Read:
    """The rows of a file, and the columns that are read."""

    split: str
    part: Part
    columns: Selection


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The files of a job's channels."""

    files: Sequence[Read]
    """The training data first. A sharded host may have none."""
    columns: Selection
    """Those of the training data."""
    sharded: frozenset[str]
    """The splits of which this host has only a part of the rows."""

    def converted(self, convert: Callable[[Read], Converted]) -> dict[str, list[Converted]]:
        """Return what `convert` makes of the files of each split. Raise its DataErrors as one."""
        by_split: dict[str, list[Converted]] = {}
        problems = Problems()
        for file in self.files:
            with problems.noted():
                by_split.setdefault(file.split, []).append(convert(file))
        problems.check()
        return by_split

    def files_of(self, split: str) -> list[Read]:
        """Return the files of a split."""
        return [read for read in self.files if read.split == split]

    @property
    def splits(self) -> list[str]:
        """Return the splits that have files."""
        return list(dict.fromkeys(read.split for read in self.files))


def read_columns(
    channels: Mapping[str, Path],
    spec: TaskSpec,
    settings: DataSettings,
    notes: list[str],
    read: Callable[[Path], Part] | None = None,
    units: Units | None = None,
    hosts: Hosts = shards.ONE,
    check: Callable[[Part], None] | None = None,
) -> Reading:
    """Read the files of a job's channels, and choose the columns of each.

    Test data without targets is left out. If channels are sharded, the first host with training
    data decides.

    Args:
        notes: A sentence is added for each file or row that is left out.
        read: Reads a file; by default `formats.read`.
        units: Returns a reader of each part; by default each file is one.
        check: Raises DataError for a part that cannot be read, before its columns are chosen.

    Raises:
        DataError: names the channel, file, line or column that cannot be used, and the remedy.
    """
    problems = Problems()
    files: list[Read] = []
    read = read or functools.partial(formats.read, header=settings.names_in_header)
    units = units or (lambda paths: [functools.partial(read, path) for path in paths])
    with hosts.together():
        layout = layout_of_channels.find(channels, settings.dataset_config_name, hosts.sharded)
        notes += layout.notes
        parts = [
            (split, accepted(part, settings.label_column, notes))
            for split, part in _read_parts(layout, notes, settings, units)
        ]
        local = None
        if hosts.sharded and parts and parts[0][0] == TRAIN:
            local = select(parts[0][1], spec, settings)
    training = hosts.first(local)
    with hosts.together():
        if not hosts.sharded:  # another host may have the file with that column
            check_ignored([part for _, part in parts], settings)
        for split, part in parts:
            with problems.noted():
                if check is not None:
                    check(part)
                if not is_labelled(split, part, spec, settings, training, notes):
                    continue
                columns = select(part, spec, settings, training, is_trained=split == TRAIN)
                training = training or columns
                values.check_inputs(part, columns)
                files.append(Read(split=split, part=part, columns=columns))
        problems.check()
    assert training is not None  # `_read_parts` checks that
    return Reading(files=files, columns=training, sharded=layout.sharded)


_NO_LABEL = {"-1", "-1.0"}
"""Labels that mean "no label" if all rows of a file have them, unless problem_type is given."""


def is_labelled(
    split: str,
    part: Part,
    spec: TaskSpec,
    settings: DataSettings,
    training: Selection | None,
    notes: list[str],
) -> bool:
    """Return whether a file has values to learn, which only test data may lack.

    Args:
        training: The columns of the training data.

    Raises:
        DataError: It is validation data, or rows to predict.
    """
    if split == TRAIN:
        return True
    columns = training
    if training is None or spec.mixes_forms:
        with contextlib.suppress(DataError):
            columns = select(part, spec, settings)
            if training and {*columns.names} < {*training.names}:
                columns = training  # Of pairs with a score, those without are unlabelled.
    missing = set(separated(settings.missing_labels))
    none = {"nan"} if settings.problem_type else {"nan", *_NO_LABEL}
    if columns is None:
        return True
    lacks = functools.partial(columns.lacking, part, has_empty=split != "test")
    if not (lacking := lacks(none | missing)):
        return True
    what = f"{part.path} has no value in {' and '.join(map(repr, lacking))}"
    is_missing = missing and not lacks(none - missing)
    if settings.predicts if split == "test" else not is_missing:
        raise DataError(
            f"{what}, so that none of its rows can be scored; its columns are "
            f"{', '.join(part.table.column_names)}.",
            "Give values under the same column names, or leave the file out; requests to the "
            "trained model label its rows.",
        )
    notes.append(f"{what} and is not used.")
    return False


def describe_files(
    files: Sequence[Read], count: str, columns: str = "", more_read: Sequence[str] = ()
) -> str:
    """Return a line about the files of a split, and the columns that are read.

    Args:
        count: The amount of data, such as `12 rows`.
        columns: The columns in words; by default by their roles.
        more_read: Other columns that are read.
    """
    parts = [read.part for read in files]
    where = str(parts[0].path) if len(parts) == 1 else f"{len(parts)} files"
    kinds = ", ".join(sorted({part.format for part in parts}))
    read = {name for file in files for name in file.columns.names} | set(more_read)
    unread = sorted({name for part in parts for name in part.table.column_names} - read)
    rest = f"; not read: {listed(unread)}" if unread else ""
    shown = columns or files[0].columns.describe()
    return f"{files[0].split} data: {count} from {where}, {kinds}; {shown}{rest}"


def _read_parts(
    layout: ChannelLayout, notes: list[str], settings: DataSettings, units: Units
) -> list[tuple[str, Part]]:
    """Return the parts that have rows with their splits, the training data first.

    A column that names the split of each row takes precedence over file names, so that a test row
    is never trained. Only a host's part of a sharded channel may have no training rows.
    """
    parts: list[tuple[str, Part]] = []
    named = {*settings.named_columns, *settings.ignored_columns}
    problems = Problems()
    for split in sorted(layout.files, key=ORDER.index):
        for read in units(layout.files[split]):
            with problems.noted():
                part = read()
                if part.table.num_rows == 0:
                    notes.append(f"{part.path} has no rows and is not used.")
                    continue
                for name, value in layout.partitions.get(part.path, {}).items():
                    if name not in part.table.column_names:
                        cells = [None if value == "__HIVE_DEFAULT_PARTITION__" else value]
                        column = pa.array(cells * part.table.num_rows, pa.string())
                        part = part.with_column(name, column)
                parts += split_by_column(split, part, part.path in layout.unclear, named, notes)
    problems.check()
    if not any(split == TRAIN for split, _ in parts) and not layout.sharded:
        files_of_train = ", ".join(map(str, layout.files[TRAIN]))
        why = "".join(f" {note}" for note in notes if _OF_SPLITS in note)
        raise DataError(
            f"The training data has no rows: {files_of_train}.{why}",
            "Give rows to train on" + (", or rename the column." if why else "."),
        )
    return sorted(parts, key=lambda split_and_part: ORDER.index(split_and_part[0]))


ANSWER, MARKS = "answer", {"accept", "reject", "ignore"}
"""The column of Prodigy's exports with the annotator's decision on each row, and its values."""
NOT_ACCEPTED = "were not accepted in Prodigy"


def accepted(part: Part, label: str | None, notes: list[str]) -> Part:
    """Return an export of Prodigy without the rows that annotators rejected or ignored, and without
    the columns of decisions and tokens. If the decision is the label, only ignored rows are left
    out. Other parts are returned unchanged.
    """
    names = {*part.table.column_names}
    if not names & {"_input_hash", "_task_hash"} and not {"spans", ANSWER} <= names:
        return part
    if "tokens" in names and "struct" in str(part.table.schema.field("tokens").type):
        part = dataclasses.replace(part, table=part.table.drop_columns(["tokens"]))
    cells = part.distinct(ANSWER, len(MARKS) + 1) if ANSWER in names else None
    marks = {cell for cell in cells or () if cell is not None}
    if not marks or not marks <= MARKS:
        return part
    answers = part.table[ANSWER].to_pylist()
    if label == ANSWER:
        is_kept = [answer not in (None, "ignore") for answer in answers]
        return only(part, is_kept, f"were ignored in Prodigy (column {ANSWER!r})", notes)
    is_kept = [answer == "accept" for answer in answers]
    part = only(part, is_kept, f"{NOT_ACCEPTED} (column {ANSWER!r})", notes)
    return dataclasses.replace(part, table=part.table.drop_columns([ANSWER]))


def only(part: Part, is_kept: Sequence[bool], why: str, notes: list[str]) -> Part:
    """Return some rows of a part; add a note with the number of rows left out, and the reason."""
    if all(is_kept):
        return part
    rows = np.flatnonzero(is_kept)
    notes.append(f"{len(is_kept) - len(rows)} rows of {part.path} {why} and are not used.")
    return part.select(rows)


def split_by_column(
    split: str, part: Part, is_unclear: bool, named: Collection[str], notes: list[str]
) -> list[tuple[str, Part]]:
    """Divide a part by the column that names the split of each row, if there is one.

    Args:
        split: The split of the part by its name.
        is_unclear: Whether its name contains several splits.
        named: Columns that hyperparameters name, and which hold something else.

    Raises:
        DataError: A column may hold splits, but it is not certain, or only its name says so.
    """
    for labelled, class_names in part.class_names.items():
        if labelled in named or normalized(labelled) not in _SPLIT_NAMES:
            continue
        known = dict(enumerate(class_names))
        numbers = part.table[labelled]
        if pa.types.is_integer(numbers.type):
            cells = [known.get(number) for number in numbers.to_pylist()]
            part = part.with_column(labelled, pa.array(cells, pa.string()))
    names = (name for name in part.table.column_names if name not in named)
    column = next((name for name in names if _names_splits(part, name)), None)
    if column is None:
        for field in part.table.schema:
            if field.name in named or not is_string(field.type):
                continue
            values = part.distinct(field.name, _MOST_VALUES) or [""]
            splits = {split_of(str(value)) for value in values}
            if None not in splits and TRAIN in splits and len(splits) > 1:
                raise DataError(
                    f"{part.path} has the splits {listed(values)} in column {field.name!r}, whose "
                    "name does not show that.",
                    f"Rename it to split, give ignore_columns={quoted(field.name)} to train on all "
                    f"rows, or label_column={quoted(field.name)} if it is the label.",
                )
        _check_no_unknown_splits(part, named)
        if is_unclear:
            raise DataError(
                f"The name of {part.path} contains several splits, and no column has the split of "
                "each row.",
                "Rename it to one split, or add a column called split.",
            )
        return [(split, part)]
    flagged = _FLAGS.get(normalized(column))
    encoded = part.table[column].combine_chunks().dictionary_encode(null_encoding="encode")
    codes: dict[str | None, list[int]] = defaultdict(list)
    for code, value in enumerate(encoded.dictionary.to_pylist()):
        name = split_of(str(value))
        if flagged is not None:
            other = TRAIN if flagged != TRAIN else "test"
            name = flagged if str(value).strip().lower() in TRUE else other
        codes[name].append(code)
    of_rows = encoded.indices.to_numpy(zero_copy_only=False)
    rows = {name: np.flatnonzero(np.isin(of_rows, some)) for name, some in codes.items()}
    if set(rows) == {split}:
        return [(split, part)]
    groups = ", ".join(f"{len(numbers)} {name or 'of none'}" for name, numbers in rows.items())
    notes.append(f"{part.path}: column {column!r} {_OF_SPLITS}: {groups}.")
    if split != TRAIN and rows.pop(TRAIN, None) is not None:
        notes.append(f"Of {part.path}, which is {split} data, rows of train are not used.")
    rest = dataclasses.replace(part, table=part.table.drop_columns([column]))
    return [(name, rest.select(numbers)) for name, numbers in rows.items() if name is not None]


def _names_splits(part: Part, column: str) -> bool:
    """Return whether a column holds splits, by its name and then its values."""
    kind = part.table.schema.field(column).type
    name = normalized(column)
    if name not in _FLAGS and not (name in _SPLIT_NAMES and is_string(kind)):
        return False
    values = part.distinct(column, _MOST_VALUES)
    if values is None:
        return False
    words = [str(value).strip() for value in values if value is not None]
    if not words or any(len(word) > _LONGEST_VALUE for word in words):
        return False
    if name in _FLAGS:
        return {word.lower() for word in words} <= TRUE | FALSE
    known = [split_of(word) for word in words if word.lower() not in _UNUSED]
    # `group` may hold test and control, and `dataset` "eval-harness" in all rows.
    is_certain = TRAIN in known or "split" in name or all(map(str.isalnum, words))
    return is_certain and (all(known) or (name in _SPLIT_NAMES[:4] and TRAIN in known))


def _check_no_unknown_splits(part: Part, named: Collection[str]) -> None:
    """Raise DataError if the name of a column says that it holds splits, and its values do not."""
    for name in part.table.column_names:
        key = normalized(name)
        kind = part.table.schema.field(name).type
        is_split = key in _SURELY_SPLITS
        if name in named or not (is_split or key in _PERHAPS_FLAGS) or pa.types.is_nested(kind):
            continue
        values = part.distinct(name, _MOST_VALUES) or []
        words = sorted({str(value).strip() for value in values if value is not None} - {""})
        are_flags = {word.lower() for word in words} <= TRUE | FALSE
        if len(words) < 2 or not (is_split or are_flags):
            continue
        remedy = (
            "Write train, validation and test into it" if is_split else f"Rename it to is_{key}"
        )
        raise DataError(
            f"Column {name!r} of {part.path} has {listed(words)}: by its name it may hold the "
            "split of each row, but the values do not say which.",
            f"{remedy}, or give ignore_columns={quoted(name)} to train on all rows.",
        )
