"""The hosts of one job, told of each other's end.

A host that fails, or vanishes, ends the job on every host with its reason; a host that is done
waits for the others, since the platform may end all containers when the first one ends. The first
host listens and the others connect to it; each side sends a line of JSON every two seconds.
torchrun does none of this: a rank in a collective operation learns of a lost host after minutes.
"""

from __future__ import annotations

import json
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from amphora.common import variables
from amphora.common.errors import ConfigError

log = logging.getLogger("amphora")

PORT = 7776
"""Beside torchrun's 7777."""
HOST_WAIT_SECONDS = 300.0
"""How long a host may take to appear: instances of one job do not start in the same second."""
_BEAT_SECONDS = 2.0
_LOST_SECONDS = 15.0
"""Without a word from a host for this long it counts as lost. Half of the promised 30 s."""
_STOPPED_SECONDS = 110.0
"""How long the others may go on after one host was stopped: each is stopped, and has its budget."""
_CAUSE_SECONDS = 10.0
"""How long the host that failed first may take to say so, once another one has lost it: its script
still ends, and its launcher after that, while a broken connection is seen at once."""
_MAX_LINE = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class Word:
    """What a host says of itself, and the first host of the job."""

    host: str
    state: str
    """'running', 'done', 'failed', 'stopped'; from the first host also 'abort' and 'all done'."""
    reason: str = ""
    is_consequence: bool = False
    """Whether a failed host only knows that it lost another one, which may name the cause yet."""

    def line(self) -> bytes:
        return json.dumps(vars(self)).encode() + b"\n"


class Link:
    """This host's end of it. `fileno` is readable once the job is over, well or not."""

    def __init__(self, host: str, hosts: Sequence[str], stopped: Callable[[], bool]) -> None:
        self._stopped = stopped
        self._reader, self._writer = socket.socketpair()
        self._verdict = threading.Event()
        self.host, self.hosts = host, tuple(hosts)
        self.own = Word(host=host, state="running")
        self.abort: Word | None = None
        """The host that failed first, when it is another one, and why."""

    def fileno(self) -> int:
        return self._reader.fileno()

    def announce_done(self) -> None:
        """Tell the others that this host has nothing of its own to wait for."""
        self.own = Word(host=self.host, state="done")

    def finish(self, state: str, reason: str = "", *, is_consequence: bool = False) -> Word | None:
        """Tell the others how this host ended; where it is done, wait until the job is over.

        A stop ends the waiting: the others are stopped as well, and end by themselves. A host that
        failed because it lost another one waits for that one's reason.

        Args:
            is_consequence: Whether `reason` only tells that another host was lost.

        Returns:
            The word of the host that failed first, when it was another one.
        """
        self.own = Word(host=self.host, state=state, reason=reason, is_consequence=is_consequence)
        if len(self.hosts) > 1 and self.abort is None:
            if state == "done":
                log.info("done on this host; waiting for the others")
                while not self._verdict.wait(0.2) and not self._stopped():
                    pass
            else:
                # Long enough for the word to get out.
                self._verdict.wait(2 * _BEAT_SECONDS + (_CAUSE_SECONDS if is_consequence else 0.0))
        return self.abort

    def is_over(self) -> bool:
        """Whether the whole job has ended."""
        return self._verdict.is_set()

    def _end(self, abort: Word | None) -> None:
        if self._verdict.is_set():
            return
        if abort is not None and abort.host != self.host:
            self.abort = abort
        self._verdict.set()
        self._writer.send(b"!")

    def _close(self) -> None:
        self._reader.close()
        self._writer.close()


