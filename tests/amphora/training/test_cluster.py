"""The decision for all hosts, and the port on which they meet, as strangers use it."""

import contextlib
import itertools
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amphora.common.errors import CodeError
from amphora.training import cluster
from amphora.training.cluster import CAUSE_SECONDS, Link, Report, judge, linked
from tests.support.ports import free_port
from tests.support.until import until

WAIT = 60.0
# Two names of one machine: the first listens, the second is the other host.
HOSTS = ("localhost", "127.0.0.1")


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    monkeypatch.setattr(cluster, "PORT", free_port())
    with linked(HOSTS, HOSTS[0], lambda: False, WAIT) as link:
        yield link


def connect(source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", cluster.PORT), 10, source_address=(source, 0))


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed a connection, from which nothing is expected."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def end(link: Link, other: Link) -> None:
    """Both hosts are done, and hear of the end of the job."""
    for host in (link, other):
        host.local = Report(host=host.host, state="done")
    until(lambda: link.decision and other.decision)


def assert_meets(link: Link) -> None:
    """The second host still reaches the first one, and both hear of the end of the job."""
    with linked(HOSTS, HOSTS[1], lambda: False, WAIT) as other:
        end(link, other)
    assert link.decision is not None and link.decision.state == "all done", link.decision


@pytest.mark.parametrize("junk", [pytest.param(junk, id=name) for name, junk in {
    "brackets": b"[" * 60_000 + b"\n",
    "no line end": b"x" * 200_000,
    "no text": bytes(range(256)) * 64 + b"\n",
    "a number of many digits": b'{"host": "127.0.0.1", "state": "running", "reason": ' + b"9" * 60_000 + b"}\n",
    "an unknown field": b'{"host": "127.0.0.1", "state": "running", "x": 1}\n',
    "an unknown state": b'{"host": "127.0.0.1", "state": "x"}\n',
    "another host": b'{"host": "algo-9", "state": "failed"}\n',
    "the first host": b'{"host": "localhost", "state": "abort"}\n',
}.items()])  # fmt: skip
def test_junk_closes_its_connection_and_nothing_else(first: Link, junk: bytes) -> None:
    with connect() as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(junk)
        assert is_closed(connection)
    assert_meets(first)


def test_other_addresses_are_refused(first: Link) -> None:
    stranger = "127.0.0.99"
    with connect(stranger) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(Report(host="127.0.0.1", state="failed", reason="forged").line())
        assert is_closed(connection)
    assert_meets(first)


def test_the_first_connection_of_a_host_is_the_host(first: Link, tmp_path: Path) -> None:
    with linked(HOSTS, HOSTS[1], lambda: False, WAIT) as other, connect() as second:
        # A command of mpirun arrives once the first host knows the other one.
        (tmp_path / "127.0.0.1").write_text("orted --number 1")
        first.outbox = tmp_path
        assert other.await_command() == "orted --number 1"
        with contextlib.suppress(ConnectionError):
            second.sendall(Report(host="127.0.0.1", state="failed", reason="forged").line())
        assert is_closed(second)
        end(first, other)
    assert first.decision is not None and first.decision.state == "all done", first.decision


def test_a_host_on_which_mpirun_started_nothing_does_not_wait(first: Link) -> None:
    first.local = Report(host=HOSTS[0], state="done")
    with (
        linked(HOSTS, HOSTS[1], lambda: False, WAIT) as other,
        pytest.raises(CodeError, match=r"mpirun of localhost started nothing.* it has ended"),
    ):
        other.await_command()


def test_a_host_that_has_just_connected_is_sent_the_reason(first: Link) -> None:
    with connect() as late:
        late.settimeout(240)
        first.finish("failed", "out of memory")
        with late.makefile() as lines:
            assert "out of memory" in lines.readline()


def test_each_name_has_to_be_found_once_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of many hosts are more questions than a cluster's DNS answers at once."""
    monkeypatch.setattr(cluster, "PORT", free_port())
    names, questions = [*HOSTS, "127.0.0.2"], itertools.count()
    find = socket.getaddrinfo

    def find_each_fourth(name: str, *rest: Any, **more: Any) -> Any:
        if name in names and next(questions) % 4:
            raise socket.gaierror("too many questions")
        return find(name, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", find_each_fourth)
    with linked(names, names[0], lambda: False, 5) as link:
        assert link.decision is None


ATOMS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20))


@given(line=st.one_of(st.binary(max_size=400), st.dictionaries(
    st.sampled_from(["host", "state", "reason", "is_consequence", "command", "other"]),
    st.one_of(
        ATOMS, st.sampled_from(["127.0.0.1", "running", "failed", "done"]), st.lists(ATOMS, max_size=3)
    ),
).map(lambda word: json.dumps(word).encode())))  # fmt: skip
@settings(max_examples=100)
def test_any_line_is_a_word_or_refused(line: bytes) -> None:
    try:
        word = Report.from_line(line)
    except ValueError:
        return
    assert Report.from_line(word.line()) == word


RAISED = Report(host="algo-2", state="failed", reason="ValueError: mine")
LOST = Report(host="algo-1", state="failed", reason="gloo", is_consequence=True)
DONE = [Report(host=host, state="done") for host in ("algo-1", "algo-2")]


@pytest.mark.parametrize(
    ("reports", "lost_for", "decision"),
    [
        pytest.param([RAISED], 0.0, ("abort", "algo-2"), id="a failed host"),
        pytest.param([LOST, RAISED], 0.0, ("abort", "algo-2"), id="an exception and its loss"),
        pytest.param([LOST], 0.0, None, id="a lost host waits for the cause"),
        pytest.param([LOST], CAUSE_SECONDS + 1, ("abort", "algo-1"), id="and not for ever"),
        pytest.param(DONE[:1], 0.0, None, id="one host is done"),
        pytest.param(DONE, 0.0, ("all done", "algo-1"), id="all hosts are done"),
    ],
)
def test_the_decision_for_all_hosts(
    reports: list[Report], lost_for: float, decision: tuple[str, str] | None
) -> None:
    hosts = ("algo-1", "algo-2")
    running = {host: Report(host=host, state="running") for host in hosts}
    made = judge(running | {report.host: report for report in reports}, hosts, lost_for)
    assert (made and (made.state, made.host)) == decision
