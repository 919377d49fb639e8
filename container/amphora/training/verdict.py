"""What the hosts of a job say of themselves, the connection that it goes over, and what follows for
all of them.

A fault (a killed process, a broken collective, a failing device) may be answered by a restart on
every host; an exception of the script's own ends the job, since it would be raised again.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

CAUSE_SECONDS = 10.0
"""How long the host that failed first may take to say so, once another one has lost it: its script
still ends, and its launcher after that, while a broken connection is seen at once."""
BEAT_SECONDS = 2.0
LOST_SECONDS = 15.0
"""Without a word from a host for this long it counts as lost. Half of the promised 30 s."""
_STOPPED_SECONDS = 110.0
"""How long the others may go on after one host was stopped: each is stopped, and has its budget."""
_MAX_LINE = 64 * 1024
_STATES = {"ready", "running", "done", "failed", "stopped", "abort", "restart", "all done"}


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

    key: str = ""
    """Its public SSH key, in a job of mpirun."""

    @classmethod
    def of(cls, line: bytes) -> Word:
        """Read a line that came over the network. Raises ValueError if it is not a word."""
        try:
            word = cls(**json.loads(line))
        except (TypeError, RecursionError) as error:
            raise ValueError(f"not a word of a host: {error}") from None
        types = {name: type(value) for name, value in vars(cls(host="", state="")).items()}
        has_types = all(type(getattr(word, name)) is kind for name, kind in types.items())
        if not has_types or word.state not in _STATES:
            raise ValueError("a field of the word has a wrong type or an unknown state")
        return word

    def line(self) -> bytes:
        """The word as it goes over the wire."""
        return json.dumps(vars(self)).encode() + b"\n"


@dataclass(eq=False)
class Peer:
    """One connection, read by lines."""

    connection: socket.socket
    address: str = ""
    opened: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    pending: bytes = b""
    word: Word | None = None
    """The newest."""
    ended: bool = False
    stopped_at: float = 0.0

    def read(self) -> list[Word]:
        """Take in what has arrived. `ended` tells the end of the connection."""
        words: list[Word] = []
        try:
            chunk = self.connection.recv(_MAX_LINE)
            *lines, self.pending = (self.pending + chunk).split(b"\n")
            words += map(Word.of, lines)
        except TimeoutError:
            return words
        except (OSError, ValueError):  # Whoever this is, it is not a host of the job.
            chunk = b""
        self.heard = time.monotonic()
        self.ended = not chunk or len(self.pending) > _MAX_LINE
        self.word = words[-1] if words else self.word
        if any(word.state == "stopped" for word in words):
            self.stopped_at = self.stopped_at or self.heard
        return words

    def lost(self, now: float) -> str:
        """Why this host counts as lost; '' if it does not."""
        if self.word is not None and self.word.state == "stopped":
            was_stopped = now - self.stopped_at > _STOPPED_SECONDS
            return "it was stopped, and this host was not" if was_stopped else ""
        if self.ended:
            return "its container ended without a word (killed, or the instance was lost)"
        if now - self.heard > LOST_SECONDS:
            return f"not a word from it for {LOST_SECONDS:.0f} s (stopped, or the network is down)"
        return ""

    def say(self, word: Word) -> None:
        with suppress(OSError):  # The next read sees the end.
            self.connection.sendall(word.line())


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
    is_over = all(word.state in ("done", "stopped") for word in current.values())
    return Word(host=hosts[0], state="all done", attempt=attempt) if is_over else None