@contextmanager
def linked(
    hosts: Sequence[str], host: str, environ: Mapping[str, str], stopped: Callable[[], bool]
) -> Iterator[Link]:
    """Join the hosts of the job; a job of one host has no one to join.

    Args:
        stopped: Whether the job was asked to stop meanwhile.

    Raises:
        ConfigError: A host's name does not resolve, or the first host cannot be reached, in time.
    """
    link = Link(host, hosts, stopped)
    if len(hosts) == 1:
        yield link
        link._close()
        return
    wait = variables.seconds(environ, "AMPHORA_HOST_WAIT_SECONDS", HOST_WAIT_SECONDS)
    until = _Deadline(wait, stopped)
    _resolve(hosts, until)
    talk = _Listener(link, until) if host == hosts[0] else _Caller(link, hosts[0], until)
    thread = threading.Thread(target=talk.run, name="peers", daemon=True)
    thread.start()
    try:
        yield link
    finally:
        talk.stop.set()
        thread.join(2 * _BEAT_SECONDS)
        link._close()


class _Deadline:
    """A bound on waiting for the others, cut short where the job is to stop."""

    def __init__(self, wait: float, stopped: Callable[[], bool]) -> None:
        self.wait, self._stopped = wait, stopped
        self._at = time.monotonic() + wait

    def passed(self) -> bool:
        return self._stopped() or time.monotonic() > self._at


def _resolve(hosts: Sequence[str], until: _Deadline) -> None:
    """Wait until every host has an address: names appear late in a cluster that starts."""
    missing = list(hosts)
    while missing := [name for name in missing if not _resolves(name)]:
        if until.passed():
            raise ConfigError(
                f"No address for {', '.join(missing)} within {until.wait:.0f} s.",
                "Check that every host of resourceconfig.json has started and that their network"
                " lets them find each other; AMPHORA_HOST_WAIT_SECONDS waits longer.",
            )
        time.sleep(0.2)


def _resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True


@dataclass
class _Peer:
    """One connection, read by lines."""

    connection: socket.socket
    heard: float = field(default_factory=time.monotonic)
    pending: bytes = b""
    word: Word | None = None
    ended: bool = False
    stopped_at: float = 0.0

    def read(self) -> bool:
        """Take in what has arrived; False at the end of the connection."""
        try:
            chunk = self.connection.recv(_MAX_LINE)
        except OSError:
            return False
        self.heard = time.monotonic()
        *lines, self.pending = (self.pending + chunk).split(b"\n")
        try:
            for line in lines:
                self.word = Word(**json.loads(line))
                if self.word.state == "stopped":
                    self.stopped_at = self.stopped_at or self.heard
        except (ValueError, TypeError):
            return False  # Whoever this is, it is no host of the job.
        return bool(chunk) and len(self.pending) <= _MAX_LINE

    def lost(self, now: float) -> str:
        """Why this host counts as lost; '' where it does not."""
        if self.word is not None and self.word.state == "stopped":
            was_stopped = now - self.stopped_at > _STOPPED_SECONDS
            return "it was stopped, and this host was not" if was_stopped else ""
        if self.ended:
            return "its container ended without a word (killed, or the instance was lost)"
        if now - self.heard > _LOST_SECONDS:
            return f"not a word from it for {_LOST_SECONDS:.0f} s (stopped, or the network is down)"
        return ""

    def say(self, word: Word) -> None:
        with suppress(OSError):  # The next read sees the end.
            self.connection.sendall(word.line())


