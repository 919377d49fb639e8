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

from recipe.data import values
from recipe.data.column_names import split_of
from recipe.data.column_settings import ColumnsError, check_ignored
from recipe.data.columns import ColumnSelection, select_columns
from recipe.data.exports import exported_rows
from recipe.data.files import formats
from recipe.data.files.part import Part, SourceFile, UnclearHeader
from recipe.data.files.text_files import files_encoded
from recipe.data.layout import channels as layout_of_channels
from recipe.data.layout import shards
from recipe.data.layout.channels import ChannelLayout
from recipe.data.layout.row_splits import split_column
from recipe.data.layout.shards import Hosts
from recipe.data.layout.splits import ORDER, TRAIN
from recipe.data.proposing import proposals
from recipe.errors import DataError, Problems, join_names
from recipe.settings import DataSettings, split_values
from recipe.spec import TaskSpec

Converted = TypeVar("Converted")

_NAMES_SPLITS = "has the split of each row"


@dataclass(frozen=True, kw_only=True)
class ReadFile:
    """The rows of a file, and the columns that are read."""

    split: str
    part: Part
    columns: ColumnSelection


@dataclass(frozen=True, kw_only=True)
class ChannelFiles:
    """The files of a job's channels."""

    files: Sequence[ReadFile]
    """The training data first. A sharded host may have none."""
    columns: ColumnSelection
    """Those of the training data."""
    sharded: frozenset[str]
    """The splits of which this host has only a part of the rows."""
    sources: tuple[SourceFile, ...]
    """The files, in the order of `Part.position`."""

    def converted(self, convert: Callable[[ReadFile], Converted]) -> dict[str, list[Converted]]:
        """Return what `convert` makes of the files of each split. Raise its DataErrors as one."""
        by_split: dict[str, list[Converted]] = {}
        problems = Problems()
        for file in self.files:
            with problems.noted():
                by_split.setdefault(file.split, []).append(convert(file))
        problems.check()
        return by_split

    def files_of(self, split: str) -> list[ReadFile]:
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
    hosts: Hosts = shards.ONE,
    images: bool = False,
) -> ChannelFiles:
    """Read the files of a job's channels, and choose the columns of each.

    Test data without targets is left out. If channels are sharded, the first host with training
    data decides.

    Args:
        notes: A sentence is added for each file or row that is left out.
        read: Reads a file; by default `formats.read`.
        images: Whether folders of images are read, too.

    Raises:
        DataError: names the channel, file, line or column that cannot be used, and the remedy.
    """
    problems = Problems()
    files: list[ReadFile] = []
    read = read or functools.partial(formats.read, header=settings.names_in_header)
    read = files_encoded(settings.encoding)(read)
    with hosts.together():
        layout = layout_of_channels.find(channels, hosts.sharded, images)
        notes += layout.notes
        parts = _read_parts(layout, notes, spec, settings, read)
        local = None
        if hosts.sharded and parts and parts[0][0] == TRAIN:
            local = select_columns(parts[0][1], spec, settings)
    training = hosts.first(local)
    with hosts.together():
        if not hosts.sharded:  # another host may have the file with that column
            check_ignored([part for _, part in parts], settings)
        for split, part in parts:
            with problems.noted():
                if not is_labelled(split, part, spec, settings, training, notes):
                    continue
                try:
                    columns = select_columns(
                        part, spec, settings, training, is_trained=split == TRAIN
                    )
                except ColumnsError as error:
                    raise proposals.explained(error, part, spec, settings, training) from error
                training = training or columns
                values.check_inputs(part, columns)
                part = values.unlisted(part, columns, settings, notes)
                part = dataclasses.replace(part, position=len(files))
                files.append(ReadFile(split=split, part=part, columns=columns))
        problems.check()
    assert training is not None  # `_read_parts` checks that
    sources = tuple(file.part.source(channels) for file in files)
    return ChannelFiles(files=files, columns=training, sharded=layout.sharded, sources=sources)


_NO_LABEL = {"-1", "-1.0"}
"""Labels that mean "no label" if all rows of a file have them, unless problem_type is given."""


