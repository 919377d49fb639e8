"""The bounds that the environment sets on a training: read once, all that is wrong at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from amphora.common.variables import Variables

STOP_SECONDS = 100.0
"""SageMaker sends SIGKILL 120 s after SIGTERM: this leaves time for what follows the script."""
HOST_WAIT_SECONDS = 300.0
"""How long a host may take to appear: instances of one job do not start in the same second."""
_LEAST_SECONDS = 0.001
_MOST_RESTARTS = 1000


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long, and how often."""

    stop_seconds: float
    """What a stopped script may take to end."""
    host_wait_seconds: float
    max_restarts: int
    """How often a fault is answered by a restart from the last checkpoint."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Limits:
        """Read the AMPHORA_* variables.

        Raises:
            ConfigError: A value is wrong; it names every one that is.
        """
        variables = Variables(environ)

        def seconds(name: str, default: float) -> float:
            return variables.number(name, default, least=_LEAST_SECONDS, unit="seconds")

        limits = cls(
            stop_seconds=seconds("AMPHORA_STOP_SECONDS", STOP_SECONDS),
            host_wait_seconds=seconds("AMPHORA_HOST_WAIT_SECONDS", HOST_WAIT_SECONDS),
            max_restarts=variables.number("AMPHORA_MAX_RESTARTS", 0, least=0, most=_MOST_RESTARTS),
        )
        variables.check()
        return limits
