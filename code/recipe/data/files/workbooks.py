"""Read the sheet of a workbook: Excel's (.xlsx, .xls) or OpenDocument's (.ods)."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

from recipe.data.files.delimited import read_cells
from recipe.data.files.part import HeaderHint, Part
from recipe.errors import DataError, join_names

_PARTS = {"xl/workbook.xml", "xl/workbook.bin", "content.xml"}
"""What a workbook has of these among its packed files."""
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
        DataError: Several sheets have rows, a title stands above the names, or the file is damaged
            or locked by a password.
    """
    import python_calamine as calamine  # 1 MB, for workbooks

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
            rows = list(_rows(sheets[0])) if sheets else []
    except (calamine.CalamineError, OSError) as error:
        raise DataError(
            f"{path} cannot be read as a workbook: {error}.", "Save its sheet as CSV."
        ) from error
    counts = [sum(map(bool, cells)) for _, cells in rows[:2]]
    if len(counts) > 1 and counts[0] == 1 < counts[1]:
        raise DataError(
            f"{path} line {rows[0][0]} has one cell, {max(rows[0][1])[:60]!r}, above rows of more.",
            "Remove the rows above the names of the columns.",
        )
    return read_cells(path, iter(rows), "workbook", header)


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
