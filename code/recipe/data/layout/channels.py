"""From a job's channels to the files of each split, found by looking at names and folders."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from recipe.data.column_names import SPLIT_COLUMNS, plain, split_of, splits_in
from recipe.data.layout import sources, splits
from recipe.data.layout.class_names import ClassNames
from recipe.data.layout.dataset_card import CARD, Card
from recipe.data.layout.model_channel import MODEL_CHANNELS
from recipe.data.layout.sources import Sources
from recipe.errors import DataError, listed

NOT_DATA_CHANNELS = (*MODEL_CHANNELS, "code", "sm_drivers", "checkpoints")


@dataclass(frozen=True, kw_only=True)
class ChannelLayout:
    """The files of each split: `train`, and `validation` or `test` where they are given."""

    files: Mapping[str, list[Path]]
    """Split to its files and Arrow folders."""
    notes: list[str] = field(default_factory=list)
    """What was left out and why, one sentence each."""
    class_names: Sequence[ClassNames] = ()
    """What files beside the data say that classes are called."""
    partitions: Mapping[Path, Mapping[str, str]] = field(default_factory=dict)
    """The columns that the folders of a file stand for: `label=pos/part-0.parquet`."""
    unclear: frozenset[Path] = frozenset()
    """Files whose names speak of several splits: only a column can say which."""
    guessed: bool = False
    """Whether files are training data only because other files are named after other splits."""
    sharded: frozenset[str] = frozenset()
    """Splits with files of sharded channels: this host has its own part of them, maybe none."""

    def of_training(self, files: Sequence[Path], maybe_none: bool = False) -> ChannelLayout:
        """With some of the training data's files only; alone, and maybe without a row."""
        if not maybe_none:
            return dataclasses.replace(self, files={**self.files, "train": [*files]})
        return dataclasses.replace(self, files={"train": [*files]}, sharded=frozenset({"train"}))


@dataclass(frozen=True, kw_only=True)
class _Channel:
    """The splits inside one channel."""

    files: Mapping[str, list[Path]]
    sources: Sources
    guessed: bool = False


def find(
    channels: Mapping[str, Path],
    configurations: str | None = None,
    sharded: frozenset[str] = frozenset(),
) -> ChannelLayout:
    """Which files are for training and which for evaluation.

    A channel is named after its split, or its files or folders are, or a data set's card says
    which files are of which split. A channel of another name is for training, where it is the only
    one of such a name and none is called train.

    Args:
        configurations: The hyperparameter dataset_config_name: one, or several with commas.
        sharded: The channels of which this host has a part only, which may be empty. Where there
            are some, it may have no training data.

    Raises:
        DataError: a channel's folder does not exist, or there is no training data; what names
            say contradicts itself; one of several configurations must be asked for; or a split has
            files of which each host has its own and files that all hosts have.
    """
    requested = [each.strip() for each in (configurations or "").split(",") if each.strip()]
    data = {name: path for name, path in channels.items() if name not in NOT_DATA_CHANNELS}
    named = {name: split_of(name) for name in data}
    others = [name for name, split in named.items() if split is None]
    notes: list[str] = []
    inside: dict[str, _Channel] = {}
    for name, path in data.items():
        alone = others == [name] and "train" not in named.values()
        own = named[name] or ("train" if alone else None)
        if name in sharded and not (path.exists() and sources.scan(path).data):
            inside[name] = _Channel(files={own: []} if own else {}, sources=Sources())
        else:
            inside[name] = _inside(name, path, own, requested, notes)
    files: dict[str, list[Path]] = {}
    for name, channel in inside.items():
        for split, paths in channel.files.items():
            if named[name] in (split, None) or split not in named.values():
                files.setdefault(split, []).extend(paths)
            else:
                unused = ", ".join(map(str, paths))
                notes.append(f"{unused} is not used: there is a channel for {split} data.")
    kinds = {split: {name in sharded for name, channel in inside.items() if split in channel.files}
             for split in files}  # fmt: skip
    if mixed := [split for split, kind in kinds.items() if len(kind) > 1]:
        raise DataError(
            f"The {mixed[0]} data is of several channels, some sharded ({', '.join(sharded)}) and "
            "some not.",
            "Give all of them the same S3DataDistributionType.",
        )
    if not files.get("train") and not sharded:
        channel_list = ", ".join(f"{name} ({path})" for name, path in channels.items()) or "none"
        raise DataError(
            " ".join(
                [f"There is no training data; the job's channels are: {channel_list}.", *notes]
            ),
            "Give a channel called train (or training) with data of a format in docs/DATA.md, such "
            "as CSV, JSON Lines or Parquet.",
        )
    used = [(data[name], path) for name, each in inside.items()
            for paths in each.files.values() for path in paths]  # fmt: skip
    return ChannelLayout(
        files=files,
        notes=notes,
        class_names=[names for each in inside.values() for names in each.sources.class_names],
        partitions={path: columns for root, path in used if (columns := _partitions(root, path))},
        unclear=frozenset(path for _, path in used if len(splits_in(path.name)) > 1),
        guessed=any(each.guessed for each in inside.values()),
        sharded=frozenset(split for split, kind in kinds.items() if kind == {True}),
    )


