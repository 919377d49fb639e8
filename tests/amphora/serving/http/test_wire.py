"""Clients that are slow, greedy, gone, or do not speak HTTP, on real sockets."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.sync.client import connect

from amphora.serving.http import wire
from tests.support.servers import ECHO, Running, Start
from tests.support.until import until

# Time-outs that are long enough for a client that is held up for a second.
SECONDS = 4
BOUNDS = {
    "header_seconds": SECONDS,
    "body_seconds": SECONDS,
    "body_rate": 1000,
    "keep_alive_seconds": SECONDS,
    "header_bytes": 4096,
    "header_count": 20,
}
# For tests that wait for a time-out.
HASTY = BOUNDS | {f"{name}_seconds": 0.6 for name in ("header", "body", "keep_alive")}
SMALL = {"SAGEMAKER_MAX_PAYLOAD_IN_MB": "1"}
SLEEPING = ECHO.replace(
    'return {"echo"',
    """import os, time
        if isinstance(data, dict) and "sleep" in data:
            time.sleep(data["sleep"])
        if isinstance(data, dict) and "gate" in data:
            open(data["gate"] + ".began", "w").close()
            while not os.path.exists(data["gate"]):
                time.sleep(0.01)
        if isinstance(data, dict) and "file" in data:
            open(data["file"], "a").write("x")
        return {"echo\"""",
)
PING = b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture(scope="module")
def server(shared: Start) -> Running:
    return shared(SLEEPING, limits=BOUNDS, **SMALL).ready()


@pytest.fixture(scope="module")
def hasty(shared: Start) -> Running:
    return shared(SLEEPING, limits=HASTY, **SMALL).ready()


@contextlib.contextmanager
def connected(server: Running) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=240) as sock:
        yield sock


def rest_of(sock: socket.socket) -> bytes:
    """All that comes until the server closes."""
    parts = b""
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(65536):
            parts += part
    return parts


def invocation(value: object, *headers: str) -> bytes:
    body = json.dumps(value).encode()
    lines = ["POST /invocations HTTP/1.1", "host: x", "content-type: application/json", *headers]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body


def statuses(answers: bytes) -> list[int]:
    return [int(part[:3]) for part in answers.split(b"HTTP/1.1 ")[1:]]


HEAD = b"POST /invocations HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("beginning", "piece", "expected"),
    [
        (b"", b"", []),
        (b"\r\n", b"\r\n", []),
        (b"GET /", b"x", [408]),
        (b"GET /ping HTTP/1.1\r\nhost: x\r\n", b"a: b\r\n", [408]),
        (b"GET /ping HTTP/1.1\r\nx: ", b"y", [408]),
        (PING[:-2] + b"upgrade: websocket\r\nconnection: upgrade\r\n", b"z", [408]),
        (HEAD + b"content-length: 9000\r\n\r\n[", b"", [408]),
        (HEAD + b"content-length: 9000\r\n\r\n[", b"1", [408]),
        (CHUNKED, b"1\r\n1\r\n", [408]),
        (CHUNKED + b"1;a", b"aaaa", [408]),  # An extension only.
    ],
)
def test_a_client_that_drips_is_refused(
    hasty: Running, beginning: bytes, piece: bytes, expected: list[int]
) -> None:
    with connected(hasty) as sock:
        sock.sendall(beginning)
        while not select.select([sock], [], [], 0.1)[0]:
            sock.sendall(piece)
        answer = rest_of(sock)
    assert statuses(answer) == expected
    if expected:
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
        until(lambda: '"status": 408' in hasty.log)


def test_a_slow_body_within_the_rate_is_answered(server: Running) -> None:
    body = json.dumps("x" * 6000).encode()
    with connected(server) as sock:
        sock.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body))
        for place in range(0, len(body), 1000):
            time.sleep(0.7)
            sock.sendall(body[place : place + 1000])
        assert b"200 OK" in sock.recv(65536)


def test_an_idle_connection_is_closed_and_a_used_one_is_not(server: Running) -> None:
    with connected(server) as sock:
        for _ in range(4):
            sock.sendall(PING)
            assert statuses(sock.recv(65536)) == [200]
            time.sleep(SECONDS / 2.9)
        assert rest_of(sock) == b""


@pytest.mark.parametrize("upgrade", [b"", b"upgrade: websocket\r\nconnection: upgrade\r\n"])
@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"a: " + b"x" * 5000 + b"\r\n", 431),
        (b"a: b\r\n" * 30, 431),
        (b"a: " + b"x" * 900_000, 431),  # Never ends.
    ],
)
def test_large_headers_are_431(server: Running, head: bytes, status: int, upgrade: bytes) -> None:
    for path in (b"/ping", b"/invocations", b"/nowhere"):
        with connected(server) as sock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(b"GET " + path + b" HTTP/1.1\r\nhost: x\r\n" + upgrade + head)
            with contextlib.suppress(BrokenPipeError):
                sock.sendall(b"\r\n")
            assert statuses(rest_of(sock)) == [status]