def is_labelled(
    split: str,
    part: Part,
    spec: TaskSpec,
    settings: DataSettings,
    training: ColumnSelection | None,
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
            columns = select_columns(part, spec, settings)
            if training and {*columns.names} < {*training.names}:
                columns = training  # Of pairs with a score, those without are unlabelled.
    missing = set(split_values(settings.missing_labels))
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
    files: Sequence[ReadFile], count: str, columns: str = "", more_read: Sequence[str] = ()
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
    rest = f"; not read: {join_names(unread)}" if unread else ""
    shown = columns or files[0].columns.describe()
    return f"{files[0].split} data: {count} from {where}, {kinds}; {shown}{rest}"


def _read_parts(
    layout: ChannelLayout,
    notes: list[str],
    spec: TaskSpec,
    settings: DataSettings,
    read: Callable[[Path], Part],
) -> list[tuple[str, Part]]:
    """Return the parts that have rows with their splits, the training data first.

    A column that names the split of each row takes precedence over file names, so that a test row
    is never trained. Only a host's part of a sharded channel may have no training rows.
    """
    parts: list[tuple[str, Part]] = []
    named = {*settings.named_columns, *settings.ignored_columns}
    problems = Problems()
    for split in sorted(layout.files, key=ORDER.index):
        for path in layout.files[split]:
            with problems.noted():
                try:
                    part = read(path)
                except UnclearHeader as unclear:
                    raise proposals.header_refusal(unclear, {spec.name: 0.0}, settings) from unclear
                notes += [part.note] if part.note else []
                if part.table.num_rows == 0:
                    notes.append(f"{part.path} has no rows and is not used.")
                    continue
                part = exported_rows.find_samples(part, settings, notes)
                parts += split_by_column(split, part, part.path in layout.unclear, named, notes)
    problems.check()
    if not any(split == TRAIN for split, _ in parts) and not layout.sharded:
        training_files = ", ".join(map(str, layout.files[TRAIN]))
        why = "".join(f" {note}" for note in notes if _NAMES_SPLITS in note)
        raise DataError(
            f"The training data has no rows: {training_files}.{why}",
            "Give rows to train on" + (", or rename the column." if why else "."),
        )
    return sorted(parts, key=lambda split_and_part: ORDER.index(split_and_part[0]))


def split_by_column(
    split: str, part: Part, is_unclear: bool, named: Collection[str], notes: list[str]
) -> list[tuple[str, Part]]:
    """Divide a part by the column that names the split of each row, if there is one.

    Args:
        split: The split of the part by its name.
        is_unclear: Whether its name contains several splits.
        named: Columns that hyperparameters name, and which hold something else.

    Raises:
        DataError: A column may hold splits, but only its name or its values say so.
    """
    column = split_column(part, named)
    if column is None:
        if is_unclear:
            raise unclear_split(part.path)
        return [(split, part)]
    encoded = part.table[column].combine_chunks().dictionary_encode(null_encoding="encode")
    codes: dict[str | None, list[int]] = defaultdict(list)
    for code, value in enumerate(encoded.dictionary.to_pylist()):
        codes[split_of(str(value))].append(code)
    row_codes = encoded.indices.to_numpy(zero_copy_only=False)
    rows = {name: np.flatnonzero(np.isin(row_codes, some)) for name, some in codes.items()}
    if set(rows) == {split}:
        return [(split, part)]
    groups = ", ".join(f"{len(numbers)} {name or 'of none'}" for name, numbers in rows.items())
    notes.append(f"{part.path}: column {column!r} {_NAMES_SPLITS}: {groups}.")
    if split != TRAIN and rows.pop(TRAIN, None) is not None:
        notes.append(f"Of {part.path}, which is {split} data, rows of train are not used.")
    rest = dataclasses.replace(part, table=part.table.drop_columns([column]))
    return [(name, rest.select(numbers)) for name, numbers in rows.items() if name is not None]


def unclear_split(path: Path) -> DataError:
    """Return the refusal of a file whose name contains several splits."""
    return DataError(
        f"The name of {path} contains several splits, and no column has the split of each row.",
        "Rename it to one split, or add a column called split.",
    )
