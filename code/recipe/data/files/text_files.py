"""Files of plain text by their places: pos/1.txt, pos.txt, texts.txt beside labels.txt."""

from __future__ import annotations

import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data.column_names import LABEL, TEXT, split_of, splits_in
from recipe.data.files import formats
from recipe.data.files.part import Part, encoding_of, open_text, undecodable
from recipe.errors import DataError

_SUFFIXES = (".txt", ".text", "")
_POLARITY = (".pos", ".neg")
"""Suffixes that are classes: rt-polarity.pos."""
_TEXT_WORDS = {
    "text",
    "texts",
    "sentence",
    "sentences",
    "x",
    "tweet",
    "tweets",
    "review",
    "reviews",
}
_LABEL_WORDS = {"label", "labels", "y", "target", "targets", "classes"}
_UNLABELLED = {"unsup", "unsupervised", "unlabeled", "unlabelled"}
_AMONG_WORDS = re.compile(r"[-_. ]+")
_MOST_LISTED = 20
_LOOKED_AT = 5  # files of a class
_FEW_FILES, _MANY_LINES = 20, 50


def units(paths: Sequence[Path], notes: list[str]) -> list[Callable[[], Part]]:
    """A call for each part that files are read as: folders and files of classes, texts beside
    labels, else each by its own format.

    Args:
        notes: What is left out is added to it.
    """
    # 20 Newsgroups' files are called 49960.
    plain = [
        path
        for path in paths
        if path.is_file()
        and (path.suffix.lower() in (*_SUFFIXES, *_POLARITY) or path.suffix[1:].isdigit())
    ]
    calls: list[Callable[[], Part]] = []
    in_units: set[Path] = set()
    for texts, labels in _beside_labels(plain):
        calls.append(functools.partial(_read_beside, texts, labels))
        in_units |= {texts, labels}
    for folder, files_of_class in _folders(
        [path for path in plain if path not in in_units]
    ).items():
        for name in [name for name in files_of_class if name.lower() in _UNLABELLED]:
            left = files_of_class.pop(name)
            notes.append(f"{folder / name} has no labels: its {len(left)} texts are not used.")
            in_units |= set(left)
        calls.append(functools.partial(_read_folders, folder, files_of_class))
        in_units |= {path for files in files_of_class.values() for path in files}
        if beside := [path for path in plain if path.parent == folder and path not in in_units]:
            listed = ", ".join(path.name for path in beside[:_MOST_LISTED])
            notes.append(f"not used, as beside the folders of classes in {folder}: {listed}.")
            in_units |= set(beside)
    for folder, file_of_class in _files([path for path in plain if path not in in_units]).items():
        calls.append(functools.partial(_read_files, folder, file_of_class))
        in_units |= set(file_of_class.values())
    others = [path for path in paths if path not in in_units]
    return [*calls, *(functools.partial(formats.read, path) for path in others)]


def _words(path: Path) -> list[str]:
    stem = path.name if path.suffix.lower() not in _SUFFIXES else path.stem
    return [word for word in _AMONG_WORDS.split(stem.lower()) if word]


def _beside_labels(paths: Sequence[Path]) -> Iterator[tuple[Path, Path]]:
    """Files of texts with the files of their labels: train_text.txt, train_labels.txt."""
    for files in _by(paths, lambda path: path.parent).values():
        rests = {
            path: [word for word in _words(path) if word not in _LABEL_WORDS] for path in files
        }
        for labels in [path for path in files if set(_words(path)) & _LABEL_WORDS]:
            others = [path for path in files if not set(_words(path)) & _LABEL_WORDS]
            texts = [
                path
                for path in others
                if [word for word in _words(path) if word not in _TEXT_WORDS] == rests[labels]
                and set(_words(path)) & _TEXT_WORDS
            ]
            texts = texts or (others if len(files) == 2 else [])
            if len(texts) == 1:
                yield texts[0], labels


def _by(paths: Sequence[Path], key: Callable[[Path], Path]) -> dict[Path, list[Path]]:
    groups = defaultdict(list)
    for path in paths:
        groups[key(path)].append(path)
    return groups


def _folders(paths: Sequence[Path]) -> dict[Path, dict[str, list[Path]]]:
    """Folders that hold a folder for each class, with its files: aclImdb/train/pos/0_9.txt."""
    by_folder: dict[Path, dict[str, list[Path]]] = defaultdict(lambda: defaultdict(list))
    for path in paths:
        # The folder of a split may lie within that of a class.
        folder = next(each for each in path.parents if split_of(each.name) is None)
        if "=" not in folder.name:
            by_folder[folder.parent][folder.name].append(path)
    return {
        folder: dict(files_of_class)
        for folder, files_of_class in by_folder.items()
        if _are_classes(list(files_of_class)) and not _are_tables(files_of_class.values())
    }


