"""Read folders of classes, whose files are texts: `pos/1.txt`, `neg/1.txt`."""

from __future__ import annotations

import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data.column_names import LABEL, TEXT, split_of
from recipe.data.files import formats
from recipe.data.files.part import HeaderHint, Part, encoding_of, open_text, undecodable
from recipe.errors import DataError, listed

_SUFFIXES = (".txt", ".text", "")
_UNLABELLED = {"unsup", "unsupervised", "unlabeled", "unlabelled"}
_BETWEEN_WORDS = re.compile(r"[-_. ]+")
_SAMPLED_FILES = 5  # of each class
_FEW_FILES, _MANY_LINES = 20, 50


def units(
    paths: Sequence[Path], notes: list[str], header: HeaderHint = frozenset()
) -> list[Callable[[], Part]]:
    """Return a reader of each part: a folder of classes, or a file."""
    # The files of 20 Newsgroups are called 49960.
    plain = [
        path
        for path in paths
        if path.is_file() and (path.suffix.lower() in _SUFFIXES or path.suffix[1:].isdigit())
    ]
    by_folder: dict[Path, dict[str, list[Path]]] = defaultdict(lambda: defaultdict(list))
    for path in plain:
        # The folder of a split may be inside that of a class.
        folder = next(above for above in path.parents if split_of(above.name) is None)
        if "=" not in folder.name:
            by_folder[folder.parent][folder.name].append(path)
    calls: list[Callable[[], Part]] = []
    in_units: set[Path] = set()
    for folder, files_of_class in by_folder.items():
        if not _are_classes(files_of_class):
            continue
        for name in [name for name in files_of_class if name.lower() in _UNLABELLED]:
            unlabelled = files_of_class.pop(name)
            notes.append(
                f"{folder / name} has no labels: its {len(unlabelled)} texts are not used."
            )
            in_units |= set(unlabelled)
        calls.append(functools.partial(_read_folders, folder, files_of_class))
        in_units |= {path for files in files_of_class.values() for path in files}
        if rest := [path for path in plain if path.parent == folder and path not in in_units]:
            names = listed([path.name for path in rest])
            notes.append(f"not used, as {folder} has folders of classes: {names}.")
            in_units |= set(rest)
    others = [path for path in paths if path not in in_units]
    loose = [path for path in plain if path not in in_units and not formats.is_structured(path)]
    if len(loose) == len(others) > 1:
        folders = listed(sorted({path.parent.name for path in loose}))
        raise DataError(
            f"{listed(loose, 2)} hold plain text, and their folders ({folders}) are not those of "
            "two or more classes: names such as train, dev or test are splits.",
            "Write a CSV with the columns text and label, or rename the folder of a class that "
            "has the name of a split.",
        )
    return [*calls, *(functools.partial(formats.read, path, header=header) for path in others)]


def _are_classes(files: Mapping[str, Sequence[Path]]) -> bool:
    """Return whether folders may be those of classes (not numbered pieces, nor variants such as
    `pos` and `pos_full`), with files of text and not of tables."""
    if len(files) < 2 or not all(files):
        return False
    if all(name.isdigit() for name in files):
        are_names = all(len(name) < 3 for name in files)
    else:
        words = [{word for word in _BETWEEN_WORDS.split(name.lower()) if word} for name in files]
        are_names = len({re.sub(r"\d", "", name) for name in files}) > 1 and not any(
            one < other for one, other in itertools.permutations(words, 2)
        )
    # The first line of one table names its columns, or most have cells: the lines of a text may all
    # have the same number of commas.
    sample = [path for paths in files.values() for path in paths[:_SAMPLED_FILES]]
    cut = sum(map(formats.is_structured, sample)) if are_names else 0
    is_table = cut and any(formats.is_structured(path, by_names=True) for path in sample)
    return are_names and not is_table and cut * 2 <= len(sample)


def _read_folders(folder: Path, files_of_class: Mapping[str, Sequence[Path]]) -> Part:
    """Return a row for each file."""
    rows = []
    lines = 0
    for name, files in files_of_class.items():
        for path in files:
            encoding = encoding_of(path)
            try:
                with open_text(path, encoding) as stream:
                    text = stream.read().replace("\r\n", "\n")
            except UnicodeDecodeError as error:
                raise undecodable(path, encoding, error) from error
            lines += text.rstrip("\n").count("\n") + 1
            rows.append((text.strip(), name, path.relative_to(folder).as_posix()))
    is_single = all(len(files) == 1 for files in files_of_class.values())
    is_few = len(rows) < _FEW_FILES * len(files_of_class)
    if is_single or (is_few and lines > _MANY_LINES * len(rows)):
        raise DataError(
            f"{folder} has folders of classes with {len(rows)} files of {lines} lines: each file "
            "may be a text, or each line.",
            "Write a CSV with the columns text and label.",
        )
    texts, labels, locations = zip(*rows, strict=True)
    table = {TEXT: pa.array(texts, pa.large_string()), LABEL: pa.array(labels, pa.string())}
    kind = f"txt (a folder is a class, a text is a file: {len(rows)} files)"
    return Part(path=folder, format=kind, table=pa.table(table), lines=locations, unit="")
