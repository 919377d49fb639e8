"""Reads the limits of a training from the environment, and reports all wrong values at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from amphora.common.variables import Variables

STOP_SECONDS = 100.0
"""SageMaker sends SIGKILL 120 s after SIGTERM; the rest is for the work after the script."""
HOST_WAIT_SECONDS = 300.0
"""How long a host may take to appear: instances of one job start at different times."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Holds the limits of a training."""

    stop_seconds: float
    """How long a stopped script may take to end."""
    host_wait_seconds: float

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Limits:
        """Read the variables. Raises ConfigError that names each wrong one."""
        variables = Variables(environ)

        def seconds(name: str, default: float) -> float:
            return variables.number(name, default, least=0.001, unit="seconds")

        limits = cls(
            stop_seconds=seconds("AMPHORA_STOP_SECONDS", STOP_SECONDS),
            host_wait_seconds=seconds("AMPHORA_HOST_WAIT_SECONDS", HOST_WAIT_SECONDS),
        )
        variables.check()
        return limits
