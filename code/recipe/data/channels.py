"""From a job's channels to the files of each split, found by looking at names and folders."""

from __future__ import annotations

import re
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from recipe.data.part import is_arrow_folder
from recipe.errors import DataError, ModelError

SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "eval", "evaluation", "dev"),
    "test": ("test", "testing"),
}
MODEL_CHANNELS = ("model", "pretrained", "pretrained_model", "base_model")
_NOT_DATA_CHANNELS = (*MODEL_CHANNELS, "code", "sm_drivers", "checkpoints")
# What reading a tar file raises that is cut short, or made up.
_BROKEN = (
    tarfile.TarError, EOFError, OSError, zlib.error, ValueError, OverflowError, KeyError,
    RecursionError,
)  # fmt: skip
_MOST_MEMBERS = 100_000
_NOT_DATA_SUFFIXES = (".manifest", ".md", ".py", ".pdf", ".ipynb", ".crc", ".md5", ".lock", ".png")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The files of each split: `train`, and `validation` or `test` where they are given."""

    files: Mapping[str, list[Path]]
    """Split to its files and Arrow folders."""
    notes: list[str] = field(default_factory=list)
    """What was left out and why, one sentence each."""


def find(channels: Mapping[str, Path]) -> Layout:
    """Which files are for training and which for evaluation.

    A channel is named after its split, or it holds a folder (or a save_to_disk DatasetDict, or a
    file) named after each. A channel of another name that is the only one is for training.

    Raises:
        DataError: a channel's folder does not exist, or there is no training data.
    """
    notes: list[str] = []
    data = {name: path for name, path in channels.items() if name not in _NOT_DATA_CHANNELS}
    found = {name: _inside(name, path, len(data) == 1, notes) for name, path in data.items()}
    files: dict[str, list[Path]] = {}
    for name, splits in found.items():
        for split, paths in splits.items():
            if split_of(name) in (split, None) or not _named(split, data):
                files.setdefault(split, []).extend(paths)
            else:
                listed = ", ".join(map(str, paths))
                notes.append(f"{listed} is not used: there is a channel for {split} data.")
    if not files.get("train"):
        raise _no_training_data(channels, notes)
    return Layout(files=files, notes=notes)


def split_of(name: str) -> str | None:
    """The split that a channel, folder or file name stands for: `train-00001` is `train`."""
    word = re.split(r"[-_. ]", name.lower())[0]
    return next((split for split, names in SPLITS.items() if word in names), None)


def model_folder(channels: Mapping[str, Path], name: str | None = None) -> Path | None:
    """The folder of the model in channel `name`, by default in the channel called model.

    A channel may hold the model's files, one folder with them, or model.tar.gz.
    """
    names = [name] if name else MODEL_CHANNELS
    channel = next((channels[each] for each in names if each in channels), None)
    if channel is None or not channel.is_dir():
        return None
    archive = channel / "model.tar.gz"
    folder = _extract(archive) if archive.is_file() else channel
    configs = sorted(folder.glob("config.json")) or sorted(folder.glob("*/config.json"))
    return configs[0].parent if configs else None


def _extract(archive: Path) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="model-"))
    try:
        with tarfile.open(archive) as tar:
            _extract_members(tar, folder)
    except _BROKEN as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise ModelError(
            f"{archive} cannot be unpacked: {error}.", "Check that the upload is complete."
        ) from error
    return folder


def _extract_members(tar: tarfile.TarFile, folder: Path) -> None:
    """Raises tarfile.TarError where a member leads elsewhere, or all would fill the disk."""
    # The library's own filters came with Python 3.11.4, and were leaky until 3.11.13.
    tar.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
    free = shutil.disk_usage(folder).free
    size = 0
    for count, member in enumerate(tar):
        size += member.size
        if count >= _MOST_MEMBERS or size > free:
            raise tarfile.TarError(
                f"it holds more than {_MOST_MEMBERS} files, or more than the {free / 1e6:.0f} MB "
                "that are free"
            )
        if not (member.isreg() or member.isdir()):
            raise tarfile.TarError(
                f"{member.name!r} is neither a file nor a folder; tar czhf packs what links lead to"
            )
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts:
            raise tarfile.TarError(f"{member.name!r} lies outside the archive")
        tar.extract(member, folder, set_attrs=False)


def _named(split: str, channels: Mapping[str, Path]) -> bool:
    return any(split_of(name) == split for name in channels)


def _inside(name: str, path: Path, alone: bool, notes: list[str]) -> dict[str, list[Path]]:
    """The splits inside one channel."""
    if not path.exists():
        raise DataError(
            f"Channel {name} does not exist: {path}.",
            "Check the channel's name and its S3 prefix. A channel in Pipe mode has no folder: use "
            "File or FastFile.",
        )
    own = split_of(name) or ("train" if alone else None)
    inner = {source: _inner_split(source, path) for source in sorted(_sources(path, notes))}
    files_are_split = any(inner[s] == "train" and s.parent == path and s.is_file() for s in inner)
    splits: dict[str, list[Path]] = {}
    for source, split in inner.items():
        if source.parent == path and source.is_file() and not files_are_split:
            split = None
        if split is None and (path / "dataset_dict.json").is_file():
            notes.append(f"Split {source.name} of {path} is not used: it is named after no split.")
            continue
        if (chosen := split or own) is None:
            notes.append(f"{source} is not used: neither it nor channel {name} names a split.")
            continue
        splits.setdefault(chosen, []).append(source)
    return splits


def _inner_split(source: Path, channel: Path) -> str | None:
    parts = source.relative_to(channel).parts
    return split_of(parts[0]) if parts else None


def _sources(path: Path, notes: list[str], above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Data files and Arrow folders below `path`; hidden, empty and other files left out.

    Args:
        above: The real folders that led here, for links that lead back.
    """
    if path.is_file():
        if _is_data(path, notes):
            yield path
    elif is_arrow_folder(path):
        yield path
    elif not path.is_dir() or path.resolve() in above:
        notes.append(f"{path} is no file, or a link that leads back or to nothing: not used.")
    else:
        for child in path.iterdir():
            if not child.name.startswith((".", "_")) and child.name != "dataset_dict.json":
                yield from _sources(child, notes, (*above, path.resolve()))


def _is_data(path: Path, notes: list[str]) -> bool:
    if path.name.endswith(_NOT_DATA_SUFFIXES) or path.name.endswith("-manifest"):
        return False
    if path.stat().st_size == 0:
        notes.append(f"{path} is empty and not used.")
        return False
    return True


def _no_training_data(channels: Mapping[str, Path], notes: list[str]) -> DataError:
    given = ", ".join(f"{name} ({path})" for name, path in channels.items()) or "none"
    return DataError(
        " ".join([f"There is no training data; the job's channels are: {given}.", *notes]),
        "Give a channel called train (or training) with CSV, TSV, JSON, JSON Lines, Parquet or "
        "save_to_disk data.",
    )
