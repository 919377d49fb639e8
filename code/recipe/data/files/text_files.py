"""Open text files by their encodings, and tell what an unknown one may be."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import itertools
import zlib
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

from recipe.errors import DataError

_CHUNK_BYTES, _JUDGED_BYTES = 1 << 24, 1 << 17
_UTF8, _WESTERN = "utf-8", "cp1252"
_READ_AS = {
    "iso8859-1": "cp1252",
    "iso8859-9": "cp1254",
    "utf-16": "utf-16-le",
    "utf-32": "utf-32-le",
}
"""Encodings by which others are read: as browsers do, since control characters of latin-1 are the
quotes of windows-1252; and because Python's utf-16 needs a byte order mark."""
_USUAL = {
    *(f"cp125{number}" for number in range(8)),
    *("cp874", "gb18030", "big5", "cp932", "cp949", "euc_jp", "koi8-r", "koi8-u"),
}
"""Encodings that are proposed: those in which tables are still written."""
_ENOUGH, _SURE, _LIKELIER = 60, 0.1, 1.5
"""Bytes that are not ASCII by which windows-1252 is judged, if it is given; chardet's confidence
from which an encoding is named (European texts of some lines reach 0.13 to 0.3); and how much more
likely than windows-1252 another one has to be."""
_EXAMPLES = "windows-1252 for western languages, windows-1251 for Russian or gb18030 for Chinese"
_encoding: ContextVar[str | None] = ContextVar("_encoding", default=None)


class WrongEncoding(DataError):
    """A text file is not in the encoding in which it is read.

    Args:
        likely: What it seems to be; None if that is not known.
        is_mostly: Whether most of it is as it should be.
    """

    def __init__(
        self, path: Path, message: str, likely: str | None, is_mostly: bool = False
    ) -> None:
        remedy = f"Give its encoding: encoding={_EXAMPLES}."
        if is_mostly:
            remedy = "Most of it is: correct the line, or check that the upload is complete."
        elif likely == _UTF8:
            remedy = "Leave out encoding: its characters are UTF-8's."
        elif likely is not None:
            likely = likely.replace("cp125", "windows-125")
            remedy = f"Give encoding={likely}, which its characters seem to be, or another one."
        super().__init__(message, remedy)
        self.path, self.likely = path, likely


def open_text(path: Path, encoding: str, newline: str = "") -> io.TextIOWrapper:
    """Open a text file, which may be gzip's, and keep its line ends."""
    return io.TextIOWrapper(open_bytes(path), encoding=encoding, newline=newline)


def open_bytes(path: Path) -> io.BufferedReader:
    """Open the bytes of a file, which may be gzip's."""
    with path.open("rb") as stream:
        packed = stream.read(2) == b"\x1f\x8b"
    # GzipFile has what TextIOWrapper and a reader need of a BufferedReader.
    return gzip.open(path, "rb") if packed else path.open("rb")  # type: ignore[return-value]


def first_lines(path: Path, count: int) -> list[str]:
    """Return the first lines of a text file; [] if it cannot be read as text."""
    try:
        with open_text(path, encoding_of(path)) as stream:
            return list(itertools.islice(stream, count))
    except (UnicodeDecodeError, EOFError, OSError, zlib.error):
        return []


@contextlib.contextmanager
def files_encoded(encoding: str | None) -> Iterator[None]:
    """Read text files without a byte order mark by an encoding, by default UTF-8."""
    before = _encoding.set(encoding)
    try:
        yield
    finally:
        _encoding.reset(before)


def encoding_of(path: Path) -> str:
    """Return the encoding of a file by its byte order mark, or the one of `files_encoded`."""
    with open_bytes(path) as stream:
        head = stream.read(4)
    if head in (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE):
        return "utf-32"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    name = codecs.lookup(_encoding.get() or _UTF8).name
    if name == _UTF8 or head.startswith(codecs.BOM_UTF8):
        return "utf-8-sig"
    return _READ_AS.get(name, name)


def check_encoding(path: Path, encoding: str) -> None:
    """Raise WrongEncoding if an encoding that is given would read a file wrongly, without an
    error."""
    if encoding in ("utf-8-sig", "utf-16", "utf-32"):  # the usual one, or by a byte order mark
        return
    with open_bytes(path) as stream:
        has_zeros = b"\0" in stream.read(_CHUNK_BYTES)  # as the end of a line in UTF-16
    is_wide = encoding.startswith(("utf-16", "utf-32"))
    if is_wide and has_zeros:
        return
    ranked, letters = _likely_encodings(path)
    best = next(iter(ranked), _UTF8)
    # windows-1252 is often given by habit, and reads nearly all bytes.
    is_habit = encoding == _WESTERN and _WESTERN not in ranked and letters >= _ENOUGH
    if is_wide or _UTF8 in ranked or (is_habit and len(ranked) > 0):
        raise WrongEncoding(
            path, f"{path} is not {encoding}, which the hyperparameter encoding names.", best
        )


def _likely_encodings(path: Path) -> tuple[dict[str, float], int]:
    """Return how sure it is that the characters of a file that are not ASCII are in an encoding,
    the surest first, and how many bytes these are: 0 to 1, by chardet; of UTF-8, if most are."""
    import chardet  # 3.6 MB, for files that are not UTF-8

    odd, utf8 = b"", 0
    with open_bytes(path) as stream:
        for line in stream:
            if not line.isascii():
                text = line.decode(errors="replace")
                utf8 += len(text) - len(text.encode("ascii", "ignore"))
                utf8 -= 2 * text.count("\N{REPLACEMENT CHARACTER}")
                odd += line if len(odd) < _JUDGED_BYTES else b""
    letters = sum(byte > 127 for byte in odd)
    if utf8 > 0:
        return {_UTF8: 1.0}, letters
    ranked: dict[str, float] = {}
    for guess in chardet.detect_all(odd) if odd else ():
        with contextlib.suppress(LookupError, UnicodeDecodeError):
            name = codecs.lookup(guess["encoding"] or "").name
            name = _READ_AS.get(name, name)
            odd.decode(name)
            if name in _USUAL:
                ranked.setdefault(name, guess["confidence"])
    most = max(ranked.values(), default=0.0)
    if _WESTERN in ranked and most < max(_SURE, _LIKELIER * ranked[_WESTERN]):
        return {_WESTERN: ranked.pop(_WESTERN), **ranked}, letters
    return (ranked if most >= _SURE else {}), letters


def decoding_error(path: Path, encoding: str, error: UnicodeDecodeError) -> WrongEncoding:
    """Return the error for a file that is not in that encoding, with its first invalid line."""
    bad_line = 1
    with open_bytes(path) as stream:
        for number, line in enumerate(stream, 1):
            try:
                line.decode(encoding)
            except UnicodeDecodeError:
                bad_line = number
                break
    likely = None
    if encoding not in ("utf-16", "utf-32"):
        likely = next(iter(_likely_encodings(path)[0]), None)
    name = encoding.removesuffix("-sig")
    message = f"{path} line {bad_line} is not {name}: {error.reason}."
    is_mostly = likely == name or encoding in ("utf-16", "utf-32")
    return WrongEncoding(path, message, None if is_mostly else likely, is_mostly)
