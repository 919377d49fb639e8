"""Find the files of each split in a job's channels, by the names of files and folders."""

from __future__ import annotations

import filecmp
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from datasets.data_files import sanitize_patterns
from datasets.utils.metadata import MetadataConfigs
from huggingface_hub import DatasetCardData

from recipe.data.column_names import split_of, splits_in
from recipe.data.layout import sources, splits
from recipe.data.layout.model_channel import MODEL_CHANNELS
from recipe.errors import DataError
from recipe.paths import follow_link
from recipe.spec import normalize_name
from recipe.task_table import names_of_samples

NOT_DATA_CHANNELS = (*MODEL_CHANNELS, "code", "sm_drivers", "checkpoints")


@dataclass(frozen=True, kw_only=True)
class ChannelLayout:
    """The files of each split: `train`, and `validation` or `test` if they are given."""

    files: Mapping[str, list[Path]]
    """The files and Arrow folders of each split."""
    notes: list[str] = field(default_factory=list)
    """What was left out and why, one sentence each."""
    unclear: frozenset[Path] = frozenset()
    """Files whose names mention several splits, so that a column has to decide."""
    sharded: frozenset[str] = frozenset()
    """Splits with files of sharded channels, of which this host has a part, maybe an empty one."""


def training_channels(channels: Mapping[str, Path], trains: bool) -> Mapping[str, Path]:
    """Return a job's channels. A job that does not train (`do_train=False`) reads its evaluation
    data in place of missing training data."""
    splits = {split_of(name): path for name, path in channels.items()}
    evaluated = splits.get("test", splits.get("validation"))
    if trains or "train" in splits or evaluated is None:
        return channels
    return {**channels, "train": evaluated}


def find(
    channels: Mapping[str, Path], sharded: frozenset[str] = frozenset(), images: bool = False
) -> ChannelLayout:
    """Return which files are for training and which for evaluation.

    A channel is named after its split, or its files or folders are. A channel of another name is
    for training if it is the only one of such a name and none is called train.

    Args:
        sharded: The channels of which this host has a part only, which may be empty.
        images: Whether a channel without tables may have a folder of images for each class.

    Raises:
        DataError: a channel's folder does not exist; there is no training data; names contradict
            each other; folders hold several data sets; or a split is sharded only in part.
    """
    data = {name: path for name, path in channels.items() if name not in NOT_DATA_CHANNELS}
    named = {name: split_of(name) for name in data}
    others = [name for name, split in named.items() if split is None]
    notes: list[str] = []
    inside: dict[str, Mapping[str, list[Path]]] = {}
    for name, path in data.items():
        alone = others == [name] and "train" not in named.values()
        channel_split = named[name] or ("train" if alone else None)
        # See `training_channels`.
        twin = next((other for other in data if other != name and data[other] == path), None)
        if channel_split == "train" and twin is not None and named[twin] is not None:
            judged = _channel_splits(twin, path, named[twin], [], images)
            inside[name] = {"train": judged.get(named[twin] or "", [])}
            continue
        if name in sharded and not (path.exists() and sources.scan(path).data):
            inside[name] = {channel_split: []} if channel_split else {}
        else:
            inside[name] = _channel_splits(name, path, channel_split, notes, images)
    files: dict[str, list[Path]] = {}
    for name, channel_files in inside.items():
        for split, paths in channel_files.items():
            if named[name] in (split, None) or split not in named.values():
                files.setdefault(split, []).extend(paths)
            else:
                unused = ", ".join(map(str, paths))
                notes.append(f"{unused} is not used: there is a channel for {split} data.")
    if not images:  # Tables of the same names of images may lie in several folders.
        files = {split: _select_distinct(paths, notes) for split, paths in files.items()}
    kinds = {split: {name in sharded for name, splits in inside.items() if split in splits}
             for split in files}  # fmt: skip
    if mixed := [split for split, kind in kinds.items() if len(kind) > 1]:
        raise DataError(
            f"The {mixed[0]} data comes from several channels, some sharded "
            f"({', '.join(sharded)}) and some not.",
            "Give all of them the same S3DataDistributionType.",
        )
    if not files.get("train") and not sharded:
        raise _no_training_data(channels, notes)
    for path in itertools.chain.from_iterable(files.values()):
        _check_partitions(path)
    files = {split: [_as_given(path) for path in paths] for split, paths in files.items()}
    paths = list(itertools.chain.from_iterable(files.values()))
    unclear = [
        one for one in paths if len(splits_in(one.name)) > 1 and not (images and one.is_dir())
    ]
    return ChannelLayout(
        files=files,
        notes=notes,
        unclear=frozenset(unclear),
        sharded=frozenset(split for split, kind in kinds.items() if kind == {True}),
    )


def _as_given(path: Path) -> Path:
    """Return the path of a file that a link of the same name leads to, or a path unchanged."""
    given = follow_link(path)
    return given if given.name == path.name else path


def _no_training_data(channels: Mapping[str, Path], notes: Sequence[str]) -> DataError:
    channel_list = ", ".join(f"{name} ({path})" for name, path in channels.items()) or "none"
    return DataError(
        f"There is no training data; the job's channels are: {channel_list}."
        + "".join(f" {note}" for note in notes),
        "Give a channel called train (or training) with data of a format in docs/DATA.md, such as "
        "CSV, JSON Lines or Parquet, or with a folder of images for each class.",
    )


