"""Relays stdout and stderr, so that output that nobody reads never stops the server.

A write to a full pipe blocks whoever writes: the front, and each worker that prints, in Python or
below it. So both write to pipes that this module always reads, and its own threads write on to the
container's outputs. Each keeps at most a megabyte, drops whole lines beyond it, and counts them.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import os
import select
import stat
import struct
import sys
import termios
import threading
import time
from collections import deque

LOG = logging.getLogger("amphora.server")
_MAX_KEPT_BYTES = 1 << 20
_READ_BYTES = 1 << 16
# Between two reads or writes, so that each line of a request does not wake the threads.
_READ_PAUSE = 0.005
_WRITE_PAUSE = 0.01
_LINE_SECONDS = 0.05
_QUIET_SECONDS = 10.0
# For what was printed last, if anybody reads at all: so many looks at whether it is written, with
# seconds between them. Not a time, which passes for a process that does not get to run, too.
_FLUSH_LOOKS = 100
_FLUSH_PAUSE = 0.01


class RelayedStream:
    """One of the process's standard outputs, with two threads between its writers and its reader.

    Args:
        descriptor: 1 or 2; from now on it is a pipe, for children too.
    """

    def __init__(self, descriptor: int) -> None:
        self.dropped = 0
        """Lines that were not written."""
        self._descriptor = descriptor
        self._target = os.dup(descriptor)
        self._source, end = os.pipe()
        os.dup2(end, descriptor)
        os.close(end)
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._is_writing = False
        # Whether the last chunk that was kept, or dropped, ended within a line.
        self._is_open_line = self._skips_line = False
        self._change = threading.Condition()
        self._reported, self._reported_at = 0, -_QUIET_SECONDS
        for work in (self._read, self._write):
            threading.Thread(target=work, name=f"output {descriptor}", daemon=True).start()

    @property
    def is_empty(self) -> bool:
        """Whether all that was printed is written or dropped."""
        with self._change:
            (unread,) = struct.unpack("i", fcntl.ioctl(self._source, termios.FIONREAD, b"\0" * 4))
            return not unread and not self._chunks and not self._is_writing

    def _read(self) -> None:
        while True:
            select.select([self._source], [], [])
            with self._change:
                self._keep(os.read(self._source, _READ_BYTES))
                self._change.notify()
            time.sleep(_READ_PAUSE)

    def _keep(self, data: bytes) -> None:
        """Keep what fits; of the rest, the end of a line that has started."""
        if self._skips_line:
            _, end_of_line, data = data.partition(b"\n")
            self._skips_line = not end_of_line
        if data and self._size + len(data) > _MAX_KEPT_BYTES:
            begun, end_of_line, rest = b"", b"", data
            if self._is_open_line:
                begun, end_of_line, rest = data.partition(b"\n")
            # A line that goes on forever is cut: what is kept ends it.
            self._skips_line = not (rest or end_of_line).endswith(b"\n")
            self.dropped += rest.count(b"\n") + self._skips_line
            data = begun + b"\n" if self._is_open_line else b""
        if data:
            self._chunks.append(data)
            self._size += len(data)
            self._is_open_line = not data.endswith(b"\n")

    def _write(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._chunks)
                # Python prints a line and its end apart; a line of the other stream must not come
                # between them. A progress bar ends none.
                self._change.wait_for(lambda: not self._is_open_line, timeout=_LINE_SECONDS)
                data = b"".join(self._chunks)
                self._chunks.clear()
                self._is_writing = True
            while data:
                try:
                    data = data[os.write(self._target, data) :]
                except BlockingIOError:
                    time.sleep(_WRITE_PAUSE)
                except OSError:
                    # Its reader is gone for good.
                    self.dropped += data.count(b"\n")
                    break
            with self._change:
                self._size = sum(map(len, self._chunks))
                self._is_writing = False
            now = time.monotonic()
            if self.dropped > self._reported and now - self._reported_at > _QUIET_SECONDS:
                self._reported, self._reported_at = self.dropped, now
                name = "stdout" if self._descriptor == 1 else "stderr"
                LOG.warning("%d lines of %s were dropped: nobody read them.", self.dropped, name)
            time.sleep(_WRITE_PAUSE)


_streams: list[RelayedStream] = []


def start() -> None:
    """Relay stdout and stderr, if they can block at all: a file cannot."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            mode = os.fstat(descriptor).st_mode
            is_null = stat.S_ISCHR(mode) and not os.isatty(descriptor)
            if not stat.S_ISREG(mode) and not is_null:
                _streams.append(RelayedStream(descriptor))
    atexit.register(_flush)


def dropped() -> int:
    """Lines that were dropped since `start`."""
    return sum(stream.dropped for stream in _streams)


def _flush() -> None:
    for output in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            output.flush()
    for _ in range(_FLUSH_LOOKS):
        if all(stream.is_empty for stream in _streams):
            break
        time.sleep(_FLUSH_PAUSE)
