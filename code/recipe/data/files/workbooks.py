"""Read the sheet of a workbook: Excel's (.xlsx, .xls) or OpenDocument's (.ods)."""

from __future__ import annotations

import functools
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from recipe.data.files.delimited import names_columns, read_cells
from recipe.data.files.part import HeaderHint, Part, is_number
from recipe.errors import DataError, join_names

_PARTS = {"xl/workbook.xml", "content.xml"}
"""What a workbook has of these among its packed files."""
_SHEET, _ADDRESS = (
    re.compile(r"xl/worksheets/[^/]+\.xml"),
    re.compile(rb' r="([A-Z]{1,3})(\d{1,7})"'),
)
_MOST_CELLS, _READ_BYTES = 1 << 25, 1 << 22
"""Cells of a sheet that are made at once, 32 bytes each: all between the first and the last one."""
_LOOKED_AT = 10
_OLD, _PACKED = b"\xd0\xcf\x11\xe0", b"PK\x03\x04"
"""How .xls begins, and how the others do."""


def is_workbook(path: Path) -> bool:
    """Return whether a file is a workbook, by its content."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        head = stream.read(4)
    if head == _OLD or head != _PACKED:
        return head == _OLD
    try:
        with zipfile.ZipFile(path) as packed:
            return not _PARTS.isdisjoint(packed.namelist())
    except (zipfile.BadZipFile, OSError):
        return False


def read_workbook(path: Path, header: HeaderHint) -> Part:
    """Return the rows of the only visible sheet that has some, as delimited text of it would be.

    Args:
        header: Whether the first row names the columns, or names by which it is known.

    Raises:
        DataError: Several sheets have rows; a title stands above the names, or these take two rows;
            a cell is far from the others; or the file is damaged or locked by a password.
    """
    import python_calamine as calamine  # 1 MB, for workbooks

    _check_size(path)
    try:
        with calamine.CalamineWorkbook.from_path(str(path)) as book:
            shown = [
                sheet.name
                for sheet in book.sheets_metadata
                if sheet.visible == calamine.SheetVisibleEnum.Visible
                and sheet.typ == calamine.SheetTypeEnum.WorkSheet
            ]
            sheets = [sheet for name in shown if (sheet := book.get_sheet_by_name(name)).height]
            if len(sheets) > 1:
                raise DataError(
                    f"{path} has {len(sheets)} sheets with rows: "
                    f"{join_names([sheet.name for sheet in sheets])}.",
                    "Remove the others, or save the one to learn as CSV.",
                )
            merged = [area for sheet in sheets for area in sheet.merged_cell_ranges or ()]
            rows = list(_rows(sheets[0])) if sheets else []
    except (calamine.CalamineError, OSError) as error:
        raise DataError(
            f"{path} cannot be read as a workbook: {error}.", "Save its sheet as CSV."
        ) from error
    counts = [sum(map(bool, cells)) for _, cells in rows[:_LOOKED_AT]]
    if rows and any(first[0] + 1 == rows[0][0] and first[1] < last[1] for first, last in merged):
        raise DataError(
            f"{path} line {rows[0][0]} has merged cells.",
            "Name each column in the first row, without merged cells.",
        )
    if len(rows) > 2:
        (_, names), (_, below), (_, further) = rows[:3]
        columns = [*zip(names, below, further, strict=True)]
        # The first one may be pandas' index.
        is_split = any(cell and not name and not is_number(cell) for name, cell, _ in columns[1:])
        if is_split and any(name and cell and not gap for name, gap, cell in columns):
            raise DataError(
                f"{path} seems to have names of columns in two rows: {rows[1][0]} continues "
                f"{rows[0][0]}.",
                "Give each column a name in the first row, and remove the second.",
            )
    if len(counts) > 1 and counts[0] == 1 < max(counts) and not names_columns(rows[0][1]):
        raise DataError(
            f"{path} line {rows[0][0]} has one cell, {max(rows[0][1])[:60]!r}, above rows of more.",
            "Remove the rows above the names of the columns.",
        )
    return read_cells(path, iter(rows), "workbook", header)


def _check_size(path: Path) -> None:
    """Raise DataError if a cell far from the others makes a sheet too large for memory."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as packed:
        for name in filter(_SHEET.fullmatch, packed.namelist()):
            columns = rows = 0
            with packed.open(name) as stream:
                while block := stream.read(_READ_BYTES):
                    for letters, digits in {*_ADDRESS.findall(block)}:
                        number = functools.reduce(lambda n, c: 26 * n + c - 64, letters, 0)
                        columns, rows = max(columns, number), max(rows, int(digits))
            if columns * rows > _MOST_CELLS:
                raise DataError(
                    f"{path} has a sheet of {rows} rows and {columns} columns, by its last cells.",
                    "Delete what stands far from the table, or save it as CSV.",
                )


def _rows(sheet: object) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of each row that has a cell, from 1, and its cells as texts."""
    table = sheet.to_python(skip_empty_area=False)  # type: ignore[attr-defined]
    width = max((index for cells in table for index, cell in enumerate(cells, 1) if cell != ""),
                default=0)  # fmt: skip
    for number, cells in enumerate(table, 1):
        texts = [
            str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell)
            for cell in cells[:width]
        ]
        if any(texts):
            yield number, texts
