"""The hosts of one job, told of each other's end.

A host that fails, or vanishes, ends the job on every host with its reason, or has it restarted on
every host; a host that is done waits for the others, since the platform may end all containers when
the first one ends. The first host listens and the others connect to it; each side sends a line of
JSON every two seconds. The first host talks to addresses of the job's hosts only, and nothing that
is sent to its port can end the job. torchrun does none of this: a rank in a collective operation
learns of a lost host after minutes, and its own restarts are counted by each host alone (see
ARCHITECTURE).
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

from amphora.common.errors import ConfigError
from amphora.training.limits import Limits
from amphora.training.verdict import (
    BEAT_SECONDS,
    CAUSE_SECONDS,
    LOST_SECONDS,
    Peer,
    Word,
    judge,
)

log = logging.getLogger("amphora")

PORT = 7776
"""Beside torchrun's 7777."""
_READY_SECONDS = 120.0
"""How long a host may take to end its processes for a restart: they have 10 s before SIGKILL, but a
process in a broken driver's call may hang on."""
_NAME_SECONDS = 10.0
"""How long a connection may take to name its host, which a host does at once."""
_MOST_UNNAMED = 64
"""Connections that have not named their host; beyond it the oldest is closed."""
_MOST_WARNINGS = 16


class Link:
    """This host's part in the job. `fileno` is readable once there is a decision for all hosts."""

    def __init__(
        self, host: str, hosts: Sequence[str], stopped: Callable[[], bool], limits: Limits
    ) -> None:
        self._stopped = stopped
        self._reader, self._writer = socket.socketpair()
        self._lock = threading.RLock()
        self._decided = threading.Event()
        self._go = threading.Event()
        self.host, self.hosts, self.max_restarts = host, tuple(hosts), limits.max_restarts
        self.addresses: dict[str, set[str]] = {}
        """Of each host."""
        self.keys: dict[str, str] = {}
        """The public SSH keys that the other hosts have told."""
        self.own = Word(host=host, state="running")
        self.decision: Word | None = None
        """What follows for all hosts, once it is known: 'abort', 'restart' or 'all done'."""
        self.judge = partial(judge, hosts=self.hosts, max_restarts=limits.max_restarts)

    def fileno(self) -> int:
        return self._reader.fileno()

    @property
    def attempt(self) -> int:
        """How many restarts came before."""
        return self.own.attempt

    @property
    def abort(self) -> Word | None:
        """The host that failed first, if it is another one, and why."""
        decision = self.decision
        is_abort = decision is not None and decision.state == "abort" and decision.host != self.host
        return decision if is_abort else None

    @property
    def restart(self) -> Word | None:
        """Which host's fault is answered by a restart, and what it was."""
        decision = self.decision
        return decision if decision is not None and decision.state == "restart" else None

    def announce_done(self) -> None:
        """Tell the others that this host has nothing of its own to wait for."""
        self._say(Word(host=self.host, state="done", attempt=self.attempt))

    def finish(
        self, state: str, reason: str = "", *, is_consequence: bool = False, is_fault: bool = False
    ) -> None:
        """Tell the others how this host ended, and wait for what follows: see `decision`.

        A host that is done waits until the job is over; a stop ends the waiting, since the others
        are stopped as well, and end by themselves. A host that failed because it lost another one
        waits for that one's reason.

        Args:
            is_consequence: Whether `reason` only tells that another host was lost.
            is_fault: Whether a restart may help.
        """
        if self.decision is not None:
            return
        self._say(
            Word(
                host=self.host,
                state=state,
                attempt=self.attempt,
                reason=reason,
                is_consequence=is_consequence,
                is_fault=is_fault,
            )
        )
        if len(self.hosts) == 1:
            return
        if state == "done":
            log.info("done on this host; waiting for the others")
            while not self._decided.wait(0.2) and not self._stopped():
                pass
            return
        # Long enough for the word to get out, and for the first host to see who else has ended.
        wait = 2 * BEAT_SECONDS
        if is_consequence or is_fault:
            wait += CAUSE_SECONDS + LOST_SECONDS * is_fault
        self._decided.wait(wait)

    def exchange_keys(self, key: str, names: Sequence[str], seconds: float) -> dict[str, str]:
        """Tell the others this host's public SSH key, and wait for those of the hosts `names`.

        Raises:
            ConfigError: One of them does not come in time.
        """
        self._say(replace(self.own, key=key))
        until = _Deadline(seconds, self._stopped)
        while missing := [name for name in names if name not in self.keys]:
            if self._decided.wait(0.1) or until.passed():
                why = f"within {seconds:.0f} s"
                if self.abort is not None:
                    why = f"because {self.abort.host} failed first: {self.abort.reason}"
                raise ConfigError(
                    f"No SSH key came from {', '.join(missing)} {why}.",
                    "See the log of that host; AMPHORA_HOST_WAIT_SECONDS waits longer.",
                )
        return {name: self.keys[name] for name in names}

    def start_again(self) -> bool:
        """Wait until every host has ended its processes, so that all start at one time.

        Returns:
            Whether all are ready; otherwise the job was stopped, or another host is lost (`abort`).
        """
        assert self.restart is not None
        attempt = self.restart.attempt
        with self._lock:
            self._go.clear()
            self.decision = None
            self._decided.clear()
            self._reader.recv(64)
            self._say(Word(host=self.host, state="ready", attempt=attempt))
        while len(self.hosts) > 1 and not self._go.wait(0.2):
            if self._decided.is_set() or self._stopped():
                return False
        self._say(Word(host=self.host, state="running", attempt=attempt))
        return True

    def is_over(self) -> bool:
        """Whether the whole job has ended."""
        return self.decision is not None and self.decision.state != "restart"

    def _say(self, word: Word) -> None:
        with self._lock:
            self.own = word = replace(word, key=word.key or self.own.key)
            # A job of one host decides for itself.
            if len(self.hosts) == 1:
                decision = self.judge({self.host: word}, attempt=word.attempt)
                if decision is not None:
                    self._decide(decision)

    def _decide(self, decision: Word) -> None:
        with self._lock:
            if self.decision is None:
                self.decision = decision
                self._decided.set()
                self._writer.send(b"!")


