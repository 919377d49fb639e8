"""Small files that hold gigabytes: an error that names them, within the memory that is free."""

from __future__ import annotations

import gzip
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.paths import CODE

FREE = 1 << 30
PEAK = 3 << 30
"""Bytes: the process itself, what was free, and what is reserved."""

# The host's memory is replaced by a small one, so that the test does not fill the machine's.
READ = f"""
import resource, sys
from pathlib import Path
from recipe.data.files import formats, head
from recipe.errors import DataError
from recipe.runtime import memory
memory.available = lambda: {FREE}
before = resource.getrlimit(resource.RLIMIT_DATA)
reader, path = {{"formats": formats.read, "head": head.read}}[sys.argv[1]], Path(sys.argv[2])
try:
    print(reader(path))
except DataError as error:
    print(error)
assert resource.getrlimit(resource.RLIMIT_DATA) == before
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def repeated_value(path: Path) -> None:
    """One text of 1 MB, as the value of 40,000 rows."""
    values = pa.DictionaryArray.from_arrays(pa.array([0] * 40_000, pa.int32()), ["a" * 2**20])
    table = pa.table({"text": values, "label": [0] * 40_000})
    pq.write_table(table, path, store_schema=False, dictionary_pagesize_limit=1 << 24)


def zeros(path: Path) -> None:
    """20 batches of 128 MB."""
    batch = pa.record_batch({"number": pa.array(memoryview(bytes(1 << 27)).cast("q"), pa.int64())})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(str(path), batch.schema, options=options) as stream:
        for _ in range(20):
            stream.write(batch)


def endless_line(path: Path) -> None:
    """One line of 5 GB."""
    path.write_bytes(gzip.compress(b"text,label\n") + gzip.compress(b"a" * (1 << 27)) * 40)


def endless_text(path: Path) -> None:
    """One JSON string of 5 GB."""
    path.write_bytes(gzip.compress(b'[{"text": "') + gzip.compress(b"a" * (1 << 27)) * 40)


def workbook(path: Path, rows: str, dimension: str = "A1:B2") -> None:
    space = "http://schemas.openxmlformats.org"
    related = f"{space}/officeDocument/2006/relationships"
    parts = {
        "[Content_Types].xml": f'<Types xmlns="{space}/package/2006/content-types"><Override '
        'PartName="/xl/workbook.xml" ContentType="application/vnd.openxmlformats-officedocument.'
        'spreadsheetml.sheet.main+xml"/><Override PartName="/xl/worksheets/sheet1.xml" '
        'ContentType="application/vnd.openxmlformats-officedocument.spreadsheetml.worksheet+xml"/>'
        "</Types>",
        "_rels/.rels": f'<Relationships xmlns="{space}/package/2006/relationships"><Relationship '
        f'Id="r1" Type="{related}/officeDocument" Target="xl/workbook.xml"/></Relationships>',
        "xl/_rels/workbook.xml.rels": f'<Relationships xmlns="{space}/package/2006/relationships">'
        f'<Relationship Id="r1" Type="{related}/worksheet" Target="worksheets/sheet1.xml"/>'
        "</Relationships>",
        "xl/workbook.xml": f'<workbook xmlns="{space}/spreadsheetml/2006/main" xmlns:r="{related}">'
        '<sheets><sheet name="one" sheetId="1" r:id="r1"/></sheets></workbook>',
        "xl/worksheets/sheet1.xml": f'<worksheet xmlns="{space}/spreadsheetml/2006/main">'
        f'<dimension ref="{dimension}"/><sheetData>{rows}</sheetData></worksheet>',
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in parts.items():
            archive.writestr(name, text)


def text(place: str, value: str) -> str:
    return f'<c r="{place}" t="inlineStr"><is><t>{value}</t></is></c>'


HEADER = f'<row r="1">{text("A1", "text")}{text("B1", "label")}</row>'


def wide_rows(path: Path) -> None:
    """A cell in the last column of each of 60,000 rows."""
    rows = (f'<row r="{n}"><c r="XFD{n}"><v>1</v></c></row>' for n in range(2, 60_002))
    workbook(path, HEADER + "".join(rows))


def read(path: Path, reader: str) -> tuple[str, int]:
    """What is said of a file, and the most memory that reading it took, in bytes."""
    done = subprocess.run(
        [sys.executable, "-c", READ, reader, str(path)],
        cwd=CODE,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    *said, peak = done.stdout.splitlines()
    return "\n".join(said), int(peak)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (repeated_value, "train.parquet"),
        (zeros, "train.arrow"),
        (endless_line, "train.csv.gz"),
        (endless_text, "train.json.gz"),
        (wide_rows, "train.xlsx"),
    ],
)
def test_a_small_file_of_gigabytes_is_refused_by_name(
    tmp_path: Path, make: Callable[[Path], None], name: str
) -> None:
    path = tmp_path / name
    make(path)
    assert path.stat().st_size < 20 << 20
    said, peak = read(path, "formats")
    assert str(path) in said
    assert "takes more memory than the 1.07 GB that are free" in said
    assert peak < PEAK


def test_the_first_rows_are_read_within_bounds_too(tmp_path: Path) -> None:
    repeated_value(tmp_path / "train.parquet")
    said, peak = read(tmp_path / "train.parquet", "head")
    assert peak < PEAK, said[:200]


def test_a_workbooks_word_about_its_size_is_not_believed(tmp_path: Path) -> None:
    """Seventeen billion cells, by its header, of which four are there."""
    path = tmp_path / "train.xlsx"
    last = f'<row r="1048576">{text("A1048576", "good")}{text("B1048576", "yes")}</row>'
    workbook(path, HEADER + last, "A1:XFD1048576")
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from pathlib import Path; from recipe.data.files import "
         "workbooks; print(workbooks.read_workbook(Path(sys.argv[1])).table.to_pylist())", str(path)],
        cwd=CODE, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.strip() == "[{'text': 'good', 'label': 'yes'}]", done.stderr
