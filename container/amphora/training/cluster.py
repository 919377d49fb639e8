"""Connects the hosts of one job, so that they end or restart together.

A host that fails or vanishes ends the job on every host with its reason, or restarts it on every
host. A host that is done waits for the others, because the platform may end all containers when the
first one ends. The first host listens and the others connect to it; each side sends a report (a
line of JSON) every two seconds. Only addresses of the job's hosts may connect. torchrun does none
of this: a rank in a collective notices a lost host after minutes, and each torchrun counts its own
restarts (see ARCHITECTURE).
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
    Report,
    judge,
)

log = logging.getLogger("amphora")

PORT = 7776
"""The port of the first host; torchrun uses 7777."""
_READY_SECONDS = 120.0
"""How long a host may take to end its processes for a restart. They have 10 s before SIGKILL, but a
process may hang in a driver call."""
_MOST_WARNINGS = 16


class Link:
    """Represents this host in the job. `fileno` becomes readable with a decision for all hosts."""

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
        """The addresses of each host."""
        self.keys: dict[str, str] = {}
        """The public SSH keys of the other hosts, as they arrive."""
        self.own = Report(host=host, state="running")
        self.decision: Report | None = None
        """What follows for all hosts: 'abort', 'restart' or 'all done'; None while undecided."""
        self.judge = partial(judge, hosts=self.hosts, max_restarts=limits.max_restarts)

    def fileno(self) -> int:
        return self._reader.fileno()

    @property
    def attempt(self) -> int:
        """Return the number of restarts so far."""
        return self.own.attempt

    @property
    def abort(self) -> Report | None:
        """Return the report of the host that failed first, unless it is this one."""
        decision = self.decision
        is_abort = decision is not None and decision.state == "abort" and decision.host != self.host
        return decision if is_abort else None

    @property
    def restart(self) -> Report | None:
        """Return the report that is answered by a restart, or None."""
        decision = self.decision
        return decision if decision is not None and decision.state == "restart" else None

    def announce_done(self) -> None:
        """Report that this host itself has nothing to wait for."""
        self._report(Report(host=self.host, state="done", attempt=self.attempt))

    def finish(
        self, state: str, reason: str = "", *, is_consequence: bool = False, is_fault: bool = False
    ) -> None:
        """Report how this host ended, and wait for what follows (see `decision`).

        A host that is done waits until the job is over, or until it is stopped: the others are then
        stopped as well. A host that failed because it lost another one waits for that one's reason.

        Args:
            is_consequence: Whether `reason` only says that another host was lost.
            is_fault: Whether a restart may help.
        """
        if self.decision is not None:
            return
        self._report(
            Report(
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
        # Long enough to send the report, and for the first host to see who else has ended.
        wait = 2 * BEAT_SECONDS
        if is_consequence or is_fault:
            wait += CAUSE_SECONDS + LOST_SECONDS * is_fault
        self._decided.wait(wait)

    def exchange_keys(self, key: str, names: Sequence[str], seconds: float) -> dict[str, str]:
        """Send this host's public SSH key to the others, and wait for those of the hosts `names`.

        Raises:
            ConfigError: A key does not arrive in time.
        """
        self._report(replace(self.own, key=key))
        deadline = _Deadline(seconds, self._stopped)
        while missing := [name for name in names if name not in self.keys]:
            if self._decided.wait(0.1) or deadline.passed():
                why = f"within {seconds:.0f} s"
                if self.abort is not None:
                    why = f"because {self.abort.host} failed first: {self.abort.reason}"
                raise ConfigError(
                    f"No SSH key arrived from {', '.join(missing)} {why}.",
                    "See the log of that host, or raise AMPHORA_HOST_WAIT_SECONDS.",
                )
        return {name: self.keys[name] for name in names}

    def start_again(self) -> bool:
        """Wait until every host has ended its processes, so that all restart together.

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
            self._report(Report(host=self.host, state="ready", attempt=attempt))
        while len(self.hosts) > 1 and not self._go.wait(0.2):
            if self._decided.is_set() or self._stopped():
                return False
        self._report(Report(host=self.host, state="running", attempt=attempt))
        return True

    def is_over(self) -> bool:
        """Return whether the whole job has ended."""
        return self.decision is not None and self.decision.state != "restart"

    def _report(self, report: Report) -> None:
        with self._lock:
            self.own = report = replace(report, key=report.key or self.own.key)
            # A job of one host decides for itself.
            if len(self.hosts) == 1:
                decision = self.judge({self.host: report}, attempt=report.attempt)
                if decision is not None:
                    self._decide(decision)

    def _decide(self, decision: Report) -> None:
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
    """Connect this host with the others of the job.

    Args:
        stopped: Returns whether the job was asked to stop.
        limits: How long a host may take to appear, and the number of restarts.

    Raises:
        ConfigError: A host's name does not resolve, or the first host cannot be reached, in time.
    """
    link = Link(host, hosts, stopped, limits)
    with link._reader, link._writer:
        if len(hosts) == 1:
            yield link
            return
        deadline = _Deadline(limits.host_wait_seconds, stopped)
        link.addresses = _resolve(hosts, deadline)
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
        self._at = time.monotonic() + wait

    def passed(self) -> bool:
        return self._stopped() or self.is_late()

    def is_late(self) -> bool:
        """Return whether the time itself is over, without regard to a stop."""
        return time.monotonic() > self._at


