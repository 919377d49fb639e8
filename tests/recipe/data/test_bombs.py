"""Small files that hold gigabytes: an error that names them, within the memory that is free."""

from __future__ import annotations

import gzip
import subprocess
import sys
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


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (repeated_value, "train.parquet"),
        (zeros, "train.arrow"),
        (endless_line, "train.csv.gz"),
        (endless_text, "train.json.gz"),
    ],
)
def test_a_small_file_of_gigabytes_is_refused_by_name(
    tmp_path: Path, make: Callable[[Path], None], name: str
) -> None:
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
        *output, peak = done.stdout.splitlines()
        return "\n".join(output), int(peak)

    path = tmp_path / name
    make(path)
    assert path.stat().st_size < 20 << 20
    output, peak = read(path, "formats")
    assert str(path) in output
    assert "takes more memory than the 1.07 GB that are free" in output
    assert peak < PEAK
    # A batch of its first rows, which the detection of a task reads, would be gigabytes, too.
    if make is repeated_value:
        assert read(path, "head")[1] < PEAK
