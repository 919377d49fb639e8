"""The environments of SageMaker's SDKs, which tests/sdk_venvs.sh makes."""

from __future__ import annotations

import functools
import subprocess

from tests.support.paths import ROOT


@functools.cache
def sdk_python(name: str) -> str:
    """Return the Python of an SDK's environment, made if it is missing."""
    made = subprocess.run([ROOT / "tests" / "sdk_venvs.sh", name], text=True, capture_output=True)
    assert made.returncode == 0, made.stderr[-4000:]
    return made.stdout.strip()