def _resolve(hosts: Sequence[str], deadline: _Deadline) -> dict[str, set[str]]:
    """Wait until every host has an address: names appear late in a cluster that starts."""
    addresses: dict[str, set[str]] = {}
    while True:
        for name in hosts:
            if name not in addresses:
                with suppress(OSError):
                    entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
                    addresses[name] = {str(entry[4][0]) for entry in entries}
        missing = [name for name in hosts if name not in addresses]
        if not missing:
            return addresses
        if deadline.passed():
            raise ConfigError(
                f"No address for {', '.join(missing)} within {deadline.wait:.0f} s.",
                "Check that every host of resourceconfig.json has started and that they share a"
                " network, or raise AMPHORA_HOST_WAIT_SECONDS.",
            )
        time.sleep(0.2)


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
        self._consequence_at = self._restart_at = float("inf")
        """When a host first reported that it lost another one; when a restart was decided."""

    def run(self) -> None:
        """Talk to the other hosts until the job is over."""
        last, beat, attempt = self.link.own, 0.0, 0
        self._selector.register(self._server, selectors.EVENT_READ)
        with self._server, self._selector:
            while not self.stop.is_set():
                for key, _ in self._selector.select(timeout=0.2):
                    try:
                        self._read(key.data) if key.data else self._accept()
                    except Exception as error:  # A stranger must not end the job.
                        self._warn(f"{type(error).__name__}: {error}")
                        self.stop.wait(0.05)
                own = self.link.own
                if own != last or time.monotonic() - beat > BEAT_SECONDS:
                    last, beat = own, time.monotonic()
                    self._send_all(own)
                if own.attempt < attempt:
                    continue  # This host's own processes have not ended yet.
                decision = self._judge(own)
                if decision is not None:
                    self._send_all(decision)
                    self.link._decide(decision)
                    if decision.state != "restart":
                        return
                    attempt, self._consequence_at = decision.attempt, float("inf")
                    self._restart_at = time.monotonic()

    def _accept(self) -> None:
        try:
            connection, (address, *_) = self._server.accept()
        except BlockingIOError:
            return
        except OSError:  # No descriptor is free.
            oldest = next((peer for peer in self._open if peer.report is None), None)
            if oldest is None:
                raise
            self._close(oldest)
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
            # The first connection that names a host from its own address is that host.
            if is_host and self._peers.setdefault(name, peer) is peer:
                if peer.report.key:
                    self.link.keys[name] = peer.report.key
            else:
                peer.ended = True
        if peer.ended:  # The peer of a host stays known as ended.
            self._close(peer)

    def _close(self, peer: Peer) -> None:
        self._selector.unregister(peer.connection)
        self._open.remove(peer)
        peer.connection.close()

    def _warn(self, text: str) -> None:
        """Log what strangers do, once for each text and up to a bound."""
        if text not in self._warned and len(self._warned) < _MOST_WARNINGS:
            self._warned.add(text)
            log.warning("port %d: %s", PORT, text)

    def close(self) -> None:
        """Close all connections."""
        for peer in self._open:
            peer.connection.close()

    def _judge(self, own: Report) -> Report | None:
        """Return the decision for the whole job, if there is one."""
        now = time.monotonic()
        reports = {own.host: own}
        reports |= {name: peer.report for name, peer in self._peers.items() if peer.report}
        current = {name: each for name, each in reports.items() if each.attempt == own.attempt}
        failed = [report for report in current.values() if report.state == "failed"]
        if any(report.is_consequence for report in failed):
            self._consequence_at = min(self._consequence_at, now)
        decision = self.link.judge(
            reports, attempt=own.attempt, consequence_for=now - self._consequence_at
        )
        is_cause_known = any(not report.is_consequence for report in failed)
        for name, peer in self._peers.items():
            has_failed = name in current and current[name].state == "failed"
            if not is_cause_known and not has_failed and (reason := peer.lost(now)):
                return Report(host=name, state="abort", attempt=own.attempt, reason=reason)
        missing = [name for name in self.link.hosts[1:] if name not in reports]
        if decision is None and missing and self._deadline.is_late():
            reason = "; ".join(("it did not appear in time", *sorted(self._warned)))
            return Report(host=missing[0], state="abort", reason=reason)
        if own.state == "ready":
            late = [name for name in self.link.hosts if name not in current]
            if not late:
                self.link._go.set()
            elif now - self._restart_at > _READY_SECONDS:
                why = f"its processes did not end for a restart within {_READY_SECONDS:.0f} s"
                return Report(host=late[0], state="abort", attempt=own.attempt, reason=why)
        return decision

    def _send_all(self, report: Report) -> None:
        for peer in self._peers.values():
            peer.send(report)