def _select_distinct(paths: Sequence[Path], notes: list[str]) -> list[Path]:
    """Return the paths without tables that have the bytes of an earlier one, each with a note."""
    kept: list[Path] = []
    by_size: dict[tuple[int, str], list[Path]] = {}
    for path in paths:
        if path.is_file() and path.suffix.lower() in sources.TABLE_SUFFIXES:
            alike = by_size.setdefault((path.stat().st_size, path.suffix), [])
            if same := next((one for one in alike if filecmp.cmp(one, path, shallow=False)), None):
                notes.append(f"{path} is not used: it has the same bytes as {same}.")
                continue
            alike.append(path)
        kept.append(path)
    return kept


def _channel_splits(
    name: str, path: Path, channel_split: str | None, notes: list[str], images: bool
) -> Mapping[str, list[Path]]:
    """Return the files of each split in one channel."""
    if not path.exists():
        raise DataError(
            f"Channel {name} does not exist: {path}.",
            "Check the channel's name and its S3 prefix. A channel in Pipe mode has no folder: use "
            "File or FastFile.",
        )
    sources_here = sources.scan(path, images)
    notes += sources_here.describe(name)
    root = path if path.is_dir() else path.parent
    if sources_here.images and not sources_here.data:
        return _image_folders(root, sources_here.images, channel_split, notes)
    files = splits.assign_by_names(root, sources_here.data, channel_split, notes)
    for card in sources_here.cards:
        _check_card(card, files)
    return files


def _image_folders(
    root: Path, images: Sequence[Path], channel_split: str | None, notes: list[str]
) -> Mapping[str, list[Path]]:
    """Return the folders of images of each split. A folder is a class; those above may name splits.

    Raises:
        DataError: images are in no folder, or all folders are named after splits.
    """
    folders = sorted({path.parent for path in images})
    stray = next((path for path in images if path.parent == root), None)
    if stray is not None or all(split_of(folder.name) for folder in folders):
        names = ", ".join(folder.name for folder in folders)
        what = f"lie in folders that are named after splits ({names}), and in none of a class"
        raise DataError(
            f"{stray} is not in a folder of a class, and no table has its label."
            if stray is not None
            else f"The images below {root} {what}.",
            "Put the images of each class into a folder of its name (train/cat/1.jpg), or add a "
            "metadata.csv with the columns file_name and label.",
        )
    by_parent: dict[Path, list[Path]] = {}
    for folder in folders:
        by_parent.setdefault(folder.parent / "*", []).append(folder)
    assigned = splits.assign_by_names(root, list(by_parent), channel_split, notes)
    chosen = {
        split: [folder for parent in parents for folder in by_parent[parent]]
        for split, parents in assigned.items()
    }
    for split_folders in chosen.values():
        _check_shared_names(split_folders)
    return chosen


def _check_shared_names(folders: Sequence[Path]) -> None:
    """Raise DataError if tomato/healthy and potato/healthy may be two classes: where each folder
    holds the same names, such as site1 and site2 do, they are the same classes."""
    siblings: dict[Path, set[str]] = {}
    for folder in folders:
        siblings.setdefault(folder.parent, set()).add(folder.name)
    firsts: dict[str, Path] = {}
    for folder in sorted(folders, key=lambda folder: len(folder.parts)):
        first = firsts.setdefault(folder.name, folder)
        if siblings[first.parent] != siblings[folder.parent]:
            renamed = folder.parent.with_name(f"{folder.parent.name}_{folder.name}")
            raise DataError(
                f"{first} and {folder} have the same name, but the other folders beside them "
                "differ, so it is not clear whether both hold the same class.",
                "Move the images of a class into one folder. For classes of their own, rename "
                f"each: mv {folder} {renamed}",
            )


def _check_card(card: Path, files: Mapping[str, Sequence[Path]]) -> None:
    """Raise DataError if the front matter of a data set's README.md contradicts what the names of
    files say: another split for a file, or several configurations to train on.
    """
    _, front, *_ = card.read_text("utf-8").split("---", 2)
    try:
        configurations = MetadataConfigs.from_dataset_card_data(
            DatasetCardData(**yaml.safe_load(front))
        )
        patterns = {
            name: sanitize_patterns(configuration["data_files"])
            for name, configuration in configurations.items()
            if configuration.get("data_files")
        }
    except Exception:  # The libraries raise any type of exception on front matter of other kinds.
        return
    trained: set[str] = set()
    for name, split_globs in patterns.items():
        for card_split, globs in split_globs.items():
            listed_here = {path for pattern in globs if "://" not in pattern
                           for path in card.parent.glob(pattern)}  # fmt: skip
            for split, paths in files.items():
                both = [path for path in paths if path in listed_here]
                if both and split_of(str(card_split)) not in (split, None):
                    raise DataError(
                        f"{card} calls {both[0]} {card_split} data, and the names of files and "
                        "channels "
                        f"{split} data.",
                        "Give each split in a channel of its own (train, test), without the card.",
                    )
                if both and split == splits.TRAIN:
                    trained.add(name)
    if len(trained) > 1:
        raise DataError(
            f"{card} has the configurations {', '.join(sorted(trained))}, and all would be trained "
            "on together.",
            "Give the files of one in a channel called train, without the card.",
        )


def _check_partitions(path: Path) -> None:
    """Raise DataError if a folder holds the value of a column, as in `label=pos/0.parquet`."""
    for folder in path.parts[:-1]:
        name, is_partition, value = folder.partition("=")
        if is_partition and normalize_name(name) in names_of_samples().single:
            raise DataError(
                f"{path}: the folder {folder!r} holds a value of its rows, and is not read.",
                f"Write {value!r} into a column {name!r} of these files.",
            )