@contextmanager
def linked(
    hosts: Sequence[str],
    host: str,
    stopped: Callable[[], bool],
    limits: Limits,
) -> Iterator[Link]:
    """Join the hosts of the job; a job of one host has no one to join.

    Args:
        stopped: Whether the job was asked to stop meanwhile.
        limits: How long a host may take to appear, how often a fault is answered by a restart.

    Raises:
        ConfigError: A host's name does not resolve, or the first host cannot be reached, in time.
    """
    link = Link(host, hosts, stopped, limits)
    with link._reader, link._writer:
        if len(hosts) == 1:
            yield link
            return
        until = _Deadline(limits.host_wait_seconds, stopped)
        link.addresses = _resolve(hosts, until)
        talk = _Listener(link, until) if host == hosts[0] else _Caller(link, hosts[0], until)
        thread = threading.Thread(target=talk.run, name="peers", daemon=True)
        thread.start()
        try:
            yield link
        finally:
            talk.stop.set()
            thread.join(2 * BEAT_SECONDS)
            talk.close()


class _Deadline:
    """A bound on waiting for the others, cut short if the job is to stop."""

    def __init__(self, wait: float, stopped: Callable[[], bool]) -> None:
        self.wait, self._stopped = wait, stopped
        self._at = time.monotonic() + wait

    def passed(self) -> bool:
        return self._stopped() or self.is_late()

    def is_late(self) -> bool:
        """Whether the time itself is over: a stop is nobody's failure."""
        return time.monotonic() > self._at


