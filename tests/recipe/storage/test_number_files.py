"""Numbers whose writing was killed: nothing of them stays after an hour, and nothing that a living
process writes is taken from it."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from recipe.storage import number_files
from tests.support.paths import CODE

KEY = "0123456789abcdef" * 2
WRITER = """
import sys, pathlib, numpy as np
from recipe.storage import number_files
def parts():
    for _ in range(3):
        yield {"ids": np.ones(100_000, np.int32)}
    print("half", flush=True)
    sys.stdin.readline()
    yield {"ids": np.ones(100_000, np.int32)}
number_files.write(pathlib.Path(sys.argv[1]), parts())
"""


def start(folder: Path) -> subprocess.Popen[str]:
    """A process that has written half of its numbers, and waits for a line."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)], env={**os.environ, "PYTHONPATH": str(CODE)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert writer.stdout is not None and writer.stdout.readline() == "half\n"
    return writer


@pytest.fixture
def living(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with start(tmp_path / KEY) as writer:
        yield writer
        writer.kill()


def one_number(folder: Path) -> None:
    number_files.write(folder, [{"ids": np.ones(1, np.int32)}])


def test_what_a_killed_writer_left_goes_after_an_hour_and_a_living_one_goes_on(
    tmp_path: Path, living: subprocess.Popen[str]
) -> None:
    def grown_old(folder: Path) -> None:
        long_ago = time.time() - 2 * number_files._SILENT_SECONDS
        for path in [folder, *folder.rglob("*")]:
            os.utime(path, (long_ago, long_ago))

    def names(folder: Path) -> set[str]:
        """Without what was drawn at random."""
        return {path.name.partition(".")[0] for path in folder.iterdir()}

    with start(tmp_path / "other") as killed:
        killed.kill()
    one_number(tmp_path / "third")
    assert names(tmp_path) == {KEY, "other", "third"}
    grown_old(next(tmp_path.glob("other.*")))
    one_number(tmp_path / "fourth")
    assert names(tmp_path) == {KEY, "third", "fourth"}
    living.communicate("on\n")
    assert living.returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {KEY, "third", "fourth"}
    assert number_files.read(tmp_path / KEY)["ids"].sum() == 400_000


def test_the_first_of_two_writers_of_the_same_numbers_wins(
    tmp_path: Path, living: subprocess.Popen[str]
) -> None:
    one_number(tmp_path / KEY)
    living.communicate("on\n")
    assert living.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == [KEY]
    assert number_files.read(tmp_path / KEY)["ids"].tolist() == [1]
