"""Connects the hosts of one job, so that they end together.

A host that fails or vanishes ends the job on every host with its reason; torchrun's ranks would
notice after minutes. A host that is done waits for the others, because the platform may end all
containers when the first one ends. The others connect to the first host, from addresses of the job
only; each side sends a report (a line of JSON) every two seconds, and the first host decides.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from amphora.common.errors import CodeError, ConfigError

T = TypeVar("T")

log = logging.getLogger("amphora")

PORT = 7776
"""The port of the first host; torchrun uses 7777."""
CAUSE_SECONDS = 10.0
"""How long to wait for the report of the host that failed first, once another host has lost it: a
broken connection is noticed before the script and its launcher have ended."""
BEAT_SECONDS = 2.0
LOST_SECONDS = 15.0
"""A host that is silent for this long is lost."""
# How long the others may run after one host was stopped: SageMaker stops all, and each has its
# budget.
_STOPPED_SECONDS = 110.0
_TICK_SECONDS = 0.2
_MAX_LINE = 64 * 1024
_MOST_WARNINGS = 16
_STATES = {"running", "done", "failed", "stopped", "abort", "all done"}


@dataclass(frozen=True, kw_only=True)
class Report:
    """Holds the state of one host; from the first host also the decision for all."""

    host: str
    state: str
    """'running', 'done', 'failed' or 'stopped'; decisions are 'abort' and 'all done'."""
    reason: str = ""
    is_consequence: bool = False
    """Whether a failed host only lost another one, which may still report the cause."""
    command: str = ""
    """From the first host: the command by which mpirun starts ranks on the receiver."""

    @classmethod
    def from_line(cls, line: bytes) -> Report:
        """Read a line from the network. Raises ValueError if it is not a report."""
        try:
            report = cls(**json.loads(line))
        except (TypeError, RecursionError) as error:
            raise ValueError(f"not a report: {error}") from None
        types = {name: type(value) for name, value in vars(cls(host="", state="")).items()}
        has_types = all(type(getattr(report, name)) is kind for name, kind in types.items())
        if not has_types or report.state not in _STATES:
            raise ValueError("a field of the report has a wrong type or an unknown state")
        return report

    def line(self) -> bytes:
        return json.dumps(vars(self)).encode() + b"\n"


def judge(
    reports: Mapping[str, Report], hosts: Sequence[str], consequence_for: float = 0.0
) -> Report | None:
    """Decide whether the job is over, or return None while it goes on.

    Args:
        reports: The latest of each host that is known.
        consequence_for: Seconds since a host first reported that it lost another one.
    """
    failed = [report for report in reports.values() if report.state == "failed"]
    if failed:
        first = min(failed, key=lambda report: report.is_consequence)
        if first.is_consequence and len(failed) < len(hosts) and consequence_for <= CAUSE_SECONDS:
            return None
        return replace(first, state="abort")
    has_ended = all(report.state in ("done", "stopped") for report in reports.values())
    is_over = has_ended and len(reports) == len(hosts)
    return Report(host=hosts[0], state="all done") if is_over else None


class _Peer:
    """Reads the reports of another host in a thread, and sends those of this one."""

    def __init__(self, talk: _Talk, connection: socket.socket, address: str = "") -> None:
        self.connection, self.address, self._talk = connection, address, talk
        self.heard = time.monotonic()
        self.report: Report | None = None
        """The latest report."""
        self.ended = False
        threading.Thread(target=self._read, name="peer", daemon=True).start()

    def _read(self) -> None:
        # A sender of anything else than reports is not a host of the job.
        with self.connection, suppress(OSError, ValueError), self.connection.makefile("rb") as file:
            while line := file.readline(_MAX_LINE):
                report = Report.from_line(line)
                if not self._talk.take(self, report):
                    break
                self.heard, self.report = time.monotonic(), report
        self.ended = True

    def lost(self, now: float) -> str:
        """Return why this host counts as lost, or ''."""
        silence = now - self.heard
        if self.report is not None and self.report.state == "stopped":
            return "it was stopped, and this host was not" if silence > _STOPPED_SECONDS else ""
        if self.ended:
            return "its container ended without a report (killed, or the instance was lost)"
        if silence > LOST_SECONDS:
            return f"no message from it for {LOST_SECONDS:.0f} s (stopped, or the network is down)"
        return ""

    def send(self, report: Report) -> None:
        """Send a report; if the connection has ended, the reading thread notices it."""
        with suppress(OSError):
            self.connection.sendall(report.line())


class Link:
    """Represents this host in the job, and receives the decision for all hosts."""

    def __init__(self, host: str, hosts: Sequence[str], stopped: Callable[[], bool]) -> None:
        self._stopped = stopped
        self._decided = threading.Event()
        self.host, self.hosts = host, tuple(hosts)
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

    @property
    def abort(self) -> Report | None:
        """Return the report of the host that failed first, unless it is this one."""
        decision = self.decision
        is_abort = decision is not None and decision.state == "abort" and decision.host != self.host
        return decision if is_abort else None

    def finish(self, state: str, reason: str = "", *, is_consequence: bool = False) -> None:
        """Report how this host ended, and wait for the decision.

        A host that is done waits until the job is over or stopped; one that failed only because it
        lost another one (`is_consequence`), for the other's reason.
        """
        if self.decision is not None:
            return
        self.local = replace(self.local, state=state, reason=reason, is_consequence=is_consequence)
        if len(self.hosts) == 1:
            return
        if state == "done":
            log.info("done on this host; waiting for the others")
            while not self._decided.wait(_TICK_SECONDS) and not self._stopped():
                pass
            return
        # Long enough to send the report, and for the first host to learn which others have ended.
        self._decided.wait(2 * BEAT_SECONDS + CAUSE_SECONDS * is_consequence)

    def await_command(self) -> str:
        """Wait for the command by which mpirun of the first host starts ranks on this one.

        Raises CodeError if the job, or mpirun, ends before.
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


