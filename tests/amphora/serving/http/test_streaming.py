"""Answers in chunks: generators from predict_fn or output_fn."""

import json
import socket
from pathlib import Path

import httpx
import pytest

from tests.support.servers import ECHO, STREAM, Start, fault
from tests.support.until import until


def test_chunks_arrive_as_they_are_made(shared: Start, tmp_path: Path) -> None:
    server = shared(STREAM).ready()
    order = {"words": 4, "after": f"{tmp_path}/read"}
    with server.http.stream("POST", "/invocations", json=order) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["transfer-encoding"] == "chunked"
        for number, chunk in enumerate(answer.iter_text()):
            assert chunk == f"word{number} "
            # The next one is not made before.
            (tmp_path / f"read{number}").touch()
    assert number == 3


def test_a_stream_that_fails_at_once_is_a_plain_error(shared: Start) -> None:
    server = shared(STREAM).ready()
    answer = server.invoke({"words": 3, "break": 0})
    assert fault(answer) == (500, "handler_failed")


def test_a_stream_that_fails_later_breaks_off(shared: Start) -> None:
    server = shared(STREAM).ready()
    with (
        pytest.raises(httpx.RemoteProtocolError),
        server.http.stream("POST", "/invocations", json={"words": 3, "break": 2}) as answer,
    ):
        assert answer.status_code == 200
        answer.read()
    assert "broken in the middle" in server.log
    assert server.invoke({"words": 1}).text == "word0 "


def test_a_client_of_http_1_0_gets_a_stream_as_one_answer(shared: Start) -> None:
    """As ApacheBench and proxies send it; the lengths of chunks would be part of its text."""
    server = shared(STREAM).ready()

    def ask(order: dict[str, int]) -> tuple[bytes, bytes]:
        body = json.dumps(order).encode()
        head = "POST /invocations HTTP/1.0\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", server.port), 30) as sock:
            sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            answer = b"".join(iter(lambda: sock.recv(1 << 16), b""))
        before, _, after = answer.partition(b"\r\n\r\n")
        return before.lower(), after

    head, text = ask({"words": 3})
    assert (b"transfer-encoding" in head, b"connection: close" in head) == (False, True)
    assert text == b"word0 word1 word2 "
    assert ask({"words": 5_000})[1].split()[-1] == b"word4999"
    for words in (0, 2):
        head, text = ask({"words": 3, "break": words})
        assert (head[:12], json.loads(text)["error"]["code"]) == (b"http/1.1 500", "handler_failed")


def test_a_client_that_leaves_a_stream_frees_the_worker(shared: Start) -> None:
    server = shared(STREAM).ready()
    with server.http.stream("POST", "/invocations", json={"words": 1000, "pause": 0.1}) as answer:
        next(answer.iter_raw())
    # Long before the stream would have ended, and within its client's 60 s.
    assert server.invoke({"words": 1}).text == "word0 "


def test_a_worker_that_hangs_in_a_stream_is_replaced(start: Start, tmp_path: Path) -> None:
    server = start(STREAM, SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS="1").ready()
    order = {"words": 2, "after": f"{tmp_path}/never"}
    with pytest.raises(httpx.RemoteProtocolError):
        server.invoke(order)
    assert "has not answered for 1 s; it is replaced." in server.log
    until(lambda: server.ping() == 200)
    assert server.invoke({"words": 1}).text == "word0 "


def test_an_empty_stream_is_an_empty_answer(shared: Start) -> None:
    answer = shared(STREAM).ready().invoke({"words": 0})
    assert (answer.status_code, answer.content) == (200, b"")


def test_output_fn_may_be_the_generator(start: Start) -> None:
    code = (
        ECHO
        + """
    def output_fn(prediction, accept):
        yield prediction["echo"]
        yield {"and": "JSON"}
    """
    )
    answer = start(code).ready().invoke("text")
    assert (answer.text, answer.headers["transfer-encoding"]) == ('text{"and": "JSON"}', "chunked")
