"""What pip reads from requirements files besides packages: the options that say where to look.

A file may name others (`-r base.txt`, `-c pins.txt`), and pip takes the options of all of them, as
it does for one. The rules are those of pip's own reader (pip._internal.req.req_file), which is
private: lines joined at their ends, comments, `${NAME}`, options before requirements, paths from
the file that names them.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

_REMOTE = re.compile(r"(?i)https?:")
_COMMENT = re.compile(r"(^|\s+)#.*$")
_VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)\}")
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_OPTIONS = argparse.ArgumentParser(add_help=False, exit_on_error=False)
_OPTIONS.add_argument("-i", "--index-url", "--pypi-url")
_OPTIONS.add_argument("--extra-index-url", action="append", default=[])
_OPTIONS.add_argument("--no-index", action="store_true")
_OPTIONS.add_argument("-f", "--find-links", action="append", default=[])
_OPTIONS.add_argument("-r", "--requirement", action="append", default=[])
_OPTIONS.add_argument("-c", "--constraint", action="append", default=[])


@dataclass(kw_only=True)
class Requirements:
    """What stands in some requirements files, and in those that they name."""

    text: str = ""
    """All of it, without comments, its variables replaced; with the credentials that it has."""
    options: list[tuple[str, str]] = field(default_factory=list)
    """Long names and values in the files' order: `("--index-url", "https://...")`; '' of a flag."""
    remote: list[str] = field(default_factory=list)
    """Addresses of files that pip will fetch: what these say is not known here."""


def read(paths: Sequence[str], folder: Path, environ: Mapping[str, str]) -> Requirements:
    """Read requirements files as pip will, except those behind http.

    Args:
        paths: Files or addresses, relative to `folder`.
        folder: Where pip is started.
        environ: Its variables, which `${NAME}` stands for.

    A file that cannot be read, or an option that is none, is pip's to complain of.
    """
    told = Requirements()
    seen: set[Path] = set()
    for path in paths:
        _read(path, folder, environ, told, seen)
    return told


def _read(
    name: str, folder: Path, environ: Mapping[str, str], told: Requirements, seen: set[Path]
) -> None:
    if _REMOTE.match(name):
        told.remote.append(name)
        told.text += f"{name}\n"
        return
    local = unquote(urlsplit(name).path) if name.lower().startswith("file:") else name
    path = folder / local
    if path.resolve() in seen:
        return
    seen.add(path.resolve())
    content = b""
    with contextlib.suppress(OSError):
        content = path.read_bytes()
    encoding = next((each for mark, each in _MARKS if content.startswith(mark)), "utf-8")
    for line in _lines(content.decode(encoding, "replace").removeprefix("\ufeff")):
        line = _VARIABLE.sub(lambda found: environ.get(found[1]) or found[0], line)
        told.text += f"{line}\n"
        if not line.startswith("-"):
            continue
        try:
            given, _ = _OPTIONS.parse_known_args(shlex.split(line))
        except (ValueError, argparse.ArgumentError):
            continue
        # pip takes nothing else from a line that names another file.
        if others := [*given.requirement, *given.constraint][:1]:
            _read(others[0], path.parent, environ, told, seen)
            continue
        values = {
            "--index-url": [given.index_url] if given.index_url else [],
            "--extra-index-url": given.extra_index_url,
            "--no-index": [""] if given.no_index else [],
            "--find-links": given.find_links,
        }
        told.options += [(option, value) for option in values for value in values[option]]


def _lines(text: str) -> list[str]:
    """The lines that say something: joined where they end in a backslash, without comments."""
    lines, begun = [], ""
    for line in text.splitlines():
        if line.endswith("\\") and not _COMMENT.match(line):
            begun += line.rstrip("\\")
            continue
        lines.append(begun + (" " if _COMMENT.match(line) else "") + line)
        begun = ""
    return [kept for line in [*lines, begun] if (kept := _COMMENT.sub("", line).strip())]
