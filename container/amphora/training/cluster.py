"""Connects the hosts of one job, so that they end together.

A host that fails or vanishes ends the job on every host with its reason. A host that is done waits
for the others, because the platform may end all containers when the first one ends. The first host
listens and the others connect to it; each side sends a report (a line of JSON) every two seconds.
Only addresses of the job's hosts may connect. torchrun does none of this: a rank in a collective
notices a lost host only after minutes.
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
from pathlib import Path

from amphora.common.errors import CodeError, ConfigError
from amphora.training.verdict import BEAT_SECONDS, CAUSE_SECONDS, Peer, Report, judge

log = logging.getLogger("amphora")

PORT = 7776
"""The port of the first host; torchrun uses 7777."""
_MOST_WARNINGS = 16


class Link:
    """Represents this host in the job. `fileno` becomes readable with a decision for all hosts."""

    def __init__(self, host: str, hosts: Sequence[str], stopped: Callable[[], bool]) -> None:
        self._stopped = stopped
        self._reader, self._writer = socket.socketpair()
        self._decided = threading.Event()
        self.host, self.hosts = host, tuple(hosts)
        self.addresses: dict[str, set[str]] = {}
        """The addresses of each host."""
        self.outbox: Path | None = None
        """The folder in which mpirun's agent leaves a command for each of the other hosts."""
        self.command = ""
        """The command that the first host has sent to this one."""
        self.is_left_out = False
        """Whether the first host is done and has sent no command."""
        self.local = Report(host=host, state="running")
        """The report of this host."""
        self.decision: Report | None = None
        """The decision for all hosts, 'abort' or 'all done'; None while there is none."""

    def fileno(self) -> int:
        return self._reader.fileno()

    @property
    def abort(self) -> Report | None:
        """Return the report of the host that failed first, unless it is this one."""
        decision = self.decision
        is_abort = decision is not None and decision.state == "abort" and decision.host != self.host
        return decision if is_abort else None

    def finish(self, state: str, reason: str = "", *, is_consequence: bool = False) -> None:
        """Report how this host ended, and wait for the decision.

        A host that is done waits until the job is over, or until it is stopped: the others are then
        stopped as well. A host that failed because it lost another one waits for the other's
        reason.

        Args:
            is_consequence: Whether `reason` only says that another host was lost.
        """
        if self.decision is not None:
            return
        self.local = Report(
            host=self.host, state=state, reason=reason, is_consequence=is_consequence
        )
        if len(self.hosts) == 1:
            return
        if state == "done":
            log.info("done on this host; waiting for the others")
            while not self._decided.wait(0.2) and not self._stopped():
                pass
            return
        # Long enough to send the report, and for the first host to learn which others have ended.
        self._decided.wait(2 * BEAT_SECONDS + CAUSE_SECONDS * is_consequence)

    def await_command(self) -> str:
        """Wait for the command by which mpirun of the first host starts ranks on this one.

        Raises:
            CodeError: The job, or mpirun, has ended before.
        """
        while not self.command:
            if self._decided.wait(0.1) or self.is_left_out:
                other, first = self.abort, self.hosts[0]
                why = f"{other.host} failed first: {other.reason}" if other else "it has ended"
                raise CodeError(f"mpirun of {first} started nothing on this host: {why}")
        return self.command

    def _decide(self, decision: Report) -> None:
        if self.decision is None:
            self.decision = decision
            self._decided.set()
            self._writer.send(b"!")


