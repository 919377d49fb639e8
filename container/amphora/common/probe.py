"""A vendor's own tool, asked what a host has."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

PROBE_SECONDS = 30.0


def probe(argv: list[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str] | None:
    """Run a tool to its end; None if it cannot be started or does not answer in time."""
    try:
        return subprocess.run(
            argv,
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
