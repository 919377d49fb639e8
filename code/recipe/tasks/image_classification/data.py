"""Load images and their classes: from folders of classes, or tables."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data import classification, held_out, labels
from recipe.data.classification import Splits
from recipe.data.column_names import ADDRESS, LABEL
from recipe.data.files import formats
from recipe.data.files.image_files import SUFFIXES
from recipe.data.files.part import HeaderHint, Part, is_binary
from recipe.data.labels import LabelShape
from recipe.data.layout import sources
from recipe.data.layout.channels import NOT_DATA_CHANNELS
from recipe.data.reading import ReadFile, describe_files, read_columns
from recipe.errors import DataError, Problems, join_names
from recipe.settings import DataSettings
from recipe.task_table import TASKS

LOCATION, BYTES, FILE = "place", "bytes", "file"
"""The columns of an image: its location for messages; its bytes, or the file that holds them."""
_FOLDER = "folders of images"


def load(channels: Mapping[str, Path], settings: DataSettings) -> Splits:
    """Find, label and split the images of a job's channels, without opening any.

    Returns:
        Data sets with the columns `place`, `bytes`, `file` and `label`.

    Raises:
        DataError: names the channel, file or column that cannot be used, and the remedy.
    """
    notes: list[str] = []
    read = functools.partial(_read, header=settings.names_in_header)
    spec = TASKS["image-classification"]
    reading = read_columns(channels, spec, settings, notes, read, images=True)
    parts = reading.converted(functools.partial(_images, settings=settings, notes=notes))
    shape = LabelShape(missing=settings.missing_labels)
    train = [label for part in parts["train"] for label in shape.spell(part, LABEL)]
    known = labels.classes(parts["train"][0], LABEL, train, trains=settings.trains)
    built = {}
    for split, split_parts in parts.items():
        built[split] = held_out.data_set([
            part.with_column(LABEL, classification.encoded(split, part, LABEL, shape, known)).table
            for part in split_parts
        ])  # fmt: skip
        notes.append(describe_files(reading.files_of(split), f"{len(built[split])} images"))
    uses, rule = held_out.assign(
        built, reading, settings, lambda split: np.asarray(split[LABEL][:])
    )
    sizes = classification.rows_of_classes(known, uses["train"][LABEL][:])
    shown = join_names([f"{name} ({count} images)" for name, count in sizes.items()])
    notes += [rule, f"{len(known.names)} labels: {shown}"]
    return Splits(**uses, labels=known, notes=notes)


def _read(path: Path, header: HeaderHint) -> Part:
    """Return the rows of a table, or the images of a folder, whose name is their class."""
    if not path.is_dir() or (path / "state.json").is_file():
        return formats.read(path, header=header)
    files = (file.name for file in path.iterdir() if file.suffix.lower() in SUFFIXES)
    names = sorted(name for name in files if not name.startswith("."))  # macOS' `._1.jpg`
    table = {
        "file_name": [f"{path.name}/{name}" for name in names],
        LABEL: [path.name] * len(names),
    }
    return Part(
        path=path,
        format=_FOLDER,
        table=pa.table(table),
        lines=range(len(names)),
        unit="",
        names=names,
    )


def _images(file: ReadFile, settings: DataSettings, notes: list[str]) -> Part:
    """Return the images that a table holds or names, without rows that have no label.

    Raises:
        DataError: a file does not exist.
    """
    part, column = file.part, file.columns[LABEL]
    stem = file.columns["image"].removesuffix(".bytes").removesuffix(".path")
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
            image = part.path.parent / str(name)
            with problems.noted():
                if name is None or not (part.format == _FOLDER or image.is_file()):
                    raise DataError(
                        f"{part.where(row)} names the image {name!r} in column {path_column!r}, "
                        f"and there is no file {image}.",
                        f"Give paths from the folder of the table, such as images/{name}.",
                    )
                files[row] = str(image)
        problems.check()
    locations = [image or part.where(row) for row, image in enumerate(files)]
    table = pa.table({
        LOCATION: pa.array(locations, pa.large_string()),
        BYTES: kept,
        FILE: pa.array(files, pa.large_string()),
        LABEL: part.table[column],
        ADDRESS: part.addresses(),
    })  # fmt: skip
    names_of = {LABEL: part.class_names[column]} if column in part.class_names else {}
    return dataclasses.replace(part, table=table, class_names=names_of)


def folders_of_images(channels: Mapping[str, Path]) -> str | None:
    """Return which channel holds images in folders; None if none does."""
    for name, path in channels.items():
        if name in NOT_DATA_CHANNELS or not path.is_dir():
            continue
        scanned = sources.scan(path, images=True)
        in_folders = sum(image.parent != path for image in scanned.images)
        if in_folders > 1 and not scanned.data:
            return f"channel {name} holds folders of images"
    return None
