"""Stands in for code/train.py, as check.py for code/check.py (AMPHORA_CODE_DIR).

A process that has imported the libraries (`tests.support.preloading`) forks and runs the real script
with this process's arguments, environment and streams, so that a job costs no imports. Signals are
passed on, and the exit code is the script's.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn


def main(argv: Sequence[str], descriptors: Sequence[int] = (), module: str = "") -> NoReturn:
    """Let a fork run a script, or a module to which descriptors are handed on; end as it does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(os.environ["PRELOADING_SOCKET"])
        given = {
            "argv": argv,
            "environ": dict(os.environ),
            "cwd": str(Path.cwd()),
            "module": module,
        }
        numbers = array.array("i", [0, 1, 2, *descriptors])
        streams = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)]
        server.sendmsg([json.dumps(given).encode()], streams)
        pid = int(server.recv(64))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: os.kill(pid, number))
        code = int(server.recv(64) or -signal.SIGKILL)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if code != -signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv)
