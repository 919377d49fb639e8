"""Write and check SHA-256 sums of a model's files, since safetensors has no checksum.

The file has the format of `sha256sum`: `sha256sum -c SHA256SUMS` checks it, too.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from recipe.errors import ModelError

NAME = "SHA256SUMS"
_PART = r"(?!\.{1,2}(?:/|$))[^/\\]+"  # a path component that stays inside
_LINE = re.compile(rf"([0-9a-f]{{64}})  ({_PART}(?:/{_PART})?)")


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    hashed = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            hashed.update(block)
    return hashed.hexdigest()


def sums(folder: Path, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the sums of the files in `folder`, except its README.md. Those that are `known` are
    not computed."""
    names = sorted(_names(folder) - {NAME, "README.md"})
    return {name: (known or {}).get(name) or digest(folder / name) for name in names}


def write(folder: Path, known: Mapping[str, str] | None = None) -> None:
    """Write the sums of the files in `folder` for `verified` (`sums`)."""
    lines = (f"{digits}  {name}\n" for name, digits in sums(folder, known).items())
    (folder / NAME).write_text("".join(lines))


def _names(folder: Path) -> set[str]:
    """Return the files in `folder` and its subfolders (modules of sentence-transformers)."""
    paths = (*folder.glob("*"), *folder.glob("*/*"))
    return {path.relative_to(folder).as_posix() for path in paths if path.is_file()}


@contextlib.contextmanager
def verified(location: str) -> Iterator[None]:
    """Compare the files in a folder with their sums while the block loads them.

    Args:
        location: A folder. One without sums, or a name on the hub, is not checked.

    Raises:
        ModelError: A file has changed or is missing; replaces an error of the block.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        looking = pool.submit(_damage, Path(location))
        try:
            yield
        finally:
            if damage := looking.result():
                raise ModelError(
                    f"The model {location} cannot be loaded: {damage}.",
                    "Copy its files again. If a file was changed on purpose, remove its line from "
                    f"{NAME}.",
                )


def _damage(folder: Path) -> str:
    """Describe the damage of the files in `folder`; return "" if there is none."""
    sums = folder / NAME
    if not sums.is_file():
        return ""
    present = _names(folder)
    for line in sums.read_text(errors="replace").splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            return f"{NAME} has the invalid line {line[:100]!r}"
        written, name = match.groups()
        if name not in present:
            return f"{name[:100]} is missing, which {NAME} lists"
        if digest(folder / name) != written:
            return f"{name} has changed since it was written ({NAME} lists another sum)"
    return ""
