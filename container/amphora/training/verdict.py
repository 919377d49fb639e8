"""What the hosts of a job say of themselves, and what follows for all of them. Pure.

A fault (a killed process, a broken collective, a failing device) may be answered by a restart on
every host; an exception of the script's own ends the job, since it would be raised again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

CAUSE_SECONDS = 10.0
"""How long the host that failed first may take to say so, once another one has lost it: its script
still ends, and its launcher after that, while a broken connection is seen at once."""


class Place(NamedTuple):
    """Where a rank is that does not move on."""

    rank: int
    host: str
    call: str
    """The call that waits for other ranks; '' if it is not in one."""
    where: str
    """`function at file:line`, the script's own if there is one."""


@dataclass(frozen=True, kw_only=True)
class Word:
    """What a host says of itself; from the first host also what it has decided for all."""

    host: str
    state: str
    """'ready' (to start again), 'running', 'done', 'failed', 'stopped'; decisions are 'abort',
    'restart', 'stall' and 'all done'."""
    attempt: int = 0
    """How many restarts came before."""
    reason: str = ""
    is_consequence: bool = False
    """Whether a failed host only knows that it lost another one, which may name the cause yet."""
    is_fault: bool = False
    """Whether what ended a failed host may go well at another time: then a restart may help."""

    places: Sequence[Place] = ()
    """Where its ranks are, if none of them has made progress for too long."""

    def line(self) -> bytes:
        """The word as it goes over the wire."""
        return json.dumps(vars(self)).encode() + b"\n"


def judge(
    words: Mapping[str, Word],
    hosts: tuple[str, ...],
    attempt: int,
    max_restarts: int,
    stalled: Callable[[Sequence[Place]], str],
    consequence_for: float = 0.0,
) -> Word | None:
    """What follows for the job from what its hosts say, or None while it goes on.

    Args:
        words: By host; those of an earlier attempt say nothing of this one.
        attempt: How many restarts came before.
        stalled: The words for ranks that wait in these places without end.
        consequence_for: Seconds since the first host said that it only lost another one.
    """
    current = {host: word for host, word in words.items() if word.attempt == attempt}
    is_stopping = any(word.state == "stopped" for word in words.values())
    may_restart = attempt < max_restarts and not is_stopping
    failed = [word for word in current.values() if word.state == "failed"]
    if failed:
        # A cause goes before a consequence, and what a restart cannot mend before what it may.
        first = min(failed, key=lambda word: (word.is_consequence, word.is_fault))
        if first.is_consequence and len(failed) < len(hosts) and consequence_for <= CAUSE_SECONDS:
            return None
        if first.is_fault and may_restart:
            return replace(first, state="restart", attempt=attempt + 1)
        return replace(first, state="abort")
    if len(current) < len(hosts):
        return None
    running = [word for word in current.values() if word.state == "running"]
    if running and all(word.places for word in running) and not is_stopping:
        reason = stalled([Place(*place) for word in running for place in word.places])
        if may_restart:
            return Word(host=hosts[0], state="restart", attempt=attempt + 1, reason=reason)
        return Word(host=hosts[0], state="stall", attempt=attempt, reason=reason)
    is_over = all(word.state in ("done", "stopped") for word in current.values())
    return Word(host=hosts[0], state="all done", attempt=attempt) if is_over else None
