"""Which files below a channel hold rows, and which lie beside them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from recipe.data.files.part import is_arrow_folder
from recipe.data.layout import class_names, dataset_card
from recipe.data.layout.class_names import ClassNames
from recipe.data.layout.dataset_card import Card
from recipe.errors import listed

_SIDE_SUFFIXES = (
    *(".md", ".rst", ".html", ".pdf", ".bib", ".py", ".ipynb", ".sh", ".yaml", ".yml", ".toml"),
    *(".crc", ".md5", ".sha256", ".sha1", ".lock", ".log", ".png", ".jpg", ".jpeg", ".svg", ".gif"),
    *(".bin", ".pt", ".pth", ".safetensors", ".onnx", ".npy", ".pkl", ".vocab", ".feat", ".er"),
)
_SIDE_NAMES = re.compile(
    r"(.*readme|licen[cs]e|notice|citation|changelog|copying|authors|contributing|manifest|checksums?"
    r"|md5sums?|sha256sums?|requirements|stop_?words|vocab|vocabulary|imdber|datasheet)(\..*)?"
    r"|(dataset_infos?|dataset_dict|state|config|metadata|stats|statistics|schema|croissant)\.json"
    r"|.*-manifest|.*submission.*\.(csv|tsv|txt)"
)
_MANIFEST_ROW = re.compile(rb'\s*\{.*"source(-ref)?"\s*:')


@dataclass(kw_only=True)
class Sources:
    """What lies below a channel."""

    data: list[Path] = field(default_factory=list)
    """Data files and Arrow folders, sorted."""
    passed_over: list[Path] = field(default_factory=list)
    """Files that hold no rows."""
    class_names: list[ClassNames] = field(default_factory=list)
    cards: list[Card] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def describe(self, channel: str) -> Iterator[str]:
        """What is not read, a sentence each."""
        yield from self.notes
        if self.passed_over:
            names = [path.name for path in sorted(self.passed_over)]
            yield f"passed over in channel {channel}, as no data: {listed(names)}"


def scan(path: Path) -> Sources:
    """What lies below a channel's folder; a channel may be a file."""
    sources = Sources()
    _scan(path, sources, ())
    if not sources.data:
        # A corpus of names may be called names.txt.
        sources.data = [Path(names.source) for names in sources.class_names]
        sources.class_names = []
    sources.data.sort()
    return sources


def _scan(path: Path, sources: Sources, above: tuple[Path, ...]) -> None:
    """`above` are the real folders that led here, for links that lead back."""
    if is_arrow_folder(path):
        sources.data.append(path)
        return
    if path.is_dir() and path.resolve() not in above:
        if card := dataset_card.read(path):
            sources.cards.append(card)
            sources.notes += card.notes
        for child in sorted(path.iterdir()):
            if child.name.startswith((".", "_")):
                sources.passed_over.append(child)
            else:
                _scan(child, sources, (*above, path.resolve()))
        return
    if not path.is_file():
        sources.notes.append(
            f"{path} is no file, or a link that leads back or to nothing: not used."
        )
        return
    name = path.name.lower()
    is_side = name.endswith(_SIDE_SUFFIXES) or _SIDE_NAMES.fullmatch(name) is not None
    if name.endswith(".manifest"):
        # Ground Truth's has the texts, SageMaker's and S3's the names of files.
        with path.open("rb") as stream:
            is_side = _MANIFEST_ROW.match(stream.read(65536)) is None
    if is_side:
        sources.passed_over.append(path)
    elif path.stat().st_size == 0:
        sources.notes.append(f"{path} is empty and not used.")
    elif class_names.is_candidate(path) and (names := class_names.read(path)):
        sources.class_names.append(names)
    elif class_names.is_sure(path):
        sources.passed_over.append(path)
    else:
        sources.data.append(path)
