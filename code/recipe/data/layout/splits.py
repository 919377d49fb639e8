"""Assign the files below a folder to splits, by the names of files and folders."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from recipe.data.column_names import SPLIT_COLUMNS, SPLITS, plain_name, split_of
from recipe.errors import DataError, join_names

ORDER = tuple(SPLITS)
TRAIN = ORDER[0]
_UNIONS = {"all", "full", "total", "combined", "merged", "whole", "complete", "union"}
_SEPARATORS = re.compile(r"[\W_]+")
_SHARD, _DIGITS = re.compile(r"(.+)-\d{5}-of-\d{5}\.\w+"), re.compile(r"\d+")


def assign_by_names(
    root: Path,
    paths: Sequence[Path],
    channel_split: str | None,
    notes: list[str],
) -> dict[str, list[Path]]:
    """Return the files of each split.

    A folder or file whose name contains a split belongs to it. Other files belong to the channel's
    split, unless some files are named after that one.

    Args:
        root: The channel's folder.
        channel_split: The split that the channel stands for, if any.

    Raises:
        DataError: names contradict themselves, there are several configurations, or a channel for
            training holds files that name other splits, and none that names training data.
    """
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
    _check_one_configuration(root, paths)
    _check_one_variant(files.get(TRAIN, ()))
    _check_no_union([*files.get(TRAIN, ()), *(unnamed if channel_split == TRAIN else ())])
    is_evaluated = channel_split in ("validation", "test")
    if is_evaluated and channel_split not in files and len(files) == 1 and not unnamed:
        # The user has named the channel, and evaluation data is never learned.
        notes.append(
            f"{join_names(paths)}: taken as {channel_split} data, as the channel is named so."
        )
        return {str(channel_split): list(paths)}
    if channel_split == TRAIN and files and TRAIN not in files:
        others = (
            f"{join_names(unnamed)} may be of any split" if unnamed else "no other file is there"
        )
        raise DataError(
            f"{join_names([path for path in paths if path not in unnamed])}: the names mention "
            f"{' and '.join(sorted(files))} data. None mentions training data, and {others}.",
            "Name the training data train, such as train.csv, or give each split a channel of its "
            "own (train, test). Leave out files with the rows of all splits.",
        )
    if unnamed and channel_split is None:
        notes.append(
            f"{join_names(unnamed)} is not used: neither it nor its channel names a split."
        )
    elif unnamed and channel_split in files and channel_split == TRAIN:
        notes.append(
            f"{join_names(unnamed)} is not used: other files are named after {channel_split} data."
        )
    elif unnamed and channel_split is not None:
        files.setdefault(channel_split, []).extend(unnamed)
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


def _check_no_union(paths: Sequence[Path]) -> None:
    """Raise DataError if one file of a folder may hold the rows of the others: `train_all.csv`
    and `train_0.csv`."""
    for path in paths:
        others = [other for other in paths if other.parent == path.parent and other != path]
        if others and _UNIONS & {*_SEPARATORS.split(path.name.partition(".")[0].lower())}:
            raise DataError(
                f"{path} may hold the rows of {join_names(others, 3)}, by its name, which would be "
                "read twice.",
                "Leave out either, or rename it.",
            )


def _named_parts(root: Path, path: Path) -> list[tuple[int, str]]:
    """Return position and split of each part of the path that names one split."""
    named_parts = []
    for index, part in enumerate(path.relative_to(root).parts):
        key, is_partition, value = part.partition("=")
        if is_partition and plain_name(key) not in SPLIT_COLUMNS:
            continue
        if split := split_of(value if is_partition else part):
            named_parts.append((index, split))
    return named_parts


def _check_one_configuration(root: Path, paths: Sequence[Path]) -> None:
    """Raise DataError if several folders hold training data of their own, such as
    `mrpc/train-00000.parquet` and `cola/train-00000.parquet`, which are different data sets."""
    trained = set()
    for path in paths:
        if (named := _named_parts(root, path)) and named[-1][1] == TRAIN:
            outer = path.relative_to(root).parts[: named[0][0]]
            trained.add("/".join(part for part in outer if "=" not in part and part != "data"))
    if len(trained) > 1:
        names = ", ".join(name or "the channel's own files" for name in sorted(trained))
        raise DataError(
            f"{root} holds several configurations of data: {names}.",
            "Give the S3 prefix of one as the channel, without the others; or put the files of all "
            "into one folder.",
        )
