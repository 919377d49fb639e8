"""Assign the files below a folder to splits, by the names of files and folders."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from recipe.data.column_names import SPLIT_COLUMNS, SPLITS, plain, split_of
from recipe.errors import DataError, did_you_mean, listed

ORDER = tuple(SPLITS)
TRAIN = ORDER[0]
_SHARD, _DIGITS = re.compile(r"(.+)-\d{5}-of-\d{5}\.\w+"), re.compile(r"\d+")
# Folders whose names say nothing about their content.
_PLAIN_FOLDERS = ("data", "dataset", "default", "plain_text")


def assign_by_names(
    root: Path,
    paths: Sequence[Path],
    of_channel: str | None,
    requested: Sequence[str],
    notes: list[str],
) -> dict[str, list[Path]]:
    """Return the files of each split.

    A folder or file whose name contains a split belongs to it. Other files belong to the channel's
    split, unless some files are named after that one.

    Args:
        root: The channel's folder.
        of_channel: The split that the channel stands for, if any.
        requested: The configurations that are read: folders, each of which has its own splits.

    Raises:
        DataError: names contradict themselves, there are several configurations and none is
            requested, or a channel for training holds files that name other splits, and none that
            names training data.
    """
    paths = _configuration_files(root, paths, requested, notes)
    files: dict[str, list[Path]] = {}
    unnamed: list[Path] = []
    for path in paths:
        if not (named := _named_parts(root, path)):
            unnamed.append(path)
            continue
        *outer, (_, split) = named  # the innermost name counts
        evaluated = next((index for index, other in outer if other != TRAIN), None)
        if split == TRAIN and evaluated is not None:
            folder = path.relative_to(root).parts[evaluated]
            raise DataError(
                f"{path}: the folder {folder!r} names {split_of(folder)} data, and the file "
                "training data.",
                "Rename one of them.",
            )
        files.setdefault(split, []).append(path)
    _check_one_variant(files.get(TRAIN, ()))
    is_evaluated = of_channel in ("validation", "test")
    if is_evaluated and of_channel not in files and len(files) == 1 and not unnamed:
        # The user has named the channel, and evaluation data is never learned.
        notes.append(f"{listed(paths)}: taken as {of_channel} data, as the channel is named so.")
        return {str(of_channel): list(paths)}
    if of_channel == TRAIN and files and TRAIN not in files:
        others = f"{listed(unnamed)} may be of any split" if unnamed else "no other file is there"
        raise DataError(
            f"{listed([path for path in paths if path not in unnamed])}: the names mention "
            f"{' and '.join(sorted(files))} data. None mentions training data, and {others}.",
            "Name the training data train, such as train.csv, or give each split a channel of its "
            "own (train, test). Leave out files with the rows of all splits.",
        )
    if unnamed and of_channel is None:
        notes.append(f"{listed(unnamed)} is not used: neither it nor its channel names a split.")
    elif unnamed and of_channel in files and of_channel == TRAIN:
        notes.append(
            f"{listed(unnamed)} is not used: other files are named after {of_channel} data."
        )
    elif unnamed and of_channel is not None:
        files.setdefault(of_channel, []).extend(unnamed)
    return files


def _check_one_variant(paths: Sequence[Path]) -> None:
    """Raise DataError if shards belong to several splits of training data: `train_sft-00000-of-
    00001` and `train_prefs-00000-of-00001`, which on the hub are variants of the same rows."""
    variants: dict[Path, set[str]] = {}
    for path in paths:
        if shard := _SHARD.fullmatch(path.name):
            variants.setdefault(path.parent, set()).add(_DIGITS.sub("", shard[1]))
    for folder, names in variants.items():
        if len(names) > 1:
            raise DataError(
                f"{folder} holds several splits of training data: {', '.join(sorted(names))}.",
                "Leave the files of all but one out of the channel. If all are meant, rename them, "
                "such as to train-a.parquet and train-b.parquet.",
            )


def _named_parts(root: Path, path: Path) -> list[tuple[int, str]]:
    """Return position and split of each part of the path that names one split."""
    named_parts = []
    for index, part in enumerate(path.relative_to(root).parts):
        key, is_partition, value = part.partition("=")
        if is_partition and plain(key) not in SPLIT_COLUMNS:
            continue
        if split := split_of(value if is_partition else part):
            named_parts.append((index, split))
    return named_parts


def _configuration_files(
    root: Path, paths: Sequence[Path], requested: Sequence[str], notes: list[str]
) -> Sequence[Path]:
    """Return the files of the requested configurations, or of the only one.

    A configuration is a folder that holds its own training data: `mrpc/train-00000.parquet`.
    """
    of_path = {}
    for path in paths:
        parts = path.relative_to(root).parts
        first = next((index for index, _ in _named_parts(root, path)), len(parts) - 1)
        of_path[path] = "/".join(
            part for part in parts[:first] if "=" not in part and part != "data"
        )
    if requested:
        known = sorted({name for name in of_path.values() if name})
        for name in requested:
            if name not in known:
                raise DataError(
                    f"dataset_config_name has value {name!r}, but {root} has "
                    f"{'the folders ' + ', '.join(known) if known else 'no folders'}.",
                    did_you_mean(name, known) or "Name one of them, or leave it out.",
                )
        kept = [path for path in paths if of_path[path] in requested]
    else:
        trained = {
            of_path[path]
            for path in paths
            if (named := _named_parts(root, path)) and named[-1][1] == TRAIN
        }
        if len(trained) < 2:
            return paths
        outer = [
            name
            for name in trained
            if all(other == name or other.startswith(f"{name}/") for other in trained)
        ]
        defaults = [name for name in sorted(trained) if name == "" or name in _PLAIN_FOLDERS]
        defaults = outer or defaults
        if not defaults:
            raise DataError(
                f"{root} holds several configurations: {', '.join(sorted(trained))}.",
                f"Give dataset_config_name={sorted(trained)[0]}, another one, or several with "
                "commas.",
            )
        kept = [path for path in paths if of_path[path] == defaults[0]]
    if left := sorted({of_path[path] or "the channel's own files" for path in paths
                       if path not in kept}):  # fmt: skip
        notes.append(f"not used, as other configurations of the data: {', '.join(left)}.")
    return kept
