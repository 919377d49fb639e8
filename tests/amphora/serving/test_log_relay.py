"""A stdout that nobody reads."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.servers import ECHO, SERVE, Running, write_code
from tests.support.until import until

PRINTING = ECHO.replace('return {"echo"', 'print(json.dumps({"line": "x" * 5000})); return {"echo"')


@pytest.fixture
def unread(tmp_path: Path) -> Callable[[], bytes]:
    """A pipe that the server below writes to; call it to read all that has come."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    descriptor = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)

    def read() -> bytes:
        parts = []
        while select.select([descriptor], [], [], 0.5)[0]:
            parts.append(os.read(descriptor, 1 << 20))
        return b"".join(parts)

    return read


def started(base: Path) -> Running:
    write_code(base, PRINTING, "inference.py", None)
    shell = ("sh", "-c", f'exec "$@" >{base}/fifo 2>&1', "sh", *SERVE)
    return Running(base, {}, shell).ready()


def test_output_that_nobody_reads_stops_nothing_and_is_counted(
    tmp_path: Path, unread: Callable[[], bytes]
) -> None:
    server = started(tmp_path)
    try:
        # 64 KiB are in the pipe, and a megabyte in each stream.
        for number in range(500):
            assert server.invoke(number).status_code == 200
        assert server.ping() == 200
        text = b""

        def told() -> list[bytes]:
            nonlocal text
            text += unread()
            return [line for line in text.splitlines() if line.startswith(b"{")]

        def dropped() -> float:
            return server.metric("amphora_log_lines_dropped_total")

        until(lambda: len(told()) + dropped() == 1000, what=lambda: (len(told()), dropped()))
        assert all(map(is_json, told()))
        assert 100 < dropped() < 1000
        assert server.invoke("after").status_code == 200
        until(lambda: '"status": 200' in unread().decode())
        # The end does not wait for a reader either.
        for number in range(300):
            server.invoke(number)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert time.monotonic() - began < 15
    finally:
        server.close()


def is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def test_the_last_words_are_written(tmp_path: Path, unread: Callable[[], bytes]) -> None:
    write_code(tmp_path, "raise RuntimeError('last words')", "inference.py", None)
    shell = ("sh", "-c", f'exec "$@" >{tmp_path}/fifo 2>&1', "sh", *SERVE)
    server = Running(tmp_path, {}, shell)
    assert server.process.wait(60) == 2
    assert b"last words" in unread().splitlines()[-1]
    server.close()


def test_a_reader_that_went_harms_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    server = started(tmp_path)
    try:
        os.close(reader)
        assert server.invoke(1).status_code == 200
        assert server.invoke(2).status_code == 200
        until(lambda: server.metric("amphora_log_lines_dropped_total") > 0)
    finally:
        server.close()
