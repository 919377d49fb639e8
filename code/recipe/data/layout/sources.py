"""Find the files of a channel that hold rows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from recipe.data.column_names import plain_name
from recipe.data.files import image_files
from recipe.errors import DataError, join_names

_SIDE_SUFFIXES = (
    *(".md", ".rst", ".html", ".pdf", ".bib", ".py", ".ipynb", ".sh", ".yaml", ".yml", ".toml"),
    *(".crc", ".md5", ".sha256", ".sha1", ".lock", ".log", ".png", ".jpg", ".jpeg", ".svg", ".gif"),
    *(".bin", ".pt", ".pth", ".safetensors", ".onnx", ".npy", ".pkl", ".vocab", ".feat", ".er"),
    # Athena's descriptions of results, backups of editors, folders of Windows.
    *(".metadata", ".bak", ".orig", "~", ".swp", ".dvc", "thumbs.db", "desktop.ini", "_manifest"),
    # Downloads that have not ended, and what programs leave next to a file that they write.
    *(".tmp", ".temp", ".part", ".partial", ".crdownload", ".download", ".old", ".save", ".backup"),
)
_SIDE_NAMES = re.compile(
    r"(.*readme|licen[cs]e|notice|citation|changelog|copying|authors|contributing|manifest|checksums?"
    r"|md5sums?|sha256sums?|requirements|stop_?words|vocab|vocabulary|imdber|datasheet)(\..*)?"
    r"|(dataset_infos?|dataset_dict|state|config|metadata|stats|statistics|schema|croissant|template)\.json"
    r"|.*-manifest|(.*[-_.\s])?(submission|predictions?)\.(csv|tsv|txt|jsonl?)|thumbs\.db|desktop\.ini"
)
_CLASSES = re.compile(
    r"class_?(es|names|labels|map)|target_names|label2id|id2label|labels?_?(names|list|map|mapping"
    r"|dict|to_id)|id_to_label|categor(ies|y_names)|labels?|class|category|names|intents|mapping"
)
_WORKBOOKS = (".xlsx", ".xlsm", ".xls", ".ods")
TABLE_SUFFIXES = {
    *(".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet", ".arrow", ".feather"),
    *_WORKBOOKS,
}
_LIST_SUFFIXES = (".txt", ".json", ".names", "")
_COPY_WORDS = (
    "copy|kopie|copie|copia|c[oó]pia|kopia|old|backup|bak|orig|original|tmp|temp|checkpoint|archive"
)
_COPY = re.compile(
    rf"(.+?)(?: ?\(\d+\)|[ _.–-]+\(?(?:{_COPY_WORDS})\)?(?:[ _.-]?\(?[\d-]+\)?)?|~)((?:\.\w+)*)"  # noqa: RUF001
    r"|(.+?\.(?:csv|tsv|txt|jsonl?|ndjson|parquet|xlsx?|xlsm|ods))\W.*"
    rf"|(?:{_COPY_WORDS})(?: of| von| de)?[ _.–-]+(.+)",  # noqa: RUF001
    re.IGNORECASE,
)
"""The names that browsers, editors, log rotation, several systems and people give to copies."""
_MANIFEST_ROW = re.compile(rb'\s*\{.*"source(-ref)?"\s*:')


@dataclass(kw_only=True)
class Sources:
    """The content of a channel's folder."""

    data: list[Path] = field(default_factory=list)
    """Data files and Arrow folders, sorted."""
    passed_over: list[Path] = field(default_factory=list)
    """Files that hold no rows."""
    images: list[Path] = field(default_factory=list)
    """Images, if they are wanted."""
    cards: list[Path] = field(default_factory=list)
    """README.md files with front matter, the outermost first."""
    notes: list[str] = field(default_factory=list)

    def describe(self, channel: str) -> Iterator[str]:
        """Yield a sentence for each kind of file that is not read."""
        yield from self.notes
        if self.images and self.data:
            yield (
                f"of the {len(self.images)} images in channel {channel}, those are used that a "
                "table names"
            )
        if self.passed_over:
            names = [path.name for path in sorted(self.passed_over)]
            yield f"skipped in channel {channel}, since these are not data: {join_names(names)}"


def scan(path: Path, images: bool = False) -> Sources:
    """Return the content of a channel's folder; a channel may be a file.

    Args:
        images: Whether image files are wanted; otherwise they are passed over.

    Raises:
        DataError: A file is a copy of another, or has its rows in another format, by its name.
    """
    sources = Sources()
    _scan(path, sources, (), images)
    paths = set(sources.data)
    for file in sources.data:
        copied = _COPY.fullmatch(file.name)
        original = file
        if copied:
            original = file.with_name(copied[3] or copied[4] or copied[1] + copied[2])
        elif re.fullmatch(_COPY_WORDS, file.parent.name, re.IGNORECASE):
            original = file.parent.parent / file.name
        if original != file and original in paths:
            raise DataError(
                (
                    f"{file} seems to be a copy of {original.name}, so that its rows would be read "
                    "twice."
                ),
                "Remove it, or give it another name.",
            )
    by_stem: dict[Path, Path] = {}
    for file in sources.data:
        stem = file.with_name(file.name.removesuffix(".gz"))
        if stem.suffix.lower() not in TABLE_SUFFIXES:
            continue
        other = by_stem.setdefault(stem.with_suffix(""), file)
        books = (book for book in sources.data if book.suffix.lower() in _WORKBOOKS)
        # train - Sheet1.csv
        other = next((b for b in books if file.name.startswith(f"{b.stem} - ")), other)
        if other is not file:
            raise DataError(
                f"{file} seems to hold the rows of {other.name}, which would be read twice.",
                "Remove one of them, or give it another name.",
            )
    sources.data.sort()
    return sources


def _scan(path: Path, sources: Sources, above: tuple[Path, ...], images: bool) -> None:
    """Add the content of `path` to `sources`.

    Args:
        above: The resolved parent folders, to stop at links that lead back to them.
    """
    # What `Dataset.save_to_disk` writes.
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        sources.data.append(path)
        return
    if path.is_dir() and path.resolve() not in above:
        card = path / "README.md"
        if card.is_file() and card.read_bytes()[:3] == b"---":
            sources.cards.append(card)
        for child in sorted(path.iterdir()):
            is_image = images and child.suffix.lower() in image_files.SUFFIXES
            is_hidden = child.name.startswith("." if is_image else (".", "_", "~$"))
            if is_hidden or re.fullmatch("#.*#", child.name):  # the last: Emacs' unsaved changes
                sources.passed_over.append(child)
            else:
                _scan(child, sources, (*above, path.resolve()), images)
        return
    if not path.is_file():
        sources.notes.append(
            f"{path} is not used: it is not a file, or is a broken link, or links to a parent "
            "folder."
        )
        return
    name = path.name.lower()
    is_side = name.endswith(_SIDE_SUFFIXES) or _SIDE_NAMES.fullmatch(name) is not None
    if name.endswith(".manifest"):
        # Ground Truth's manifests have the texts; those of SageMaker and S3 have names of files.
        with path.open("rb") as stream:
            is_side = _MANIFEST_ROW.match(stream.read(65536)) is None
    is_list = path.suffix.lower() in _LIST_SUFFIXES and _CLASSES.fullmatch(
        plain_name(path.stem).replace("-", "_")
    )
    if images and path.suffix.lower() in image_files.SUFFIXES:
        sources.images.append(path)
    elif is_side or is_list:
        sources.passed_over.append(path)
    elif path.stat().st_size == 0:
        sources.notes.append(f"{path} is empty and not used.")
    else:
        sources.data.append(path)