class _Caller:
    """Reports to the first host from any other one, and receives its decisions."""

    def __init__(self, link: Link, first: str, deadline: _Deadline) -> None:
        self.link, self.stop, self._first = link, threading.Event(), first
        self._peer = Peer(_connected(first, PORT, deadline))

    def close(self) -> None:
        """Close the connection to the first host."""
        self._peer.connection.close()

    def run(self) -> None:
        """Talk to the first host until the job is over."""
        last: Report | None = None
        beat = 0.0
        self._peer.connection.settimeout(0.2)
        while not self.stop.is_set():
            own = self.link.own
            if own != last or time.monotonic() - beat > BEAT_SECONDS:
                last, beat = own, time.monotonic()
                self._peer.send(own)
            if self._peer.ended:
                self.stop.wait(0.2)  # Reading would return at once.
            for report in () if self._peer.ended else self._peer.read():
                if report.key:
                    self.link.keys[report.host] = report.key
                if report.state in ("abort", "restart", "all done"):
                    self.link._decide(report)
                    if report.state != "restart":
                        return
                elif own.state == "ready" != report.state and report.attempt == own.attempt:
                    self.link._go.set()  # The first host has seen that all are ready.
            if reason := self._peer.lost(time.monotonic()):
                self.link._decide(Report(host=self._first, state="abort", reason=reason))
                return


def await_port(hosts: Sequence[str], port: int, wait: float, stopped: Callable[[], bool]) -> None:
    """Wait until each host answers on a port. Raises ConfigError if one does not in time."""
    deadline = _Deadline(wait, stopped)
    for host in hosts:
        _connected(host, port, deadline).close()


def _connected(host: str, port: int, deadline: _Deadline) -> socket.socket:
    while True:
        try:
            return socket.create_connection((host, port), timeout=BEAT_SECONDS)
        except OSError as error:
            if deadline.passed():
                raise ConfigError(
                    f"The host {host} does not answer on port {port} within {deadline.wait:.0f} s"
                    f" ({error}).",
                    "Check that it has started and that the security group lets the hosts connect"
                    " to each other, or raise AMPHORA_HOST_WAIT_SECONDS.",
                ) from error
            time.sleep(0.2)