@contextmanager
def linked(
    hosts: Sequence[str], host: str, stopped: Callable[[], bool], wait: float
) -> Iterator[Link]:
    """Connect this host with the others of the job.

    Args:
        stopped: Returns whether the job was asked to stop.
        wait: Seconds that a host may take to appear.

    Raises:
        ConfigError: A host's name does not resolve, or the first host cannot be reached, in time.
    """
    link = Link(host, hosts, stopped)
    with link._reader, link._writer:
        if len(hosts) == 1:
            yield link
            return
        deadline = _Deadline(wait, stopped)
        # Names appear late in a cluster that starts.
        while missing := [name for name in hosts if name not in link.addresses]:
            for name in missing:
                with suppress(OSError):
                    entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
                    link.addresses[name] = {str(entry[4][0]) for entry in entries}
            missing = [name for name in missing if name not in link.addresses]
            if missing and deadline.passed():
                raise ConfigError(
                    f"No address for {', '.join(missing)} within {deadline.wait:.0f} s.",
                    "Check that every host of resourceconfig.json has started and that they share"
                    " a network, or raise AMPHORA_HOST_WAIT_SECONDS.",
                )
            if missing:
                time.sleep(0.2)
        is_first = host == hosts[0]
        talk = _Listener(link, deadline) if is_first else _Caller(link, hosts[0], deadline)
        thread = threading.Thread(target=talk.run, name="peers", daemon=True)
        thread.start()
        try:
            yield link
        finally:
            talk.stop.set()
            thread.join(2 * BEAT_SECONDS)
            talk.close()


class _Deadline:
    """Bounds the wait for other hosts; a stop of the job cuts it short."""

    def __init__(self, wait: float, stopped: Callable[[], bool]) -> None:
        self.wait, self._stopped = wait, stopped
        self._deadline = time.monotonic() + wait

    def passed(self) -> bool:
        return self._stopped() or self.is_late()

    def is_late(self) -> bool:
        """Return whether the time itself is over, without regard to a stop."""
        return time.monotonic() > self._deadline


