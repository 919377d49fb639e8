"""Reads values of environment variables: what cannot be meant is refused by name, all at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

from amphora.common.errors import ConfigError, near

T = TypeVar("T", int, float)

PREFIX = "AMPHORA_"
SETTINGS = frozenset(
    PREFIX + name
    for name in (
        *("ADAPTERS", "ANSWERS", "BATCH_TOKENS", "BIND", "BLOCKED_WEIGHTS", "BUCKETS"),
        *("CODE_DIR", "COMPILE", "DTYPE", "ENGINE", "GENERATION", "HANDLER_DEFAULTS"),
        *("HOST_WAIT_SECONDS", "MAX_ANSWER_VALUES", "MAX_PIXELS", "MAX_RESTARTS", "MAX_ROWS"),
        *("MAX_SAMPLES", "MAX_SCORES", "MAX_TEXT_BYTES", "MAX_TOKENS_READ", "MAX_TOKENS_WRITTEN"),
        *("MODEL_NAME", "NPROC_PER_NODE", "PACKING", "QUEUE_LIMIT", "SESSION_SECONDS"),
        *("STOP_SECONDS", "UI"),
    )
)
"""What users set: of training, of serving, and of the image's own code."""
_INTERNAL = frozenset(
    PREFIX + name
    for name in (
        *("ADAPTERS_FILE", "ERROR_DIR", "EVALUATE_MODULES", "LAUNCHER", "NEURON_STACK"),
        *("RESTART_COUNT", "SCRIPT_DIR"),
    )
)
"""What an image sets, or one process for another."""

_CLIENTS = "Leave it out: docs/SERVING.md, Clients that misbehave, has the built-in limit."
REMOVED = {
    PREFIX + name: remedy
    for name, remedy in (
        *((f"BODY_{unit}", _CLIENTS) for unit in ("RATE", "SECONDS")),
        *((f"HEADER_{unit}", _CLIENTS) for unit in ("BYTES", "COUNT", "SECONDS")),
        *((name, _CLIENTS) for name in ("CONNECTIONS", "KEEP_ALIVE_SECONDS")),
        (
            "STALL_SECONDS",
            "Leave it out: the time-out of a collective, or max_run, ends a training that hangs.",
        ),
        ("MAX_WINDOWS", "Set AMPHORA_MAX_ROWS: windows are among its rows."),
        ("SESSIONS", "Leave it out: a model has at most 1,024 open sessions."),
        (
            "CACHE_TOKENS",
            "Leave it out: at most 32 texts of equal settings share a batch.",
        ),
        ("CONTINUOUS", "Leave it out: on GPUs vLLM batches continuously, on CPUs nothing does."),
        (
            "LONG_PROMPTS",
            "Send truncation: true (cut) or false (refuse) to /invocations; /v1 routes refuse.",
        ),
    )
}
"""What users could set once, and what to do instead."""


class Variables:
    """The variables of an environment. Wrong ones count as absent until `check` names them all."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._problems: list[str] = []

    def text(self, name: str) -> str:
        """The value without the spaces around it; '' if it is not set."""
        return self._environ.get(name, "").strip()

    def flag(self, name: str) -> bool:
        """Whether a switch is on: true or 1; false, 0 or absence is off."""
        value = self.text(name).lower()
        if value not in ("", "0", "1", "true", "false"):
            self.refuse(f"{name} is {value!r}. Give true or false, or leave it out.")
        return value in ("1", "true")

    def number(
        self, name: str, default: T, *, least: float, most: float = math.inf, unit: str = ""
    ) -> T:
        """A finite number of the default's type, int or float; `default` if it is not set.

        Args:
            name: The variable's name.
            default: What absence means.
            least: The smallest number that is taken.
            most: The largest one.
            unit: What the number counts, for the message.
        """
        value = self.text(name)
        if not value:
            return default
        try:
            number = type(default)(value)
        except ValueError:
            number = None
        # nan compares as false, so that it is refused too.
        if number is None or not least <= number <= most or number == math.inf:
            kind = "a whole number" if isinstance(default, int) else "a number"
            of_unit = f" of {unit}" if unit else ""
            span = f"from {least:g} to {most:g}" if most < math.inf else f"of at least {least:g}"
            self.refuse(f"{name} is {value!r}. Give {kind}{of_unit} {span}, or leave it out.")
            return default
        return number

    def refuse(self, problem: str) -> None:
        """Note one more problem, for `check`."""
        self._problems.append(problem)

    def check(self) -> None:
        """Raise ConfigError that names each variable that was read and is wrong, and each that no
        part of the image reads."""
        for name in sorted(self._environ):
            if name in REMOVED:
                self.refuse(f"{name} was removed. {REMOVED[name]}")
            elif name.startswith(PREFIX) and name not in SETTINGS | _INTERNAL:
                self.refuse(f"{name} is not a variable of this image.{near(name, SETTINGS)}")
        if self._problems:
            raise ConfigError(" ".join(self._problems))
