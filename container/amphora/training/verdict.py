"""Defines the reports of a job's hosts, and decides from them when the job ends everywhere."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

CAUSE_SECONDS = 10.0
"""How long to wait for the report of the host that failed first, once another host has lost it: a
broken connection is noticed before the script and its launcher have ended."""
BEAT_SECONDS = 2.0
LOST_SECONDS = 15.0
"""A host that is silent for this long is lost."""
_STOPPED_SECONDS = 110.0
"""How long the others may run after one host was stopped: SageMaker stops all, and each has its
budget."""
_MAX_LINE = 64 * 1024
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


@dataclass(eq=False)
class Peer:
    """Reads reports from the connection to another host."""

    connection: socket.socket
    address: str = ""
    heard: float = field(default_factory=time.monotonic)
    pending: bytes = b""
    report: Report | None = None
    """The latest."""
    ended: bool = False
    stopped_at: float = 0.0

    def read(self) -> list[Report]:
        """Read what has arrived, and set `ended` at the end of the connection."""
        reports: list[Report] = []
        try:
            chunk = self.connection.recv(_MAX_LINE)
            *lines, self.pending = (self.pending + chunk).split(b"\n")
            reports += map(Report.from_line, lines)
        except TimeoutError:
            return reports
        except (OSError, ValueError):  # Not a host of the job.
            chunk = b""
        self.heard = time.monotonic()
        self.ended = not chunk or len(self.pending) > _MAX_LINE
        self.report = reports[-1] if reports else self.report
        if any(report.state == "stopped" for report in reports):
            self.stopped_at = self.stopped_at or self.heard
        return reports

    def lost(self, now: float) -> str:
        """Return why this host counts as lost, or ''."""
        if self.report is not None and self.report.state == "stopped":
            was_stopped = now - self.stopped_at > _STOPPED_SECONDS
            return "it was stopped, and this host was not" if was_stopped else ""
        if self.ended:
            return "its container ended without a report (killed, or the instance was lost)"
        if now - self.heard > LOST_SECONDS:
            return f"no message from it for {LOST_SECONDS:.0f} s (stopped, or the network is down)"
        return ""

    def send(self, report: Report) -> None:
        """Send a report; if the connection has ended, the next read notices it."""
        with suppress(OSError):
            self.connection.sendall(report.line())


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
    has_ended = [report.state in ("done", "stopped") for report in reports.values()]
    is_over = len(reports) == len(hosts) and all(has_ended)
    return Report(host=hosts[0], state="all done") if is_over else None
