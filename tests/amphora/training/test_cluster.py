"""The port on which the hosts of a job meet, as strangers and faulty hosts use it."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from amphora.training import cluster
from amphora.training.cluster import Link, linked
from amphora.training.limits import Limits
from amphora.training.verdict import Report
from tests.support.ports import free_port
from tests.support.until import until

LIMITS = Limits(stop_seconds=1, host_wait_seconds=60, max_restarts=0)
# Two names of one machine: the first listens, the second is the other host.
HOSTS = ("localhost", "127.0.0.1")
STRANGER = "127.0.0.99"


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    monkeypatch.setattr(cluster, "PORT", free_port())
    with linked(HOSTS, HOSTS[0], lambda: False, LIMITS) as link:
        yield link


def connect(source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", cluster.PORT), 10, source_address=(source, 0))


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed a connection, from which nothing is expected."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def assert_meets(link: Link) -> None:
    """The second host still reaches the first one, and both hear of the end of the job."""
    with linked(HOSTS, HOSTS[1], lambda: False, LIMITS) as other:
        other.announce_done()
        link.announce_done()
        until(lambda: link.is_over() and other.is_over())
    assert link.decision is not None and link.decision.state == "all done", link.decision


JUNK = {
    "brackets": b"[" * 60_000 + b"\n",
    "objects": b'{"host":' * 7_000 + b"\n",
    "no line end": b"x" * 200_000,
    "no text": bytes(range(256)) * 64 + b"\n",
    "a number of many digits": b'{"host": "127.0.0.1", "state": "running", "attempt": ' + b"9" * 60_000 + b"}\n",
    "a list for a host": b'{"host": ["127.0.0.1"], "state": "running"}\n',
    "an object for an attempt": b'{"host": "127.0.0.1", "state": "running", "attempt": {}}\n',
    "an unknown state": b'{"host": "127.0.0.1", "state": "running away"}\n',
    "an unknown field": b'{"host": "127.0.0.1", "state": "running", "x": 1}\n',
    "another host": b'{"host": "algo-9", "state": "failed"}\n',
    "the first host": b'{"host": "localhost", "state": "abort"}\n',
    "a request": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
}  # fmt: skip


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK)
def test_junk_closes_its_connection_and_nothing_else(first: Link, junk: bytes) -> None:
    with connect() as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(junk)
        assert is_closed(connection)
    assert_meets(first)


def test_other_addresses_are_refused(first: Link) -> None:
    with connect(STRANGER) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(Report(host="127.0.0.1", state="failed", reason="forged").line())
        assert is_closed(connection)
    assert_meets(first)


def test_the_first_connection_of_a_host_is_the_host(first: Link) -> None:
    with linked(HOSTS, HOSTS[1], lambda: False, LIMITS) as other, connect() as second:
        other.exchange_keys("a key, to be heard of", (), 1)
        until(lambda: first.keys)
        with contextlib.suppress(ConnectionError):
            second.sendall(Report(host="127.0.0.1", state="failed", reason="forged").line())
        assert is_closed(second)
        other.announce_done()
        first.announce_done()
        until(first.is_over)
    assert first.decision is not None and first.decision.state == "all done", first.decision


def listens(link: Link) -> bool:
    threads = [each for each in threading.enumerate() if each.name == "peers"]
    return bool(threads) and not link.is_over()


def test_idle_connections_up_to_the_limit_of_descriptors(first: Link) -> None:
    """From an address of the job itself, so that none is refused at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        idle = [stack.enter_context(connect()) for _ in range(20)]
        used = max(connection.fileno() for connection in idle)
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 30, hard))
        with contextlib.suppress(OSError):
            for _ in range(300):
                idle.append(stack.enter_context(connect()))
        # No descriptor is left in this process, which is that of the listener, too.
        assert listens(first)
        for connection in idle[-20:]:
            connection.close()
        assert_meets(first)


ATOMS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20))
WORDS = st.dictionaries(
    st.sampled_from(["host", "state", "attempt", "reason", "is_fault", "key", "other"]),
    st.one_of(
        ATOMS, st.sampled_from(["127.0.0.1", "running", "failed", "done"]), st.lists(ATOMS, max_size=3)
    ),
)  # fmt: skip


@given(line=st.one_of(st.binary(max_size=400), WORDS.map(lambda word: json.dumps(word).encode())))
@settings(max_examples=300, deadline=None)
def test_any_line_is_a_word_or_refused(line: bytes) -> None:
    try:
        word = Report.of(line)
    except ValueError:
        return
    assert Report.of(word.line()) == word


@given(chunks=st.lists(st.binary(min_size=1, max_size=200), max_size=8))
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_raw_bytes(first: Link, chunks: list[bytes]) -> None:
    with connect() as connection, contextlib.suppress(ConnectionError):
        for chunk in chunks:
            connection.sendall(chunk)
    assert listens(first)


def test_a_host_after_raw_bytes(first: Link) -> None:
    for length in (1, 100, 70_000):
        with connect() as connection, contextlib.suppress(ConnectionError):
            connection.sendall(bytes(length))
    assert_meets(first)


def test_hosts_exchange_their_keys(first: Link) -> None:
    told: dict[str, str] = {}
    with linked(HOSTS, HOSTS[1], lambda: False, LIMITS) as other:

        def ask() -> None:
            told.update(other.exchange_keys("key of 2", HOSTS[:1], 30))

        thread = threading.Thread(target=ask)
        thread.start()
        assert first.exchange_keys("key of 1", HOSTS[1:], 30) == {"127.0.0.1": "key of 2"}
        thread.join(30)
        assert told == {"localhost": "key of 1"}
        other.announce_done()
        first.announce_done()
        until(lambda: first.is_over() and other.is_over())
