"""Workbooks of Excel, as small as they can be."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

_MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
_RELATIONS = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_PACKAGE = "http://schemas.openxmlformats.org/package/2006"
_TYPE = "application/vnd.openxmlformats-officedocument.spreadsheetml"


def _cell(value: object) -> str:
    if value is None:
        return "<c/>"
    if isinstance(value, bool):
        return f'<c t="b"><v>{int(value)}</v></c>'
    if isinstance(value, (int, float)):
        return f"<c><v>{value}</v></c>"
    return f'<c t="inlineStr"><is><t xml:space="preserve">{escape(str(value))}</t></is></c>'


def workbook(sheets: Mapping[str, Sequence[Sequence[object]]], hidden: str = "") -> bytes:
    """Return a workbook with the cells of the rows of each sheet.

    Args:
        hidden: The name of a sheet that is hidden.
    """
    numbered = list(enumerate(sheets, 1))
    listed = "".join(
        f'<sheet name="{name}" sheetId="{n}" r:id="rId{n}"{" state=" + chr(34) + "hidden" + chr(34) if name == hidden else ""}/>'
        for n, name in numbered
    )
    files = {
        "[Content_Types].xml": f'<Types xmlns="{_PACKAGE}/content-types">'
        '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        f'<Override PartName="/xl/workbook.xml" ContentType="{_TYPE}.sheet.main+xml"/>'
        + "".join(f'<Override PartName="/xl/worksheets/sheet{n}.xml" ContentType="{_TYPE}.worksheet+xml"/>'
                  for n, _ in numbered)
        + "</Types>",
        "_rels/.rels": f'<Relationships xmlns="{_PACKAGE}/relationships"><Relationship Id="rId1" '
        f'Type="{_RELATIONS}/officeDocument" Target="xl/workbook.xml"/></Relationships>',
        "xl/workbook.xml": f'<workbook xmlns="{_MAIN}" xmlns:r="{_RELATIONS}"><sheets>{listed}</sheets></workbook>',
        "xl/_rels/workbook.xml.rels": f'<Relationships xmlns="{_PACKAGE}/relationships">'
        + "".join(f'<Relationship Id="rId{n}" Type="{_RELATIONS}/worksheet" Target="worksheets/sheet{n}.xml"/>'
                  for n, _ in numbered)
        + "</Relationships>",
    }  # fmt: skip
    for n, name in numbered:
        rows = "".join(f"<row>{''.join(map(_cell, cells))}</row>" for cells in sheets[name])
        files[f"xl/worksheets/sheet{n}.xml"] = (
            f'<worksheet xmlns="{_MAIN}"><sheetData>{rows}</sheetData></worksheet>'
        )
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return packed.getvalue()
