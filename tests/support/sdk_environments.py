"""The environments of SageMaker's SDKs, which tests/sdk_venvs.sh makes."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import subprocess
from collections.abc import Iterator

from tests.support.paths import ROOT


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let one process of pytest at a time make what several use, below the folder `build`."""
    path = ROOT / "build" / "tests.lock"
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@functools.cache
def sdk_python(name: str) -> str:
    """Return the Python of an SDK's environment, made if it is missing."""
    with one_at_a_time():
        command = [ROOT / "tests" / "sdk_venvs.sh", name]
        made = subprocess.run(command, text=True, capture_output=True)
    assert made.returncode == 0, made.stderr[-4000:]
    return made.stdout.strip()
