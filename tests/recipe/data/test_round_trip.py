"""Rows written as CSV or JSON Lines and read back: equal, or refused with the file and the line."""

from __future__ import annotations

import codecs
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as some

from recipe.data.files import delimited, formats, json_rows
from recipe.errors import DataError

PIECES = ['"', '""', "'", ",", ";", "\t", "|", "\n", "\r\n", "\r", " ", "a", "1", "é", "中", "🙂", "\u2028", "\x85",
          "\x0c", "\x1c", "\\", "\\n", "#", "{", "[", "\ufeff", "null", "text", "label"]  # fmt: skip
# What cuts rows and cells is drawn most.
CELLS = some.lists(some.sampled_from(PIECES) | some.sampled_from('"\n\t,'), max_size=5).map("".join)
ROWS = some.lists(some.tuples(CELLS, CELLS), min_size=1, max_size=12)
ENCODINGS = some.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32", "cp1252"])


def write(path: Path, text: str, encoding: str, packed: bool) -> None:
    """Write a text, with a mark of its byte order where the encoding has none."""
    mark = codecs.BOM_UTF16_BE if encoding == "utf-16-be" else b""
    data = mark + text.encode(encoding, "xmlcharrefreplace" if encoding == "cp1252" else "strict")
    path.write_bytes(gzip.compress(data) if packed else data)


def check(
    path: Path, expected: list[tuple[Any, Any]], lines: list[int], encoding: str, text: str
) -> None:
    """See that a file is read as `expected`, with these lines, or refused with its name and a line."""
    try:
        part = formats.read(path)
    except DataError as error:
        assert re.search(
            rf"{re.escape(str(path))}.* line \d+|{re.escape(str(path))} has two columns", str(error)
        ), error
        # Only what is in doubt is refused: another encoding, or rows that repeat the header.
        doubts = encoding == "cp1252" and not text.isascii()
        assert doubts or "repeats the header" in str(error) or "either way" in str(error), error
        return
    assert encoding != "cp1252" or text.isascii()
    assert part.table.column_names == ["text", "label"]
    assert (
        list(zip(*(column.to_pylist() for column in part.table.columns), strict=True)) == expected
    )
    assert part.lines is not None and [int(line) for line in part.lines] == lines


@settings(max_examples=60)
@given(
    ROWS, some.sampled_from([",", ";", "|", "\t"]), some.sampled_from(["\n", "\r\n"]), ENCODINGS, some.booleans(),
    some.booleans(), some.booleans(), some.integers(1, 40),
)  # fmt: skip
@example([("a\tb\nc", "x"), ("d", "y")], "\t", "\n", "utf-8", False, False, True, 9)
def test_cells_of_csv_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], delimiter: str, end: str,
    encoding: str, packed: bool, all_quoted: bool, last_end: bool, block: int,
) -> None:  # fmt: skip
    path = tmp_path_factory.getbasetemp() / ("train.tsv" if delimiter == "\t" else "train.csv")

    def cell(value: str) -> str:
        is_plain = not re.search(rf"[\"\r\n{re.escape(delimiter)}]", value)
        return value if is_plain and not all_quoted else '"' + value.replace('"', '""') + '"'

    if encoding == "cp1252":
        rows = [
            tuple(value.encode("cp1252", "ignore").decode("cp1252") for value in row)
            for row in rows
        ]  # type: ignore[misc]
    written = [delimiter.join(map(cell, row)) for row in [("text", "label"), *rows]]
    lines = [1]
    for row in written:
        lines.append(lines[-1] + len(re.findall("\r\n|\r|\n", row)) + 1)
    write(path, end.join(written) + end * last_end, encoding, packed)
    kept = [(row, line) for row, line in zip(rows, lines[1:], strict=False) if any(row)]
    with pytest.MonkeyPatch.context() as patch:
        # Small, so that Arrow reads some of it, in several blocks.
        patch.setattr(delimited, "_SAMPLE_ROWS", 2)
        patch.setattr(delimited, "_BLOCK", block)
        check(
            path, [row for row, _ in kept], [line for _, line in kept], encoding, "".join(written)
        )


@settings(max_examples=40)
@given(
    some.lists(some.tuples(some.text(max_size=6) | CELLS, CELLS), min_size=1, max_size=6),
    some.sampled_from(["\n", "\r\n", "\n\n"]), ENCODINGS, some.booleans(), some.booleans(), some.integers(1, 40),
)  # fmt: skip
def test_strings_of_json_lines_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], end: str, encoding: str, packed: bool,
    escaped: bool, block: int,
) -> None:  # fmt: skip
    path = tmp_path_factory.getbasetemp() / "train.jsonl"
    if encoding == "cp1252" and not escaped:
        rows = [
            tuple(value.encode("cp1252", "ignore").decode("cp1252") for value in row)
            for row in rows
        ]  # type: ignore[misc]
    written = [
        json.dumps(dict(zip(("text", "label"), row, strict=True)), ensure_ascii=escaped)
        for row in rows
    ]
    write(path, end.join(written), encoding, packed)
    lines = [1 + number * end.count("\n") for number in range(len(rows))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_rows, "_CHARACTERS_AT_ONCE", block)
        check(path, rows, lines, encoding, "".join(written))
