"""Load images and their classes: from folders of classes, tables, or both."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data import classification, held_out, labels
from recipe.data.classification import Splits
from recipe.data.column_names import LABEL, split_of
from recipe.data.columns import Selection, select
from recipe.data.files import formats
from recipe.data.files.image_files import SUFFIXES
from recipe.data.files.part import Part, is_binary
from recipe.data.labels import LabelShape
from recipe.data.layout import sources, splits
from recipe.data.layout.channels import NOT_DATA_CHANNELS
from recipe.data.layout.splits import ORDER
from recipe.data.reading import is_labelled, split_by_column
from recipe.errors import DataError, Problems, listed
from recipe.settings import DataSettings
from recipe.task_table import TASKS

LOCATION, BYTES, FILE = "place", "bytes", "file"
"""The columns of an image: its location for messages; its bytes, or the file that holds them."""


def load(channels: Mapping[str, Path], settings: DataSettings) -> Splits:
    """Find, label and split the images of a job's channels, without opening any.

    Returns:
        Data sets with the columns `place`, `bytes`, `file` and `label`.

    Raises:
        DataError: names the channel, file or column that cannot be used, and the remedy.
    """
    notes: list[str] = []
    parts: dict[str, list[Part]] = {}
    problems = Problems()
    data = {name: path for name, path in channels.items() if name not in NOT_DATA_CHANNELS}
    named = {name: split_of(name) for name in data}
    others = [name for name, split in named.items() if split is None]
    training: list[Selection] = []
    for name in sorted(data, key=lambda name: named[name] not in (None, "train")):
        alone = others == [name] and "train" not in named.values()
        of_channel = named[name] or ("train" if alone else None)
        with problems.noted():
            for split, part in _channel_parts(data[name], of_channel, settings, training, notes):
                if of_channel in (None, split) or split not in named.values():
                    parts.setdefault(split, []).append(part)
    problems.check()
    if not parts.get("train"):
        channel_list = ", ".join(f"{name} ({path})" for name, path in channels.items()) or "none"
        raise DataError(
            " ".join(
                [f"There are no training images; the job's channels are: {channel_list}.", *notes]
            ),
            "Give a channel called train with a folder for each class (train/cat/1.jpg), a "
            "metadata.csv with the columns file_name and label, or Parquet with the columns image "
            "and label.",
        )
    shape = LabelShape()
    train = [label for part in parts["train"] for label in shape.spell(part, LABEL)]
    known = labels.classes(parts["train"][0], LABEL, train)
    built = {}
    for split, of_split in parts.items():
        tables = []
        for part in of_split:
            ids = classification.encoded(split, part, LABEL, shape, known)
            tables.append(part.with_column(LABEL, ids).table)
        built[split] = held_out.data_set(tables)
        is_one = len(of_split) == 1
        of_files = of_split[0].path if is_one else f"{len(of_split)} tables or folders"
        notes.append(f"{split} data: {len(built[split])} images from {of_files}")
    uses, rule = held_out.assign(built, settings, lambda split: np.asarray(split[LABEL][:]))
    sizes = classification.rows_of_classes(known, uses["train"][LABEL][:])
    shown = listed([f"{name} ({count} images)" for name, count in sizes.items()])
    notes += [rule, f"{len(known.names)} labels: {shown}"]
    return Splits(**uses, labels=known, notes=notes, text_columns=(LOCATION,))


def _channel_parts(
    path: Path,
    of_channel: str | None,
    settings: DataSettings,
    training: list[Selection],
    notes: list[str],
) -> list[tuple[str, Part]]:
    """Return the parts of a channel with their splits: from its tables, else from its folders.

    Args:
        training: Gets the columns of each table, those of the training data first.
    """
    spec = TASKS["image-classification"]
    if not path.exists():
        raise DataError(
            f"The channel {path} does not exist.", "Check the channel's name and its S3 prefix."
        )
    sources_here = sources.scan(path)
    pictures = sorted(
        file for file in (*sources_here.data, *sources_here.passed_over) if _is_picture(file)
    )
    tables = [file for file in sources_here.data if not _is_picture(file)]
    if not tables:
        return _folders(path, pictures, of_channel, notes)
    root = path if path.is_dir() else path.parent
    assigned = splits.assign_by_names(root, tables, of_channel, [], notes)
    problems = Problems()
    parts: list[tuple[str, Part]] = []
    for split, files in sorted(assigned.items(), key=lambda item: ORDER.index(item[0])):
        for file in files:
            with problems.noted():
                for own_split, part in split_by_column(
                    split,
                    formats.read(file, header=settings.names_in_header),
                    False,
                    {*settings.named_columns, *settings.ignored_columns},
                    notes,
                ):
                    if is_labelled(
                        own_split, part, spec, settings, next(iter(training), None), notes
                    ):
                        training.append(select(part, spec, settings))
                        images = _table_images(part, training[-1], settings, notes)
                        parts.append((own_split, images))
    problems.check()
    used = {name for _, part in parts for name in part.table[FILE].to_pylist()}
    if left_out := sum(str(picture) not in used for picture in pictures):
        notes.append(f"{left_out} images below {path} are in no table and are not used.")
    return parts


def _is_picture(path: Path) -> bool:
    return path.is_file() and path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def _folders(
    root: Path, pictures: Sequence[Path], of_channel: str | None, notes: list[str]
) -> list[tuple[str, Part]]:
    """Return images of folders named after classes; a folder above may name the split."""
    by_split: dict[str, list[Path]] = {}
    classes = sorted({path.parent.name for path in pictures if path.parent != root})
    if classes and all(map(split_of, classes)):
        raise DataError(
            f"The images below {root} lie in folders that are named after splits "
            f"({', '.join(classes)}), and in none of a class.",
            "Put those of each class into a folder of its name (train/cat/1.jpg), or add a "
            "metadata.csv with the columns file_name and label.",
        )
    for path in pictures:
        *above, _ = path.relative_to(root).parts[:-1] or (None,)
        named = next((split for part in above if part and (split := split_of(part))), None)
        if len(path.relative_to(root).parts) < 2:
            raise DataError(
                f"{path} is not in a folder of a class, and no table has its label.",
                "Put the images of each class into a folder of its name, or add a metadata.csv "
                "with the columns file_name and label.",
            )
        split = named or of_channel
        if split is not None:
            by_split.setdefault(split, []).append(path)
    if of_channel == "train" and by_split.keys() - {"train"} and "train" not in by_split:
        raise DataError(
            f"The folders of {root} name {' and '.join(sorted(by_split))} data, and none is for "
            "training.",
            "Name one train, or give the training data in a channel of its own.",
        )
    parts = []
    for split, files in by_split.items():
        paths = pa.array([str(path) for path in files], pa.large_string())
        table = {
            LOCATION: paths,
            BYTES: pa.nulls(len(files), pa.large_binary()),
            FILE: paths,
            LABEL: pa.array([path.parent.name for path in files], pa.large_string()),
        }
        locations = [str(path.relative_to(root)) for path in files]
        kind = "folders of images"
        parts.append(
            (split, Part(path=root, format=kind, table=pa.table(table), lines=locations, unit=""))
        )
    return parts


def _table_images(part: Part, columns: Selection, settings: DataSettings, notes: list[str]) -> Part:
    """Return the images that a table holds or names, without rows that have no label.

    Raises:
        DataError: a file does not exist.
    """
    column = columns[LABEL]
    stem = columns["image"].removesuffix(".bytes").removesuffix(".path")
    rows = part.table.num_rows
    part = labels.labelled(part, column, settings.missing_labels)
    if unlabelled := rows - part.table.num_rows:
        notes.append(f"{unlabelled} rows of {part.path} have no label and are not used.")
    rows = part.table.num_rows
    kept = pa.nulls(rows, pa.large_binary())
    for name in (f"{stem}.bytes", stem):
        if name in part.table.column_names and is_binary(part.table.schema.field(name).type):
            kept = part.table[name].cast(pa.large_binary()).combine_chunks()
            break
    files: list[str | None] = [None] * rows
    if kept.null_count:
        # Rows without bytes name files, relative to the table's folder.
        path_column = f"{stem}.path" if f"{stem}.path" in part.table.column_names else stem
        problems = Problems()
        for row, name in enumerate(part.table[path_column].to_pylist()):
            if kept[row].is_valid:
                continue
            file = part.path.parent / str(name)
            with problems.noted():
                if name is None or not file.is_file():
                    raise DataError(
                        f"{part.where(row)} names the image {name!r} in column {path_column!r}, "
                        f"and there is no file {file}.",
                        "Give the paths of files from the folder of the table.",
                    )
                files[row] = str(file)
        problems.check()
    if len(kept) and kept.null_count < len(kept):
        notes.append(f"{part.path}: images in column {stem!r}, labels in column {column!r}")
    locations = [file or part.where(row) for row, file in enumerate(files)]
    table = pa.table({
        LOCATION: pa.array(locations, pa.large_string()),
        BYTES: kept,
        FILE: pa.array(files, pa.large_string()),
        LABEL: part.table[column],
    })  # fmt: skip
    names_of = {LABEL: part.class_names[column]} if column in part.class_names else {}
    return dataclasses.replace(part, table=table, class_names=names_of)


def folders_of_images(channels: Mapping[str, Path]) -> str | None:
    """Return which channel holds images in folders; None if none does."""
    for name, path in channels.items():
        if name in NOT_DATA_CHANNELS or not path.is_dir():
            continue
        scanned = sources.scan(path)
        images = [file for file in (*scanned.data, *scanned.passed_over) if _is_picture(file)]
        in_folders = sum(len(image.relative_to(path).parts) > 1 for image in images)
        if in_folders > 1 and all(map(_is_picture, scanned.data)):
            return f"channel {name} holds folders of images"
    return None
