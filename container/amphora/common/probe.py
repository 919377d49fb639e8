"""Runs vendors' tools that list the devices of a host."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

PROBE_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class DetectedDevices:
    usable: int = 0
    """How many this job may use."""
    listed: int = 0
    """How many Neuron cores the host has."""
    reason: str = ""
    """Where these numbers come from, for the log."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that every process using them needs."""


def probe(argv: list[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str] | None:
    """Run a tool to its end. Return None if it cannot be started or does not answer in time."""
    try:
        return subprocess.run(
            argv, env=dict(environ), capture_output=True, text=True, timeout=PROBE_SECONDS,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