class _Listener:
    """The first host: hears every other one and gives the verdict."""

    def __init__(self, link: Link, until: _Deadline) -> None:
        self.link, self.stop, self._until = link, threading.Event(), until
        try:
            self._server = socket.create_server(("", PORT), backlog=64)
        except OSError as error:
            raise ConfigError(
                f"Port {PORT}, on which the hosts of a job meet, cannot be opened: {error}.",
                "End what uses it; another job on this host, perhaps.",
            ) from error
        self._peers: dict[str, _Peer] = {}
        self._consequence_at = float("inf")
        """When a host first said that it had lost another one."""

    def run(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._server, selectors.EVENT_READ)
        beat = 0.0
        with self._server, selector:
            while not self.stop.is_set():
                for key, _ in selector.select(timeout=0.2):
                    self._hear(selector, key)
                if time.monotonic() - beat > _BEAT_SECONDS:
                    beat = time.monotonic()
                    self._say_all(self.link.own)
                verdict = self._judge()
                if verdict is not None:
                    self._say_all(verdict)
                    self.link._end(verdict if verdict.state == "abort" else None)
                    return

    def _hear(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        if key.data is None:
            connection, _ = self._server.accept()
            connection.settimeout(_BEAT_SECONDS)
            selector.register(connection, selectors.EVENT_READ, _Peer(connection))
            return
        peer: _Peer = key.data
        alive = peer.read()
        if peer.word is not None and peer.word.host in self.link.hosts[1:]:
            self._peers[peer.word.host] = peer
        if not alive:
            selector.unregister(peer.connection)
            peer.ended = True

    def _judge(self) -> Word | None:
        """The verdict on the whole job, once there is one."""
        own, now = self.link.own, time.monotonic()
        words = {name: peer.word for name, peer in self._peers.items() if peer.word}
        failed = [word for word in (own, *words.values()) if word.state == "failed"]
        for word in failed:
            if not word.is_consequence:
                return replace(word, state="abort")
        for name, peer in self._peers.items():
            has_failed = peer.word is not None and peer.word.state == "failed"
            if not has_failed and (reason := peer.lost(now)):
                return Word(host=name, state="abort", reason=reason)
        if failed:
            self._consequence_at = min(self._consequence_at, now)
            all_ended = len(failed) == len(self.link.hosts)
            if all_ended or now - self._consequence_at > _CAUSE_SECONDS:
                return replace(failed[0], state="abort")
            return None
        missing = [name for name in self.link.hosts[1:] if name not in words]
        if missing and self._until.passed():
            return Word(host=missing[0], state="abort", reason="it did not appear in time")
        states = {own.state, *(word.state for word in words.values())}
        over = not missing and states <= {"done", "stopped"}
        return Word(host=own.host, state="all done") if over else None

    def _say_all(self, word: Word) -> None:
        for peer in self._peers.values():
            peer.say(word)


class _Caller:
    """Every other host: tells the first one and hears the verdict."""

    def __init__(self, link: Link, first: str, until: _Deadline) -> None:
        self.link, self.stop, self._first = link, threading.Event(), first
        self._peer = _Peer(_connected(first, PORT, until))

    def run(self) -> None:
        said: Word | None = None
        beat = 0.0
        with self._peer.connection:
            while not self.stop.is_set():
                own = self.link.own
                if own != said or time.monotonic() - beat > _BEAT_SECONDS:
                    said, beat = own, time.monotonic()
                    self._peer.say(own)
                verdict = self._listen()
                if verdict is not None:
                    self.link._end(verdict if verdict.state == "abort" else None)
                    return

    def _listen(self) -> Word | None:
        self._peer.connection.settimeout(0.2)
        try:
            head = self._peer.connection.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            head = b"?"
        except OSError:
            head = b""
        if head == b"" or (head != b"?" and not self._peer.read()):
            self._peer.ended = True
            self.stop.wait(0.2)  # Nothing is left to wait for on the connection itself.
        word = self._peer.word
        if word is not None and word.state in ("abort", "all done"):
            return word
        if reason := self._peer.lost(time.monotonic()):
            return Word(host=self._first, state="abort", reason=reason)
        return None


def await_port(
    hosts: Sequence[str], port: int, environ: Mapping[str, str], stopped: Callable[[], bool]
) -> None:
    """Wait until each host answers on a port. Raises ConfigError where one does not in time."""
    until = _Deadline(
        variables.seconds(environ, "AMPHORA_HOST_WAIT_SECONDS", HOST_WAIT_SECONDS), stopped
    )
    for host in hosts:
        _connected(host, port, until).close()


def _connected(host: str, port: int, until: _Deadline) -> socket.socket:
    while True:
        try:
            return socket.create_connection((host, port), timeout=_BEAT_SECONDS)
        except OSError as error:
            if until.passed():
                raise ConfigError(
                    f"The host {host} does not answer on port {port} within"
                    f" {until.wait:.0f} s"
                    f" ({error}).",
                    "Check that it has started and that the hosts may talk to each other (security"
                    " group); AMPHORA_HOST_WAIT_SECONDS waits longer.",
                ) from error
            time.sleep(0.2)