def test_a_long_path_is_431_and_a_header_within_the_bound_is_taken(server: Running) -> None:
    with connected(server) as sock:
        sock.sendall(b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\nhost: x\r\n\r\n")
        assert statuses(rest_of(sock)) == [431]
    with connected(server) as sock:
        sock.sendall(PING[:-2] + b"a: " + b"x" * 4000 + b"\r\n\r\n")
        assert statuses(sock.recv(65536)) == [200]


def test_a_websocket_with_headers_within_the_bound_answers(server: Running) -> None:
    uri = f"ws://127.0.0.1:{server.port}/invocations-bidirectional-stream"
    with connect(uri, additional_headers={"x-long": "x" * 3000}) as socket_:
        # Longer than every time-out: a WebSocket is not an idle connection.
        time.sleep(SECONDS + 0.5)
        socket_.send("[1]")
        assert json.loads(socket_.recv())["echo"] == [1]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (b"content-length: 3\r\ncontent-length: 4\r\n", 400),
        (b"content-length: 3\r\ncontent-length: 3\r\n", 400),
        (b"content-length: 3\r\ntransfer-encoding: chunked\r\n", 400),
        (b"transfer-encoding: chunked\r\ncontent-length: 3\r\n", 400),
        (b"transfer-encoding: chunked, identity\r\n", 400),
        (b"transfer-encoding: gzip, chunked\r\n", 501),
        (b"transfer-encoding: xchunked\r\n", 501),
        (b"transfer-encoding : chunked\r\n", 400),
        (b"content-length: -1\r\n", 400),
        (b"content-length: 0x3\r\n", 400),
        (b"content-length: 99999999999999999999999\r\n", 400),
        (b"expect: tea\r\ncontent-length: 3\r\n", 417),
        (b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 3\r\n", 400),
        (b"a\x00b: c\r\n", 400),
        (b"a: b\x00c\r\n", 400),
        (b"a: b\rc: d\r\n", 400),
        (b" folded\r\n", 400),
        (b"transfer-encoding: chunked\r\n\r\nrubbish\r\n", 400),
    ],
)
def test_what_two_servers_could_read_differently_is_refused(
    server: Running, headers: bytes, status: int
) -> None:
    with connected(server) as sock:
        sock.sendall(HEAD + headers + b"\r\n123" + PING)
        assert statuses(rest_of(sock)) == [status]


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00\x01\x00\x01", b"SSH-2.0-x\r\n", b"{}\r\n\r\n", b"\x00" * 99,
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n"]
)  # fmt: skip
def test_garbage_is_answered_and_leaves_no_traceback(server: Running, garbage: bytes) -> None:
    with connected(server) as sock:
        sock.sendall(garbage)
        assert statuses(rest_of(sock)) == [400]
    assert "Traceback" not in server.log


@pytest.mark.parametrize("body", [b"3\r\n[1]\r\n0\r\n\r\n", b"1\r\n[\r\n2;a=b\r\n1]\r\n0\r\n\r\n"])
def test_chunked_bodies_are_read(server: Running, body: bytes) -> None:
    with connected(server) as sock:
        sock.sendall(HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n" + body)
        assert b'{"echo": [1]' in rest_of(sock)


def test_trailers_are_no_headers_and_are_bounded(server: Running) -> None:
    chunked = HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\n[1]\r\n0\r\n"
    name = b"X-Amzn-SageMaker-Custom-Attributes: "
    with connected(server) as sock:
        sock.sendall(chunked + name + b"smuggled\r\n\r\n")
        answer = sock.recv(65536)
        assert statuses(answer) == [200]
        assert b"smuggled" not in answer
    with connected(server) as sock, contextlib.suppress(BrokenPipeError):
        sock.sendall(chunked + name)
        for _ in range(20):
            time.sleep(0.02)
            sock.sendall(b"x" * 1000)
        assert statuses(rest_of(sock)) == [400]


def test_pipelined_requests_are_answered_in_order_and_a_broken_one_ends_them(
    server: Running,
) -> None:
    with connected(server) as sock:
        sock.sendall(b"".join(invocation(number) for number in range(20)) + b"rubbish\r\n\r\n")
        answers = rest_of(sock)
    assert statuses(answers) == [200] * 20
    places = [answers.index(b'"echo": %d,' % number) for number in range(20)]
    assert places == sorted(places)


def test_who_left_is_logged_as_499_and_waiting_work_is_not_done(
    server: Running, tmp_path: Path
) -> None:
    def answers() -> list[str]:
        """The lines of the client that leaves, and not of one in an earlier test."""
        return [line for line in server.log.splitlines() if '"inference_id": "leaving"' in line]

    with connected(server) as busy, connected(server) as leaving:
        busy.sendall(invocation({"gate": f"{tmp_path}/gate"}))
        until((tmp_path / "gate.began").exists)
        identified = "x-amzn-sagemaker-inference-id: leaving"
        leaving.sendall(invocation({"file": f"{tmp_path}/done"}, identified))
        until(lambda: server.metric("amphora_queue_requests") == 1)
        leaving.close()
        (line,) = until(answers)
        (tmp_path / "gate").touch()
        assert statuses(busy.recv(65536)) == [200]
    assert server.invoke({"file": f"{tmp_path}/mine"}).status_code == 200
    assert '"status": 499' in line
    assert (tmp_path / "mine").exists()
    assert not (tmp_path / "done").exists()


def test_an_upgrade_that_is_no_websocket_is_ignored(server: Running) -> None:
    upgrade = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n"
    with connected(server) as sock:
        for request in (PING[:-2] + upgrade + b"\r\n", PING, PING[:-2] + upgrade + b"\r\n"):
            sock.sendall(request)
            assert statuses(sock.recv(65536)) == [200]


def test_a_refused_body_is_read_on_until_its_answer_is_there(server: Running) -> None:
    for path in (b"/nowhere", b"/invocations"):
        with connected(server) as sock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(
                b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path, 3 << 20)
            )
            sock.sendall(bytes(3 << 20))
            assert statuses(sock.recv(65536)) == [404 if path == b"/nowhere" else 413]


