"""The files of the training data in portions, each of which is read while others are trained on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np

from recipe.data.layout.channels import ChannelLayout
from recipe.data.layout.splits import TRAIN
from recipe.errors import HyperparameterError, OutputError, listed
from recipe.hyperparameters import Hyperparameters
from recipe.storage import atomic

AHEAD, BEHIND = 2, 2
"""Portions beyond, and before, the one that training has come to of which tokens are kept."""
MOST = AHEAD + BEHIND + 2
"""Of which tokens are kept: those, and the first of all."""
BY_ROWS = (".parquet", ".arrow", ".feather", ".csv", ".tsv", ".jsonl", ".ndjson", ".json")
"""What files end with that are read each by itself, whatever lies beside them."""
PLAIN = (".txt", ".text")
_BYTES, _LARGE = 1 << 26, 1 << 30
"""Of the files of a portion at least; and of those that are read so where nobody says."""
_FEWEST = 8
"""Portions of data that is read so where nobody says."""
_TIMES_BYTES = 3
"""What rows and tokens of a portion take on the disk while it is made, by its files' bytes."""


@dataclass(frozen=True, kw_only=True)
class FileRows:
    """Training data of which the first portion is read, and the others are when they are needed."""

    portions: Sequence[Sequence[Path]]
    """The files of each."""
    rows: Sequence[int] | None
    """How many each has, where that is known before all are read."""
    read: Callable[[Sequence[Path]], datasets.Dataset]
    """The rows of some files, as those of the first portion are."""

    def identity(self) -> list[list[tuple[str, int]]]:
        """Names and sizes, which are the same on each host and after each restart."""
        root = os.path.commonpath([path.parent for each in self.portions for path in each])
        return [[(str(path.relative_to(root)), path.stat().st_size) for path in portion]
                for portion in self.portions]  # fmt: skip

    def written(self, portion: int) -> list[int]:
        """When the files of a portion were written, which tells those of a name apart."""
        return [path.stat().st_mtime_ns for path in self.portions[portion]]


def choose(
    places: ChannelLayout,
    channels: Mapping[str, Path],
    hyperparameters: Hyperparameters,
    why_not: Iterable[str],
    notes: list[str],
    also: Collection[str] = (),
) -> list[list[Path]] | None:
    """The files of each portion; None where all are read before training.

    They are as `streaming_files` says, or, where it says nothing, of large data in FastFile mode,
    where a file is fetched as it is read, from its beginning to its end.

    Args:
        why_not: Why the task cannot, in words.
        also: What files may end with, beside BY_ROWS.

    Raises:
        HyperparameterError: `streaming_files` asks for what cannot be; all reasons at once.
        OutputError: the disk has no room for the portions that are kept.
    """
    asked, files = hyperparameters.streaming_files, places.files.get(TRAIN, [])
    if asked == 0 or not hyperparameters.trains or hyperparameters.streaming is False:
        return None
    sizes = {path: path.stat().st_size for path in files if path.is_file()}
    whole = sum(sizes.values())
    if asked is None and (whole < _LARGE or not all(map(_fast(channels), files))):
        return None
    order = np.random.default_rng((hyperparameters.seed, 3)).permutation(len(files))
    portions: list[list[Path]] = [[]]
    for path in (files[at] for at in order):
        full = sum(sizes.get(each, 0) for each in portions[-1]) >= _BYTES
        if portions[-1] and (full if asked is None else len(portions[-1]) == asked):
            portions.append([])
        portions[-1].append(path)
    reasons = [*_why_not(places, (*BY_ROWS, *also), hyperparameters), *why_not]
    if asked is None and not reasons and len(portions) < _FEWEST:
        reasons = [f"{len(files)} files are {len(portions)} portions"]
    if reasons and asked is None:
        notes.append(f"The training data is read whole before training: {'; '.join(reasons)}.")
        return None
    if reasons:
        raise HyperparameterError(
            f"Hyperparameter streaming_files has value {asked}, but {'; and '.join(reasons)}.",
            "Leave it out: all is then read before training, and must fit on the disk.",
        )
    largest = max(sum(sizes[path] for path in portion) for portion in portions)
    needed = _TIMES_BYTES * largest * min(MOST, len(portions))
    folder = Path(datasets.config.HF_DATASETS_CACHE)
    if (free := atomic.free_bytes(folder)) < needed:
        raise OutputError(
            f"The rows and tokens of {MOST} portions of the training data take some "
            f"{needed / 1e9:.2f} GB in {folder}, where {free / 1e9:.2f} GB are free: the largest "
            f"portion has files of {largest / 1e9:.2f} GB.",
            "Give more, smaller files (streaming_files=1 makes a portion of each), or a larger "
            "volume, or name a folder on another one in HF_DATASETS_CACHE.",
        )
    notes.append(
        f"streamed: {len(files)} files of training data ({whole / 1e9:.2f} GB) are read while "
        f"others are trained on, in {len(portions)} portions; on the disk are rows and tokens of "
        f"{MOST} of them at most (docs/TRAINING.md). What is told of training rows "
        "below is of the first portion."
    )
    return portions


def unknown_steps(hyperparameters: Hyperparameters) -> list[str]:
    """Why files cannot be portions, of tasks that count their samples as they are made."""
    if hyperparameters.max_train_steps:
        return []
    return [
        "a row may be several samples or none, so that the steps of an epoch are not known: give "
        "max_steps"
    ]


def _why_not(
    places: ChannelLayout, suffixes: Collection[str], hyperparameters: Hyperparameters
) -> Iterator[str]:
    """Why the files cannot be read each by itself."""
    if places.sharded:
        yield "the channel is sharded (ShardedByS3Key)"
    if set(places.files) == {TRAIN} and (hyperparameters.evaluates or hyperparameters.predicts):
        yield "no channel has evaluation data (validation), and eval_strategy is not no"
    if hyperparameters.streaming:
        yield "streaming=True deals rows, not files, to portions"
    others = [
        path for path in places.files.get(TRAIN, [])
        if not path.is_file() or not path.name.lower().removesuffix(".gz").endswith(tuple(suffixes))
    ]  # fmt: skip
    if others:
        names = listed([path.name for path in others[:3]])
        yield f"{names} may not be read by itself ({', '.join(suffixes)} may)"


def _fast(channels: Mapping[str, Path]) -> Callable[[Path], bool]:
    """Whether a file is of a channel in FastFile mode."""
    configured = json.loads(os.environ.get("SM_INPUT_DATA_CONFIG") or "{}")
    folders = [
        folder
        for name, folder in channels.items()
        if isinstance(each := configured.get(name), dict)
        and str(each.get("TrainingInputMode", "")).lower() == "fastfile"
    ]
    return lambda path: any(path.is_relative_to(folder) for folder in folders)
