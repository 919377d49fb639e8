"""Reads values of environment variables: what cannot be meant is refused by name, all at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

from amphora.common.errors import ConfigError

T = TypeVar("T", int, float)


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
        """Raises ConfigError that names every variable that was read and is wrong."""
        if self._problems:
            raise ConfigError(" ".join(self._problems))
