"""Clients that are slow, greedy, gone, or do not speak HTTP, on real sockets; and bodies: compressed, in
many charsets, too large, announced by Expect."""

import contextlib
import json
import re
import select
import socket
import struct
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import psutil
import pytest

from tests.support.servers import ECHO, SERVE, Running, Start
from tests.support.until import until

SMALL = {"SAGEMAKER_MAX_PAYLOAD_IN_MB": "1"}
SLEEPING = ECHO.replace(
    'return {"echo"',
    """import os, time
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
    return shared(SLEEPING, **SMALL).ready()


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


UPGRADE = b"upgrade: websocket\r\nconnection: upgrade\r\n"
HEAD = b"POST /invocations HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize("upgrade", [b"", UPGRADE])
@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"a: " + b"x" * 70_000 + b"\r\n", 431),
        (b"a: b\r\n" * 130, 431),
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
        sock.sendall(b"GET /" + b"x" * 66_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n")
        assert statuses(rest_of(sock)) == [431]
    with connected(server) as sock:
        sock.sendall(PING[:-2] + b"a: " + b"x" * 60_000 + b"\r\n\r\n")
        assert statuses(sock.recv(65536)) == [200]


@pytest.mark.parametrize("upgrade", [b"", UPGRADE])
@pytest.mark.parametrize(
    "headers",
    [
        b"content-length: 3\r\ncontent-length: 4\r\n",
        b"content-length: 3\r\ncontent-length: 3\r\n",
        b"content-length: 3\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: chunked\r\ncontent-length: 3\r\n",
        b"transfer-encoding: chunked, identity\r\n",
        b"transfer-encoding:\r\n",
        b"transfer-encoding: identity\r\n",
        b"transfer-encoding : chunked\r\n",
        b"content-length: -1\r\n",
        b"content-length: 0x3\r\n",
        b"content-length: 99999999999999999999999\r\n",
        b"a\x00b: c\r\n",
        b"a: b\x00c\r\n",
        b"a: b\rc: d\r\n",
        b" folded\r\n",
        b"transfer-encoding: chunked\r\n\r\nrubbish\r\n",
    ],
)
def test_what_two_servers_could_read_differently_is_refused(
    server: Running, headers: bytes, upgrade: bytes
) -> None:
    with connected(server) as sock:
        sock.sendall(HEAD + upgrade + headers + b"\r\n123" + PING)
        answer = rest_of(sock)
    assert statuses(answer) == [400]
    identifier = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["request_id"]
    (line,) = [line for line in server.log.splitlines() if identifier in line]
    _, _, reason = line.partition(" from 127.0.0.1 is refused with 400: ")
    assert re.fullmatch(r"[A-Z][A-Za-z ,`'/-]{10,}\.", reason)


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


def test_trailers_are_no_headers_and_pipelined_requests_are_answered_in_order(
    server: Running,
) -> None:
    chunked = HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\n[1]\r\n0\r\n"
    with connected(server) as sock:
        sock.sendall(chunked + b"X-Amzn-SageMaker-Custom-Attributes: smuggled\r\n\r\n")
        answer = sock.recv(65536)
        assert statuses(answer) == [200]
        assert b"smuggled" not in answer
    with connected(server) as sock:
        last = invocation(19, "connection: close")
        sock.sendall(b"".join(invocation(number) for number in range(19)) + last)
        answers = rest_of(sock)
    assert statuses(answers) == [200] * 20
    positions = [answers.index(b'"echo": %d,' % number) for number in range(20)]
    assert positions == sorted(positions)


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


H2C = b"http2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nupgrade: h2c\r\n"
JDK = b"connection: Upgrade, HTTP2-Settings\r\n" + H2C
CHUNKED = b"transfer-encoding: chunked\r\n\r\n2\r\n[1\r\n1\r\n]\r\n0\r\n\r\n"
LENGTH = b"content-length: 3\r\n\r\n[1]"


@pytest.mark.parametrize(
    "offer",
    [
        JDK,
        b"Upgrade: h2c\r\nHTTP2-Settings:\r\nConnection: keep-alive , upgrade\r\n",
        b"connection: Upgrade\r\nupgrade: TLS/1.2\r\nconnection: HTTP2-Settings\r\n",
        b"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\n",
    ],
)
def test_an_offered_upgrade_is_ignored_and_the_body_read(server: Running, offer: bytes) -> None:
    ping = PING[:-2] + offer
    requests = [
        *(HEAD + offer + LENGTH, PING, HEAD + offer + CHUNKED, ping + b"\r\n", PING),
        *(ping + b"content-length: 0\r\n\r\n", invocation([1])),
    ]
    with connected(server) as sock, sock.makefile("rb") as answers:
        for request in requests:
            sock.sendall(request)
            status, *headers = iter(answers.readline, b"\r\n")
            assert b" 200 " in status
            (length,) = (int(line[16:]) for line in headers if line.startswith(b"content-length"))
            assert (b"[1]" in answers.read(length)) == request.startswith(b"POST")
    pipelined = b"".join([*requests, invocation([1], "connection: close")])
    for size in (len(pipelined), 1):
        with connected(server) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for start in range(0, len(pipelined), size):
                sock.sendall(pipelined[start : start + size])
            received = rest_of(sock)
        assert statuses(received) == [200] * 8
        assert received.count(b'{"echo": [1]') == 4


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


def test_a_server_out_of_files_answers_again_once_some_are_free(start: Start) -> None:
    command = ("sh", "-c", 'ulimit -n 160; exec "$@"', "sh", *SERVE)
    server = start(SLEEPING, command=command).ready()
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
    until(lambda: server.ping() == 200)
    assert server.invoke([1]).status_code == 200


LIMIT = 200_000


@pytest.fixture(scope="module")
def echo(shared: Start) -> Running:
    """Echoes what its handlers were given, and as what."""
    code = """
    import json

    def model_fn(model_dir):
        return None

    def input_fn(body, content_type):
        return {"body": body if isinstance(body, str) else body.decode("latin-1"),
                "kind": type(body).__name__}

    def predict_fn(data, model):
        return data
    """
    code = code.rstrip() + "\n\n" + ECHO[ECHO.index("    def output_fn") :]
    return shared(code, SAGEMAKER_MAX_PAYLOAD_IN_MB=str(LIMIT / 2**20)).ready()


def test_a_compressed_body_is_415_and_bytes_that_are_not_of_their_charset_are_400(
    echo: Running,
) -> None:
    for coding, status in (("identity", 200), ("gzip", 415), ("br, gzip", 415)):
        headers = {"content-encoding": coding, "content-type": "application/json"}
        answer = echo.http.post("/invocations", content=b"1", headers=headers)
        assert answer.status_code == status
    assert answer.headers["accept-encoding"] == "identity"
    assert "without compression" in answer.json()["error"]["message"]
    headers = {"content-type": "application/json; charset=utf-16"}
    assert echo.http.post("/invocations", content=b"abc", headers=headers).status_code == 400


@pytest.mark.parametrize(
    "charset", ["utf-8", "latin-1", "ISO-8859-1", '"utf-16"', "utf-16-le", "cp1252"]
)
def test_text_is_decoded_from_its_charset(echo: Running, charset: str) -> None:
    body = '{"text": "größer"}'
    answer = echo.http.post(
        "/invocations",
        content=body.encode(charset.strip('"')),
        headers={"content-type": f"application/json; charset={charset}"},
    )
    assert answer.json() == {"body": body, "kind": "str"}


@pytest.mark.parametrize("charset", ["klingon", "hex", "rot13", "zip", "idna", "unicode_escape"])
def test_an_unknown_charset_is_415(echo: Running, charset: str) -> None:
    headers = {"content-type": f"text/csv; charset={charset}"}
    answer = echo.http.post("/invocations", content=b"61", headers=headers)
    assert answer.status_code == 415
    assert charset in answer.json()["error"]["message"]


def test_an_announced_body_is_asked_for_or_refused_before_it_is_sent(echo: Running) -> None:
    def first_line(length: int, path: str = "/invocations") -> bytes:
        with socket.create_connection(("127.0.0.1", echo.port), timeout=240) as sock:
            sock.sendall(
                b"POST %s HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
                % (path.encode(), length)
            )
            return sock.recv(65536).partition(b"\r\n")[0]

    assert first_line(LIMIT) == b"HTTP/1.1 100 Continue"
    assert first_line(LIMIT + 1) == b"HTTP/1.1 413 Request Entity Too Large"
    assert first_line(9, "/nowhere") == b"HTTP/1.1 404 Not Found"


@pytest.mark.parametrize("path", ["/ping", "/invocations", "/metrics", "//evil.test", "/a/"])
def test_nothing_redirects_to_what_host_says(echo: Running, path: str) -> None:
    for slashed in (path, f"{path}/"):
        connection = HTTPConnection("127.0.0.1", echo.port, timeout=240)
        method = "POST" if "invocations" in path else "GET"
        headers = {"host": "evil.test", "content-type": "application/json"}
        connection.request(method, slashed, body="1" if method == "POST" else None, headers=headers)
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        expected = 200 if path in ("/ping", "/invocations") or slashed == "/metrics" else 404
        assert answer.status == expected
        assert answer.getheader("location") is None
        if expected == 404:
            assert json.loads(text)["error"]["code"] == "not_found"


STREAMING = """
    import time

    def model_fn(model_dir):
        return None

    def transform_fn(model, body, content_type, accept):
        if b"large" in body.encode():
            return b"x" * 40_000_000
        if b"stream" in body.encode():
            return (piece for piece in pieces())
        time.sleep(2.5)
        return b"late"

    def pieces():
        for number in range(5):
            time.sleep(0.6)
            yield str(number)
"""


@pytest.fixture(scope="module")
def impatient(shared: Start) -> Running:
    """A server that waits for a client for a second."""
    return shared(STREAMING, AMPHORA_CLIENT_TIMEOUT="1", AMPHORA_MAX_CONNECTIONS="40").ready()


SILENT = (b"", b"\r\n", PING)


def connections(server: Running) -> int:
    """Return how many connections the front has open."""
    front = psutil.Process(server.process.pid)
    return sum(c.status == "ESTABLISHED" for c in front.net_connections("tcp"))


def test_a_silent_client_is_closed_without_an_answer(impatient: Running) -> None:
    """Before a request, in the blank lines that may precede one, and after an answer."""
    with contextlib.ExitStack() as stack:
        silent = [(stack.enter_context(connected(impatient)), sent) for sent in SILENT * 7]
        for sock, sent in silent:
            sock.sendall(sent)
        for sock, sent in silent:
            assert statuses(rest_of(sock)) == ([200] if sent == PING else [])
    until(lambda: connections(impatient) == 0)


def test_a_request_that_does_not_arrive_in_time_is_408(impatient: Running) -> None:
    """However often its client sends a byte."""
    with connected(impatient) as head, connected(impatient) as body:
        slow = {head: PING[:9], body: HEAD + b"content-length: 99\r\n\r\n1"}
        for sock, begin in slow.items():
            sock.sendall(PING)
            assert statuses(sock.recv(65536)) == [200]
            sock.sendall(begin)
        while slow:
            answered, _, _ = select.select([*slow], [], [], 0.2)
            for sock in answered:
                answer = rest_of(sock)
                assert statuses(answer) == [408]
                assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_slow"
                del slow[sock]
            for sock in slow:
                sock.sendall(b"2")
    assert impatient.log.count("is refused with 408: it has not arrived in time.") == 2


@pytest.mark.heavy
def test_answers_may_take_longer_than_clients(impatient: Running) -> None:
    """And a request that begins while one is answered has its time from then on."""
    late, stream = invocation("late"), invocation("stream", "connection: close")
    with connected(impatient) as sock:
        sock.sendall(late + stream[:9])
        answer = b""
        while not answer.endswith(b"late"):
            answer += sock.recv(65536)
        sock.sendall(stream[9:])
        answer = rest_of(sock)
    chunks = answer.partition(b"\r\n\r\n")[2].split(b"\r\n")
    assert chunks[1:10:2] == [b"0", b"1", b"2", b"3", b"4"]
    assert answer.endswith(b"\r\n0\r\n\r\n")


@pytest.mark.heavy
def test_an_answer_that_is_not_read_is_dropped(impatient: Running) -> None:
    with connected(impatient) as sock:
        sock.sendall(invocation("large"))
        until(lambda: connections(impatient) == 1)
        until(lambda: connections(impatient) == 0)
    assert impatient.ping() == 200


@pytest.mark.heavy
def test_of_too_many_connections_that_is_closed_whose_client_is_silent_for_longest(
    impatient: Running,
) -> None:
    with contextlib.ExitStack() as stack:
        busy = stack.enter_context(connected(impatient))
        busy.sendall(invocation("late", "connection: close"))
        assert impatient.ping() == 200, "an answer that came later: the request before is read"
        silent = [stack.enter_context(connected(impatient)) for _ in range(100)]
        assert rest_of(silent[0]) == b""
        with connected(impatient) as sock:
            sock.sendall(PING)
            assert statuses(sock.recv(65536)) == [200]
        assert connections(impatient) <= 40
        assert b"late" in rest_of(busy)
    assert "40 connections are open (AMPHORA_MAX_CONNECTIONS)" in impatient.log