def _resolve(hosts: Sequence[str], until: _Deadline) -> dict[str, set[str]]:
    """Wait until every host has an address: names appear late in a cluster that starts."""
    addresses: dict[str, set[str]] = {}
    while True:
        for name in hosts:
            if name not in addresses:
                with suppress(OSError):
                    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
                    addresses[name] = {str(entry[4][0]) for entry in found}
        missing = [name for name in hosts if name not in addresses]
        if not missing:
            return addresses
        if until.passed():
            raise ConfigError(
                f"No address for {', '.join(missing)} within {until.wait:.0f} s.",
                "Check that every host of resourceconfig.json has started and that their network"
                " lets them find each other; AMPHORA_HOST_WAIT_SECONDS waits longer.",
            )
        time.sleep(0.2)


class _Listener:
    """The first host: hears every other one and decides for all."""

    def __init__(self, link: Link, until: _Deadline) -> None:
        self.link, self.stop, self._until = link, threading.Event(), until
        try:
            self._server = socket.create_server(("", PORT), backlog=64)
        except OSError as error:
            raise ConfigError(
                f"Port {PORT}, on which the hosts of a job meet, cannot be opened: {error}.",
                "End what uses it; another job on this host, perhaps.",
            ) from error
        self._server.settimeout(0)
        self._selector = selectors.DefaultSelector()
        self._peers: dict[str, Peer] = {}
        self._unnamed: list[Peer] = []
        """Connections that have not named their host, oldest first."""
        self._warned: set[str] = set()
        self._consequence_at = self._restart_at = float("inf")
        """When a host first said that it had lost another one; when a restart was decided."""

    def run(self) -> None:
        self._selector.register(self._server, selectors.EVENT_READ)
        last_word, beat, attempt = self.link.own, 0.0, 0
        with self._server, self._selector:
            while not self.stop.is_set():
                for key, _ in self._selector.select(timeout=0.2):
                    try:
                        self._hear(key)
                    except Exception as error:  # A stranger must not end the job.
                        self._warn(f"{type(error).__name__}: {error}")
                        self.stop.wait(0.05)
                self._drop_unnamed()
                own = self.link.own
                if own != last_word or time.monotonic() - beat > BEAT_SECONDS:
                    last_word, beat = own, time.monotonic()
                    self._say_all(own)
                if own.attempt < attempt:
                    continue  # This host's own processes have not ended yet.
                decision = self._judge(own)
                if decision is not None:
                    self._say_all(decision)
                    self.link._decide(decision)
                    if decision.state != "restart":
                        return
                    attempt, self._consequence_at = decision.attempt, float("inf")
                    self._restart_at = time.monotonic()

    def _hear(self, key: selectors.SelectorKey) -> None:
        if key.data is None:
            self._accept()
            return
        peer: Peer = key.data
        peer.read()
        name = peer.word.host if peer.word is not None else ""
        if peer in self._unnamed and name:
            # A host connects once: the first connection that names it, from its own address, is it.
            is_host = name in self.link.hosts[1:] and peer.address in self.link.addresses[name]
            if is_host and name not in self._peers:
                self._unnamed.remove(peer)
                self._peers[name] = peer
            else:
                peer.ended = True
        elif name and self._peers.get(name) is not peer:
            peer.ended = True  # A host that takes another one's name.
        if peer.word is not None and peer.word.key and not peer.ended:
            self.link.keys[name] = peer.word.key
        if peer.ended:
            self._close(peer)

    def _accept(self) -> None:
        try:
            connection, (address, *_) = self._server.accept()
        except BlockingIOError:
            return
        except OSError:  # No descriptor is free.
            if not self._unnamed:
                raise
            self._close(self._unnamed[0])
            return
        if not any(address in self.link.addresses[name] for name in self.link.hosts[1:]):
            connection.close()
            self._warn(f"refused {address}, which is not an address of a host of the job")
            return
        connection.settimeout(BEAT_SECONDS)
        peer = Peer(connection, address)
        self._unnamed.append(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _warn(self, text: str) -> None:
        """Log what strangers do, once and within a bound."""
        if text not in self._warned and len(self._warned) < _MOST_WARNINGS:
            self._warned.add(text)
            log.warning("port %d: %s", PORT, text)

    def _drop_unnamed(self) -> None:
        while self._unnamed and (
            len(self._unnamed) > _MOST_UNNAMED
            or time.monotonic() - self._unnamed[0].opened > _NAME_SECONDS
        ):
            self._close(self._unnamed[0])

    def _close(self, peer: Peer) -> None:
        """Forget a connection; that of a host stays known as ended."""
        peer.ended = True
        self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer in self._unnamed:
            self._unnamed.remove(peer)

    def close(self) -> None:
        for peer in (*self._unnamed, *self._peers.values()):
            peer.connection.close()

    def _judge(self, own: Word) -> Word | None:
        """The decision for the whole job, once there is one."""
        now = time.monotonic()
        words = {own.host: own}
        words |= {name: peer.word for name, peer in self._peers.items() if peer.word}
        current = {name: word for name, word in words.items() if word.attempt == own.attempt}
        if any(word.state == "failed" and word.is_consequence for word in current.values()):
            self._consequence_at = min(self._consequence_at, now)
        decision = self.link.judge(
            words, attempt=own.attempt, consequence_for=now - self._consequence_at
        )
        is_known = any(w.state == "failed" and not w.is_consequence for w in current.values())
        for name, peer in self._peers.items():
            has_failed = name in current and current[name].state == "failed"
            if not is_known and not has_failed and (reason := peer.lost(now)):
                return Word(host=name, state="abort", attempt=own.attempt, reason=reason)
        missing = [name for name in self.link.hosts[1:] if name not in words]
        if decision is None and missing and self._until.is_late():
            reason = "; ".join(("it did not appear in time", *sorted(self._warned)))
            return Word(host=missing[0], state="abort", reason=reason)
        if own.state == "ready":
            late = [name for name in self.link.hosts if name not in current]
            if not late:
                self.link._go.set()
            elif now - self._restart_at > _READY_SECONDS:
                why = f"its processes did not end for a restart within {_READY_SECONDS:.0f} s"
                return Word(host=late[0], state="abort", attempt=own.attempt, reason=why)
        return decision

    def _say_all(self, word: Word) -> None:
        for peer in self._peers.values():
            peer.say(word)


class _Caller:
    """Every other host: tells the first one and hears what it decides."""

    def __init__(self, link: Link, first: str, until: _Deadline) -> None:
        self.link, self.stop, self._first = link, threading.Event(), first
        self._peer = Peer(_connected(first, PORT, until))

    def close(self) -> None:
        self._peer.connection.close()

    def run(self) -> None:
        last_word: Word | None = None
        beat = 0.0
        self._peer.connection.settimeout(0.2)
        while not self.stop.is_set():
            own = self.link.own
            if own != last_word or time.monotonic() - beat > BEAT_SECONDS:
                last_word, beat = own, time.monotonic()
                self._peer.say(own)
            if self._peer.ended:
                self.stop.wait(0.2)  # Nothing is left to wait for on the connection itself.
            for word in () if self._peer.ended else self._peer.read():
                if word.key:
                    self.link.keys[word.host] = word.key
                if word.state in ("abort", "restart", "all done"):
                    self.link._decide(word)
                    if word.state != "restart":
                        return
                elif own.state == "ready" != word.state and word.attempt == own.attempt:
                    self.link._go.set()  # The first host saw that all are ready.
            if reason := self._peer.lost(time.monotonic()):
                self.link._decide(Word(host=self._first, state="abort", reason=reason))
                return


def await_port(hosts: Sequence[str], port: int, wait: float, stopped: Callable[[], bool]) -> None:
    """Wait until each host answers on a port. Raises ConfigError if one does not in time."""
    until = _Deadline(wait, stopped)
    for host in hosts:
        _connected(host, port, until).close()


def _connected(host: str, port: int, until: _Deadline) -> socket.socket:
    while True:
        try:
            return socket.create_connection((host, port), timeout=BEAT_SECONDS)
        except OSError as error:
            if until.passed():
                raise ConfigError(
                    f"The host {host} does not answer on port {port} within {until.wait:.0f} s"
                    f" ({error}).",
                    "Check that it has started and that the hosts may talk to each other (security"
                    " group); AMPHORA_HOST_WAIT_SECONDS waits longer.",
                ) from error
            time.sleep(0.2)