def test_who_resets_while_it_is_refused_leaves_no_traceback(server: Running) -> None:
    for number in range(60):
        with connected(server) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.sendall(HEAD.replace(b"/invocations", b"/nowhere") + b"connection: close\r\n")
            sock.sendall(b"content-length: 9\r\n\r\n1" if number % 2 else b"content-length: x\r\n")
    assert server.ping() == 200
    assert "Traceback" not in server.log


def test_a_client_that_reads_no_answer_is_let_go(start: Start) -> None:
    code = ECHO.replace("return json.dumps(prediction)", 'return "x" * 30_000_000')
    server = start(code, limits={"body_seconds": 0.5}).ready()
    with connected(server) as sock:
        sock.sendall(invocation(1))
        assert sock.recv(12) == b"HTTP/1.1 200"
        until(lambda: not is_open(server, sock))
        assert len(rest_of(sock)) < 30_000_000


def is_open(server: Running, client: socket.socket) -> bool:
    """Whether the server's end of a connection is established, by the kernel's list."""
    ends = f":{server.port:04X}", f":{client.getsockname()[1]:04X}"
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any((row[1][8:], row[2][8:], row[3]) == (*ends, "01") for row in rows)


@pytest.mark.parametrize("limits", [{"connections": 20}, {"open_files": 160}])
def test_ping_is_reachable_beyond_every_connection_that_may_be_open(
    start: Start, limits: dict[str, float]
) -> None:
    server = start(SLEEPING, limits=limits).ready()
    assert ("the limit of open files is 160" in server.log) == ("open_files" in limits)
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            with contextlib.suppress(ConnectionError):
                sock.sendall(b"GET /")
        # The client's own idle connection may have been closed for a new one.
        until(lambda: server.ping() == 200)
        until(lambda: server.invoke([1]).status_code == 200)
    assert "Traceback" not in server.log
    assert server.log.count("connections are open") < 4


def test_a_server_with_too_many_busy_connections_answers_ping(start: Start, tmp_path: Path) -> None:
    server = start(SLEEPING, limits={"connections": 20}).ready()
    with contextlib.ExitStack() as stack:
        busy = [stack.enter_context(connected(server)) for _ in range(30)]
        for sock in busy:
            sock.sendall(invocation({"gate": f"{tmp_path}/gate"}))
        until(lambda: server.metric("amphora_queue_requests") >= 15)
        assert server.ping() == 200
        last = stack.enter_context(connected(server))
        last.sendall(PING)
        answer = rest_of(last)
        assert statuses(answer) == [200] and b"connection: close\r\n" in answer.lower()
        (tmp_path / "gate").touch()
        codes = [status for sock in busy for status in statuses(sock.recv(65536))]
    assert codes.count(200) >= 15
    assert codes.count(200) + codes.count(503) == 30


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /ping HTTP/1.1\r\nhost: a\r\n", b"200"),
        (b"GET /ping HTTP/1.1\r\n", b"400"),
        (b"GET /ping HTTP/1.1\r\nhost: a\r\nHost: b\r\n", b"400"),
        (b"GET /ping HTTP/1.0\r\nhost: a\r\nhost: a\r\n", b"400"),
        (b"GET /ping HTTP/1.0\r\n", b"200"),
    ],
)
def test_a_request_has_one_host(shared: Start, head: bytes, status: bytes) -> None:
    with socket.create_connection(("127.0.0.1", shared().ready().port), timeout=240) as sock:
        sock.sendall(head + b"connection: close\r\n\r\n")
        assert sock.recv(12) == b"HTTP/1.1 " + status


def test_no_connection_is_established_while_the_port_closes() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as sock,
        socket.create_connection(sock.getsockname(), 30) as before,
    ):
        wire._ignore_handshakes(sock)
        with pytest.raises(TimeoutError):
            socket.create_connection(sock.getsockname(), 0.2)
        accepted, _ = sock.accept()
        before.sendall(b"request")
        with accepted:
            assert accepted.recv(9) == b"request"