def _are_tables(files_of_classes: Iterable[Sequence[Path]]) -> bool:
    """Whether files are tables: one by the names in its first line, or most by their cells. In a
    text, all lines may have as many commas."""
    looked_at = [path for files in files_of_classes for path in files[:_LOOKED_AT]]
    cut = sum(map(formats.is_structured, looked_at))
    named = any(formats.is_structured(path, by_names=True) for path in looked_at) if cut else False
    return named or cut * 2 > len(looked_at)


def _files(paths: Sequence[Path]) -> dict[Path, dict[str, Path]]:
    """Folders that hold a file for each class, of a text in each line: pos.txt, neg.txt."""
    by_folder = {}
    for folder, files in _by(paths, lambda path: path.parent).items():
        names = {
            "_".join(word for word in _words(path) if not splits_in(word)): path for path in files
        }
        common = set.intersection(*(set(name.split("_")) for name in names)) if names else set()
        classes = {
            "_".join(word for word in name.split("_") if word not in common): path
            for name, path in names.items()
        }
        whole = len(classes) == len(names) == len(files)
        if whole and _are_classes(list(classes)) and not any(map(formats.is_structured, files)):
            by_folder[folder] = classes
    return by_folder


def _are_classes(names: Sequence[str]) -> bool:
    """Whether these may be classes: not numbered pieces, nor `pos` beside `pos_full`."""
    if len(names) < 2 or not all(names):
        return False
    if all(name.isdigit() for name in names):
        return all(len(name) < 3 for name in names)
    words = [{word for word in _AMONG_WORDS.split(name.lower()) if word} for name in names]
    return len({re.sub(r"\d", "", name) for name in names}) > 1 and not any(
        one < other for one, other in itertools.permutations(words, 2)
    )


def _lines(path: Path) -> list[str]:
    encoding = encoding_of(path)
    try:
        with open_text(path, encoding) as stream:
            lines = stream.read().replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise undecodable(path, encoding, error) from error
    return lines[:-1] if lines and not lines[-1] else lines


def _part(path: Path, kind: str, rows: Sequence[tuple[str, str | None, str]]) -> Part:
    texts, labels, places = zip(*rows, strict=True) if rows else ((), (), ())
    table = {TEXT: pa.array(texts, pa.large_string()), LABEL: pa.array(labels, pa.string())}
    return Part(path=path, format=kind, table=pa.table(table), places=places)


def _read_beside(texts: Path, labels: Path) -> Part:
    of_texts, of_labels = _lines(texts), _lines(labels)
    if len(of_texts) != len(of_labels):
        raise DataError(
            f"{texts} has {len(of_texts)} lines, and {labels} beside it {len(of_labels)}.",
            "Give as many labels as texts, a line each.",
        )
    rows = [
        (text, label.strip() or None, f"line {number}")
        for number, (text, label) in enumerate(zip(of_texts, of_labels, strict=True), 1)
    ]
    return _part(texts, f"txt with the labels of {labels.name}", rows)


def _read_folders(folder: Path, files_of_class: Mapping[str, Sequence[Path]]) -> Part:
    """A text for each file; or for each line, where each class has one file."""
    if all(len(files) == 1 for files in files_of_class.values()):
        return _read_files(folder, {name: files[0] for name, files in files_of_class.items()})
    rows = []
    count = lines = 0
    for name, files in files_of_class.items():
        for path in files:
            of_file = _lines(path)
            count, lines = count + 1, lines + len(of_file)
            place = path.relative_to(folder).as_posix()
            rows.append(("\n".join(of_file).strip(), name, place))
    if count < _FEW_FILES * len(files_of_class) and lines > _MANY_LINES * count:
        raise DataError(
            f"{folder} has folders of classes with {count} files of {lines} lines: it cannot be "
            "told whether a text is a file or a line.",
            "Give one file for each class with a text in each line, or CSV with text and label.",
        )
    return _part(folder, f"txt (a folder is a class, a text is a file: {count} files)", rows)


def _read_files(folder: Path, file_of_class: Mapping[str, Path]) -> Part:
    rows = [
        (line.strip(), name, f"{path.relative_to(folder).as_posix()} line {number}")
        for name, path in file_of_class.items()
        for number, line in enumerate(_lines(path), 1)
        if line.strip()
    ]
    return _part(folder, f"txt (a file is a class, a text is a line: {len(rows)} lines)", rows)
