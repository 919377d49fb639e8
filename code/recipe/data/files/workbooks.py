"""Excel workbooks (.xlsx) to an Arrow table."""

from __future__ import annotations

import datetime
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data.column_names import SPLIT_COLUMN, split_of
from recipe.data.files.part import Part
from recipe.errors import DataError

_DATES = (datetime.date, datetime.time, datetime.timedelta)
_MARK = b"PK\x03\x04"


def is_workbook(path: Path) -> bool:
    """Whether a file is a zip archive that holds a workbook."""
    with path.open("rb") as stream:
        if stream.read(4) != _MARK:
            return False
    return zipfile.is_zipfile(path) and "xl/workbook.xml" in zipfile.ZipFile(path).namelist()


def read_workbook(path: Path) -> Part:
    """The rows of all sheets that have some; the first row of a sheet names its columns.

    Sheets that are named after splits get a column that says so.

    Raises:
        DataError: it cannot be read, or its sheets have different columns.
    """
    import openpyxl  # type: ignore[import-untyped]

    try:
        # Values that Excel computed, not formulas.
        book = openpyxl.load_workbook(path, read_only=True, data_only=True)
        for sheet in book.worksheets:
            sheet.reset_dimensions()  # what it says of its size may be anything
        sheets = {
            sheet.title: [
                (number, cells)
                for number, cells in enumerate(sheet.iter_rows(values_only=True), 1)
                if any(cell is not None for cell in cells)
            ]
            for sheet in book.worksheets
            if sheet.sheet_state == "visible"
        }
        book.close()
    except MemoryError:
        raise
    except Exception as error:  # Of a damaged workbook, openpyxl raises all kinds.
        raise DataError(
            f"{path} is no readable Excel workbook: {error}.",
            "Write it again, or check that the upload is complete.",
        ) from error
    full = {title: rows for title, rows in sheets.items() if len(rows) > 1}
    headers = {title: _header(path, title, rows[0][1]) for title, rows in full.items()}
    if len(set(headers.values())) > 1:
        listed = "; ".join(f"{title} ({', '.join(names)})" for title, names in headers.items())
        raise DataError(
            f"{path} has sheets of different columns: {listed}.",
            "Keep one sheet, or sheets of the same columns.",
        )
    named = [title for title in full if split_of(title) is not None]
    if named and len(named) < len(full):
        others = ", ".join(title for title in full if title not in named)
        raise DataError(
            f"{path} has sheets that name a split ({', '.join(named)}) and others that name none "
            f"({others}).",
            "Rename those, or remove them.",
        )
    names = next(iter(headers.values()), ())
    rows = [(title, *row) for title, of_sheet in full.items() for row in of_sheet[1:]]
    columns = {}
    for at, name in [(at, name) for at, name in enumerate(names) if name]:
        values = [cells[at] if at < len(cells) else None for _, _, cells in rows]
        values = [str(value) if isinstance(value, _DATES) else value for value in values]
        if len({type(value) for value in values if value is not None}) > 1:
            values = [value if value is None else str(value) for value in values]
        columns[name] = pa.array(values)
    if named and SPLIT_COLUMN not in columns:
        columns[SPLIT_COLUMN] = pa.array([title for title, _, _ in rows], pa.string())
    return Part(
        path=path,
        format=f"xlsx ({len(full)} sheets)" if len(full) > 1 else "xlsx",
        table=pa.table(columns),
        places=[f"sheet {title!r} row {number}" for title, number, _ in rows],
    )


def _header(path: Path, title: str, cells: tuple[Any, ...]) -> tuple[str, ...]:
    """The names of the columns; '' for a column without."""
    names = ["" if cell is None else str(cell).strip() for cell in cells]
    while names and not names[-1]:
        names.pop()
    twice = {name for name in names if name and names.count(name) > 1}
    wrong = [cell for cell in cells if cell is not None and not isinstance(cell, str)]
    if twice or wrong or not any(names):
        what = f"two columns called {twice.pop()!r}" if twice else f"no names but {wrong[:1]}"
        raise DataError(
            f"{path}: the first row of sheet {title!r} has {what}.",
            "Put the names of the columns there, such as text and label.",
        )
    return tuple(names)