def _inside(
    name: str, path: Path, own: str | None, requested: Sequence[str], notes: list[str]
) -> _Channel:
    if not path.exists():
        raise DataError(
            f"Channel {name} does not exist: {path}.",
            "Check the channel's name and its S3 prefix. A channel in Pipe mode has no folder: use "
            "File or FastFile.",
        )
    sources_here = sources.scan(path)
    notes += sources_here.describe(name)
    cards_without_files: list[Card] = []
    # Of several cards, the outermost is of the whole.
    for card in sources_here.cards:
        chosen = card.chosen(requested)
        sources_here.class_names += card.class_names(chosen or requested)
        by_card = {name: card.files(name) for name in chosen}
        if any(paths for files in by_card.values() for paths in files.values()):
            return _Channel(
                files=_of_card(card, by_card, own, sources_here.data, notes), sources=sources_here
            )
        if chosen:
            notes.append(f"{card.folder / CARD} lists files that are not here; names decide.")
            cards_without_files.append(card)
    root = path if path.is_dir() else path.parent
    assigned = splits.by_names(root, sources_here.data, own, requested)
    if cards_without_files and split_of(name) is None and len(assigned.files) < 2:
        raise DataError(
            f"{cards_without_files[0].folder / CARD} lists files that are not here, and the names "
            f"of those that are tell no splits apart: "
            f"{', '.join(map(str, sources_here.data[:5]))}.",
            "Leave the card out, or give each split in a channel of its own.",
        )
    notes += assigned.notes
    return _Channel(files=assigned.files, sources=sources_here, guessed=assigned.guessed)


def _of_card(
    card: Card,
    by_card: Mapping[str, Mapping[str, Sequence[Path]]],
    own: str | None,
    data: Sequence[Path],
    notes: list[str],
) -> dict[str, list[Path]]:
    """The files of the splits that a card lists; of its own names for them, those of ours."""
    files: dict[str, list[Path]] = {}
    for configuration, of_split in by_card.items():
        for split in splits.ORDER:
            named = [name for name in of_split if split_of(name) == split]
            # Beside `train`, `train_small` is another one.
            chosen = [name for name in named if name == split] or named
            if split == splits.TRAIN and len(chosen) > 1:
                raise DataError(
                    f"Configuration {configuration} of {card.folder / CARD} has several splits to "
                    f"train on: {', '.join(chosen)}.",
                    "Give the files of one in a channel called train, without the card.",
                )
            for name in chosen:
                files.setdefault(split, []).extend(of_split[name])
        notes.append(
            f"{card.folder / CARD} says of configuration {configuration}: "
            + ", ".join(f"{name} is {len(paths)} files" for name, paths in of_split.items())
        )
    if set(files) == {splits.TRAIN} and own not in (None, splits.TRAIN):
        files = {own: files[splits.TRAIN]}
    train = set(files.get(splits.TRAIN, ()))
    if both := [path for split, paths in files.items() if split != splits.TRAIN
                for path in paths if path in train]:  # fmt: skip
        raise DataError(
            f"{card.folder / CARD} has {both[0]} in the training data and in another split.",
            "Correct the card, or leave it out.",
        )
    used = {path for paths in files.values() for path in paths}
    files = {split: [path for path in data if path in set(paths)] for split, paths in files.items()}
    if left := [str(path) for path in data if path not in used]:
        notes.append(f"not used, as the card does not list it so: {listed(left)}.")
    return {split: paths for split, paths in files.items() if paths}


def _partitions(root: Path, path: Path) -> dict[str, str]:
    """The columns in the names of the folders between: `label=pos` is one, but not the split."""
    folders = path.relative_to(root).parts[:-1]
    pairs = [folder.partition("=") for folder in folders if "=" in folder]
    return {
        unquote(key): unquote(value)
        for key, _, value in pairs
        if not (plain(key) in SPLIT_COLUMNS and split_of(value))
    }