@contextmanager
def linked(
    hosts: Sequence[str], host: str, stopped: Callable[[], bool], wait: float
) -> Iterator[Link]:
    """Connect this host with the others of the job.

    Args:
        stopped: Returns whether the job was asked to stop.
        wait: Seconds that a host may take to appear, else ConfigError is raised.
    """
    link = Link(host, hosts, stopped)
    if len(hosts) == 1:
        yield link
        return
    talk = (_Listener if host == hosts[0] else _Caller)(link, wait)
    thread = threading.Thread(target=talk.run, name="peers", daemon=True)
    thread.start()
    try:
        yield link
    finally:
        talk.stop.set()
        thread.join(2 * BEAT_SECONDS)
        talk.close()


def _retried(action: Callable[[], T], wait: float, problem: str) -> T:
    """Repeat an action on the network until it succeeds; hosts of a cluster appear late.

    Raises ConfigError after `wait` seconds.
    """
    deadline = time.monotonic() + wait
    while True:
        try:
            return action()
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{problem} within {wait:.0f} s ({error}).",
                    "Check that every host of resourceconfig.json has started and that the security"
                    " group lets them connect to each other, or raise AMPHORA_HOST_WAIT_SECONDS.",
                ) from error
            time.sleep(_TICK_SECONDS)


class _Talk(ABC):
    """Exchanges reports with other hosts until the job is over."""

    def __init__(self, link: Link) -> None:
        self.link, self.stop = link, threading.Event()
        self.connected: list[_Peer] = []
        self.peers: dict[str, _Peer] = {}
        """By host, once a connection has named it; also those that have ended."""

    def run(self) -> None:
        last: Report | None = None
        beat = 0.0
        while self.link.decision is None and not self.stop.is_set():
            # The threads that read add peers, and set the decision.
            local, peers = self.link.local, dict(self.peers)
            # What mpirun's agent has left, before the report that this host is done.
            for path in self.link.outbox.iterdir() if self.link.outbox else ():
                if path.name in peers:
                    peers[path.name].send(replace(local, command=path.read_text()))
                    path.unlink()
            if local != last or time.monotonic() - beat > BEAT_SECONDS:
                last, beat = local, time.monotonic()
                for peer in peers.values():
                    peer.send(local)
            if decision := self.judge(local, peers):
                self.link._decide(decision)
            self.wait()

    def wait(self) -> None:
        self.stop.wait(_TICK_SECONDS)

    @abstractmethod
    def take(self, peer: _Peer, report: Report) -> bool:
        """Apply a report. Return whether its peer is the host that it names."""

    @abstractmethod
    def judge(self, local: Report, peers: Mapping[str, _Peer]) -> Report | None:
        """Return the decision for the whole job, if there is one."""

    def close(self) -> None:
        for peer in self.connected:
            with suppress(OSError):
                peer.connection.shutdown(socket.SHUT_RDWR)


