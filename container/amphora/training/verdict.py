"""What the hosts of a job say of themselves, and what follows for all of them. Pure.

A fault (a killed process, a broken collective, a failing device) may be answered by a restart on
every host; an exception of the script's own ends the job, since it would be raised again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

CAUSE_SECONDS = 10.0
"""How long the host that failed first may take to say so, once another one has lost it: its script
still ends, and its launcher after that, while a broken connection is seen at once."""


@dataclass(frozen=True, kw_only=True)
class Word:
    """What a host says of itself; from the first host also what it has decided for all."""

    host: str
    state: str
    """'ready' (to start again), 'running', 'done', 'failed', 'stopped'; decisions are 'abort',
    'restart' and 'all done'."""
    attempt: int = 0
    """How many restarts came before."""
    reason: str = ""
    is_consequence: bool = False
    """Whether a failed host only knows that it lost another one, which may name the cause yet."""
    is_fault: bool = False
    """Whether what ended a failed host may go well at another time: then a restart may help."""

    def line(self) -> bytes:
        """The word as it goes over the wire."""
        return json.dumps(vars(self)).encode() + b"\n"


def judge(
    words: Mapping[str, Word],
    hosts: tuple[str, ...],
    attempt: int,
    max_restarts: int,
    consequence_for: float = 0.0,
) -> Word | None:
    """What follows for the job from what its hosts say, or None while it goes on.

    Args:
        words: By host; those of an earlier attempt say nothing of this one.
        attempt: How many restarts came before.
        consequence_for: Seconds since the first host said that it only lost another one.
    """
    current = {host: word for host, word in words.items() if word.attempt == attempt}
    failed = [word for word in current.values() if word.state == "failed"]
    # A cause goes before a consequence, and what a restart cannot mend before what it may.
    ordered = sorted(failed, key=lambda word: (word.is_consequence, word.is_fault))
    if ordered:
        first = ordered[0]
        if first.is_consequence and len(failed) < len(hosts) and consequence_for <= CAUSE_SECONDS:
            return None
        is_stopping = any(word.state == "stopped" for word in words.values())
        if first.is_fault and attempt < max_restarts and not is_stopping:
            return replace(first, state="restart", attempt=attempt + 1)
        return replace(first, state="abort")
    is_over = len(current) == len(hosts) and all(
        word.state in ("done", "stopped") for word in current.values()
    )
    return Word(host=hosts[0], state="all done", attempt=attempt) if is_over else None
