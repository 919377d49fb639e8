"""Let the hosts of a job decide together if each has its own rows (ShardedByS3Key).

Decisions that depend on data (columns, kinds of labels, classes) are made from the data of all
hosts, so that all hosts decide the same. Hosts exchange little: columns, distinct labels, counts.
Texts stay where they are.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from recipe.errors import DataError, DistributedError, RecipeError
from recipe.runtime.device import gather_objects

_DISTRIBUTION = ("S3DistributionType", "S3DataDistributionType")
_SHARDED = "shardedbys3key"
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The hosts that read the data of a job, and the channels that are sharded over them."""

    process_hosts: tuple[str, ...] = ("this host",)
    """The name of the host of each process, by rank."""
    rank: int = 0
    sharded: frozenset[str] = frozenset()
    """The sharded channels; none if there is one host."""

    @property
    def names(self) -> list[str]:
        """Return each host once, in the order of their first processes."""
        return list(dict.fromkeys(self.process_hosts))

    @property
    def position(self) -> int:
        """Return the position of this process's host in `names`."""
        return self.names.index(self.process_hosts[self.rank])

    def gather(self, value: Value) -> list[Value]:
        """Return `value` of each host. If channels are sharded, all processes call it together."""
        if not self.sharded:
            return [value]
        firsts = [self.process_hosts.index(name) for name in self.names]
        values = gather_objects(value if self.rank in firsts else None)
        return [values[first] for first in firsts]

    def first(self, value: Value | None) -> Value | None:
        """Return the value of the first host that has one, by which all hosts decide.

        Raises:
            DataError: channels are sharded, and no host has one.
        """
        first = next((other for other in self.gather(value) if other is not None), None)
        if first is None and self.sharded:
            raise DataError("No host has training data.", "Give rows to train on.")
        return first

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Run a block that fails on all hosts, with the reason, if it fails on one of them.

        Otherwise the others would wait for it. The block must not exchange anything between hosts.

        Raises:
            RecipeError: the error of the block, or a DataError with the error of another host.
        """
        failure: RecipeError | None = None
        try:
            yield
        except RecipeError as error:
            failure = error
        errors = gather_objects(failure and str(failure)) if self.sharded else []
        if failure is not None:
            raise failure
        for name, reported in zip(self.process_hosts, errors, strict=bool(errors)):
            if reported is not None:
                raise DataError(f"On host {name}: {reported}")


ONE = Hosts()
"""For jobs with one host, or whose hosts all have the same data."""


_ALONE = ContextVar("alone", default=False)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let this process read rows in a block without the other hosts, which may not do so."""
    token = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(token)


def job_hosts(environ: Mapping[str, str] = os.environ) -> Hosts:
    """Return the hosts of this process's job; if there are several, all processes call it together.

    Raises:
        DistributedError: there are sharded channels, and the processes do not name their hosts.
    """
    configured = json.loads(environ.get("SM_INPUT_DATA_CONFIG") or "{}")
    sharded = frozenset(
        name
        for name, channel in configured.items()
        if isinstance(channel, dict)
        and any(str(channel.get(key, "")).lower() == _SHARDED for key in _DISTRIBUTION)
    )
    if not sharded or int(environ.get("WORLD_SIZE", "1")) == 1 or _ALONE.get():
        return ONE
    names = gather_objects(environ.get("SM_CURRENT_HOST"))
    if len(names) == 1:  # before the processes know each other
        return ONE
    if None in names:
        raise DistributedError(
            f"The channels {', '.join(sorted(sharded))} are sharded, and process "
            f"{names.index(None)} does not say which host it is on.",
            "Set SM_CURRENT_HOST on each host.",
        )
    if len(set(names)) == 1:
        return ONE
    rank = int(environ.get("RANK", "0"))
    return Hosts(process_hosts=tuple(names), rank=rank, sharded=sharded)