class _Listener(_Talk):
    """Receives the reports of all other hosts on the first one, and decides for all."""

    def __init__(self, link: Link, wait: float) -> None:
        super().__init__(link)
        self._deadline = time.monotonic() + wait
        self._addresses: dict[str, set[str]] = {}
        for name in link.hosts[1:]:
            find = partial(socket.getaddrinfo, name, None, type=socket.SOCK_STREAM)
            entries = _retried(find, wait, f"No address for {name}")
            self._addresses[name] = {str(entry[4][0]) for entry in entries}
        try:
            self._server = socket.create_server(("", PORT), backlog=64)
        except OSError as error:
            raise ConfigError(
                f"Port {PORT}, on which the hosts of a job meet, cannot be opened: {error}.",
                "End the program that uses it, perhaps another job on this host.",
            ) from error
        self._server.settimeout(_TICK_SECONDS)
        self._warned: set[str] = set()
        self._consequence_at = float("inf")
        """When a host first reported that it lost another one."""

    def run(self) -> None:
        with self._server:
            super().run()
            if self.link.decision:
                # All that have connected receive it, also if they have not reported yet.
                self._server.settimeout(0)
                for _ in self.link.hosts[1:]:
                    self.wait()
                for peer in self.connected:
                    peer.send(self.link.decision)

    def wait(self) -> None:
        try:
            connection, (address, *_) = self._server.accept()
        except (BlockingIOError, TimeoutError):
            return
        except OSError as error:  # A stranger must not end the job.
            self._warn(f"{type(error).__name__}: {error}")
            self.stop.wait(0.05)
            return
        reason = f"refused {address}, which is not an address of a host of the job"
        if any(address in self._addresses[name] for name in self.link.hosts[1:]):
            try:
                self.connected.append(_Peer(self, connection, address))
                return
            except RuntimeError as error:  # The container has no more threads.
                reason = f"refused {address}: {error}"
        self._warn(reason)
        connection.close()

    def take(self, peer: _Peer, report: Report) -> bool:
        name = report.host
        is_known = name in self.link.hosts[1:] and peer.address in self._addresses[name]
        # The first connection that names a host from an address of it is that host.
        return is_known and self.peers.setdefault(name, peer) is peer

    def _warn(self, text: str) -> None:
        """Log what strangers do, once for each text and up to a bound."""
        if text not in self._warned and len(self._warned) < _MOST_WARNINGS:
            self._warned.add(text)
            log.warning("port %d: %s", PORT, text)

    def judge(self, local: Report, peers: Mapping[str, _Peer]) -> Report | None:
        now = time.monotonic()
        reports = {local.host: local}
        reports |= {name: peer.report for name, peer in peers.items() if peer.report}
        failed = [report for report in reports.values() if report.state == "failed"]
        if any(report.is_consequence for report in failed):
            self._consequence_at = min(self._consequence_at, now)
        if all(report.is_consequence for report in failed):  # The cause is not known.
            for name, peer in peers.items():
                has_failed = peer.report is not None and peer.report.state == "failed"
                if not has_failed and (reason := peer.lost(now)):
                    return Report(host=name, state="abort", reason=reason)
        decision = judge(reports, self.link.hosts, now - self._consequence_at)
        missing = [name for name in self.link.hosts[1:] if name not in reports]
        if decision is None and missing and now > self._deadline:
            reason = "; ".join(("it did not appear in time", *sorted(self._warned)))
            return Report(host=missing[0], state="abort", reason=reason)
        return decision


class _Caller(_Talk):
    """Reports to the first host from any other one, and receives its decisions."""

    def __init__(self, link: Link, wait: float) -> None:
        super().__init__(link)
        first = link.hosts[0]
        call = partial(socket.create_connection, (first, PORT), timeout=BEAT_SECONDS)
        connection = _retried(call, wait, f"The host {first} does not answer on port {PORT}")
        connection.settimeout(None)
        self.connected = [_Peer(self, connection)]
        self.peers = {first: self.connected[0]}

    def take(self, peer: _Peer, report: Report) -> bool:
        self.link.command = report.command or self.link.command
        self.link.is_left_out = report.state == "done" and not self.link.command
        if report.state in ("abort", "all done"):
            self.link._decide(report)
        return True

    def judge(self, local: Report, peers: Mapping[str, _Peer]) -> Report | None:
        ((first, peer),) = peers.items()
        reason = peer.lost(time.monotonic())
        return Report(host=first, state="abort", reason=reason) if reason else None
