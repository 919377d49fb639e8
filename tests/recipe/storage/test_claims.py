"""Numbers whose writing was killed: nothing of them stays after the next start, and nothing that a
living process writes is taken from it."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from recipe.storage import claims, number_files
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


def names(folder: Path) -> set[str]:
    """Without what was drawn at random."""
    return {path.name.partition(".")[0] for path in folder.iterdir()}


def other_host(folder: Path) -> None:
    """As if all that is being written there were another host's."""
    for mark in folder.glob("*.writer"):
        mark.write_text("algo-7")


def grown_old(folder: Path) -> None:
    long_ago = time.time() - 2 * claims._SILENT_SECONDS
    for path in [*folder.rglob("*")]:
        os.utime(path, (long_ago, long_ago))


def one_number(folder: Path) -> None:
    number_files.write(folder, [{"ids": np.ones(1, np.int32)}])


def test_what_a_killed_writer_left_is_gone_and_a_living_one_goes_on(
    tmp_path: Path, living: subprocess.Popen[str]
) -> None:
    with start(tmp_path / "other") as killed:
        killed.kill()
    assert names(tmp_path) == {KEY, "other"} and len(list(tmp_path.iterdir())) == 4
    one_number(tmp_path / "third")
    assert names(tmp_path) == {KEY, "third"}
    other_host(tmp_path)
    grown_old(tmp_path)  # a living process may have been stopped
    claims.sweep(tmp_path)
    assert names(tmp_path) == {KEY, "third"}
    living.communicate("on\n")
    assert living.returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {KEY, "third"}
    assert number_files.read(tmp_path / KEY)["ids"].sum() == 400_000


def test_what_another_host_began_is_given_up_after_long(tmp_path: Path) -> None:
    """Its locks may not be seen here."""
    with start(tmp_path / KEY) as killed:
        killed.kill()
    other_host(tmp_path)
    claims.sweep(tmp_path)
    assert names(tmp_path) == {KEY}
    grown_old(tmp_path)
    claims.sweep(tmp_path)
    assert names(tmp_path) == set()


def test_a_disk_without_locks_gives_up_by_time_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(claims.fcntl, "flock", flock)
    with claims.claimed(tmp_path, KEY) as claim:
        claims.sweep(tmp_path)
        assert claim.is_dir()
        (mark,) = tmp_path.glob("*.writer")
        assert mark.read_text() == socket.gethostname()
        grown_old(tmp_path)
        claims.sweep(tmp_path)
        assert names(tmp_path) == set()