class _Listener:
    """Receives the reports of all other hosts on the first one, and decides for all."""

    def __init__(self, link: Link, deadline: _Deadline) -> None:
        self.link, self.stop, self._deadline = link, threading.Event(), deadline
        try:
            self._server = socket.create_server(("", PORT), backlog=64)
        except OSError as error:
            raise ConfigError(
                f"Port {PORT}, on which the hosts of a job meet, cannot be opened: {error}.",
                "End the program that uses it, perhaps another job on this host.",
            ) from error
        self._server.settimeout(0)
        self._selector = selectors.DefaultSelector()
        self._peers: dict[str, Peer] = {}
        """By host, once a connection has named it."""
        self._open: list[Peer] = []
        self._warned: set[str] = set()
        self._consequence_at = float("inf")
        """When a host first reported that it lost another one."""

    def run(self) -> None:
        """Talk to the other hosts until the job is over."""
        last, beat = self.link.local, 0.0
        self._selector.register(self._server, selectors.EVENT_READ)
        with self._server, self._selector:
            while not self.stop.is_set():
                for key, _ in self._selector.select(timeout=0.2):
                    try:
                        self._read(key.data) if key.data else self._accept()
                    except Exception as error:  # A stranger must not end the job.
                        self._warn(f"{type(error).__name__}: {error}")
                        self.stop.wait(0.05)
                local = self.link.local
                # What mpirun's agent has left, before the report that this host is done.
                for path in self.link.outbox.iterdir() if self.link.outbox else ():
                    if path.name in self._peers:
                        command = path.read_text()
                        self._peers[path.name].send(replace(self.link.local, command=command))
                        path.unlink()
                if local != last or time.monotonic() - beat > BEAT_SECONDS:
                    last, beat = local, time.monotonic()
                    for peer in self._peers.values():
                        peer.send(local)
                decision = self._judge(local)
                if decision is not None:
                    # All that have connected receive it, also if they have not reported yet.
                    for _ in self.link.hosts[1:]:
                        self._accept()
                    for peer in self._open:
                        peer.send(decision)
                        if peer.report is None:
                            peer.read()  # Unread bytes would make close() discard what was sent.
                    self.link._decide(decision)
                    return

    def _accept(self) -> None:
        try:
            connection, (address, *_) = self._server.accept()
        except BlockingIOError:
            return
        if not any(address in self.link.addresses[name] for name in self.link.hosts[1:]):
            connection.close()
            self._warn(f"refused {address}, which is not an address of a host of the job")
            return
        connection.settimeout(BEAT_SECONDS)
        peer = Peer(connection, address)
        self._open.append(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _read(self, peer: Peer) -> None:
        peer.read()
        if peer.report is not None and not peer.ended:
            name = peer.report.host
            is_host = name in self.link.hosts[1:] and peer.address in self.link.addresses[name]
            # The first connection that names a host from its local address is that host.
            if not is_host or self._peers.setdefault(name, peer) is not peer:
                peer.ended = True
        if peer.ended:  # The peer of a host stays known as ended.
            self._selector.unregister(peer.connection)
            self._open.remove(peer)
            peer.connection.close()

    def _warn(self, text: str) -> None:
        """Log what strangers do, once for each text and up to a bound."""
        if text not in self._warned and len(self._warned) < _MOST_WARNINGS:
            self._warned.add(text)
            log.warning("port %d: %s", PORT, text)

    def close(self) -> None:
        for peer in self._open:
            peer.connection.close()

    def _judge(self, local: Report) -> Report | None:
        """Return the decision for the whole job, if there is one."""
        now = time.monotonic()
        reports = {local.host: local}
        reports |= {name: peer.report for name, peer in self._peers.items() if peer.report}
        failed = [report for report in reports.values() if report.state == "failed"]
        if any(report.is_consequence for report in failed):
            self._consequence_at = min(self._consequence_at, now)
        decision = judge(reports, self.link.hosts, now - self._consequence_at)
        is_cause_known = any(not report.is_consequence for report in failed)
        for name, peer in self._peers.items():
            has_failed = peer.report is not None and peer.report.state == "failed"
            if not is_cause_known and not has_failed and (reason := peer.lost(now)):
                return Report(host=name, state="abort", reason=reason)
        missing = [name for name in self.link.hosts[1:] if name not in reports]
        if decision is None and missing and self._deadline.is_late():
            reason = "; ".join(("it did not appear in time", *sorted(self._warned)))
            return Report(host=missing[0], state="abort", reason=reason)
        return decision


class _Caller:
    """Reports to the first host from any other one, and receives its decisions."""

    def __init__(self, link: Link, first: str, deadline: _Deadline) -> None:
        self.link, self.stop, self._first = link, threading.Event(), first
        while True:
            try:
                connection = socket.create_connection((first, PORT), timeout=BEAT_SECONDS)
                break
            except OSError as error:
                if deadline.passed():
                    raise ConfigError(
                        f"The host {first} does not answer on port {PORT} within"
                        f" {deadline.wait:.0f} s ({error}).",
                        "Check that it has started and that the security group lets the hosts"
                        " connect to each other, or raise AMPHORA_HOST_WAIT_SECONDS.",
                    ) from error
                time.sleep(0.2)
        self._peer = Peer(connection)

    def close(self) -> None:
        self._peer.connection.close()

    def run(self) -> None:
        """Talk to the first host until the job is over."""
        last: Report | None = None
        beat = 0.0
        self._peer.connection.settimeout(0.2)
        while not self.stop.is_set():
            local = self.link.local
            if local != last or time.monotonic() - beat > BEAT_SECONDS:
                last, beat = local, time.monotonic()
                self._peer.send(local)
            if self._peer.ended:
                self.stop.wait(0.2)  # Reading would return at once.
            for report in () if self._peer.ended else self._peer.read():
                self.link.command = report.command or self.link.command
                self.link.is_left_out = report.state == "done" and not self.link.command
                if report.state in ("abort", "all done"):
                    self.link._decide(report)
                    return
            if reason := self._peer.lost(time.monotonic()):
                self.link._decide(Report(host=self._first, state="abort", reason=reason))
                return
