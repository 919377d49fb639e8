"""Sessions, attributes, metrics, the access log, batch transform, the multi-model API, WebSockets."""

import asyncio
import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from amphora.common import devices
from amphora.serving import settings
from amphora.serving.http.server import Front
from amphora.serving.pool.sessions import Session, SessionGone, Sessions
from amphora.serving.protocol.media_types import Fault
from tests.support.servers import (
    COUNTING,
    ECHO,
    MERGING,
    STREAM,
    Running,
    Start,
    fault,
)
from tests.support.until import until

SESSION = "X-Amzn-SageMaker-Session-Id"


def invoke_in_session(server: Running, identifier: str, value: object = "go") -> httpx.Response:
    return server.invoke(value, **{SESSION: identifier})


def open_session(server: Running) -> str:
    announced: str = invoke_in_session(server, "NEW_SESSION").headers[
        "X-Amzn-SageMaker-New-Session-Id"
    ]
    identifier, expires = announced.split("; ")
    assert expires.startswith("Expires=20")
    assert expires.endswith("Z")
    return identifier


def test_a_session_keeps_its_state_in_one_worker_until_either_ends(start: Start) -> None:
    server = start(COUNTING, SAGEMAKER_MODEL_SERVER_WORKERS="2").ready()
    server.wait_for_workers(2)
    first, second = open_session(server), open_session(server)
    counts = [invoke_in_session(server, first).json() for _ in range(4)]
    assert [seen for seen, _ in counts] == [2, 3, 4, 5]
    assert len({pid for _, pid in counts}) == 1
    assert invoke_in_session(server, second).json()[0] == 2
    assert invoke_in_session(server, second).json()[1] != counts[0][1], (
        "sessions spread over workers"
    )
    closed = invoke_in_session(server, first, "close")
    assert closed.headers["X-Amzn-SageMaker-Closed-Session-Id"] == first
    gone = invoke_in_session(server, first)
    assert fault(gone) == (400, "session_closed")
    assert gone.headers["X-Amzn-SageMaker-Closed-Session-Id"] == first
    assert server.invoke("go").json()[0] is None
    # A session ends with its worker.
    os.kill(invoke_in_session(server, second).json()[1], signal.SIGKILL)
    assert invoke_in_session(server, second).json()["error"]["code"] in (
        "session_closed",
        "not_ready",
    )
    server.ready()
    assert invoke_in_session(server, open_session(server)).status_code == 200


def test_a_session_may_be_closed_in_a_stream(start: Start) -> None:
    code = """
    def model_fn(model_dir): return None
    def transform_fn(model, body, content_type, accept, context):
        def chunks():
            if body == '"early"':
                context.close_session()
            yield "a"
            if body == '"late"':
                context.close_session()
            yield "b"
        return chunks(), "text/plain"
    """
    server = start(code).ready()
    early, late = open_session(server), open_session(server)
    reported = invoke_in_session(server, early, "early")
    assert (reported.text, reported.headers["X-Amzn-SageMaker-Closed-Session-Id"]) == ("ab", early)
    untold = invoke_in_session(server, late, "late")
    assert (untold.text, "X-Amzn-SageMaker-Closed-Session-Id" in untold.headers) == ("ab", False)
    for identifier in (early, late):
        gone = invoke_in_session(server, identifier)
        assert gone.headers["X-Amzn-SageMaker-Closed-Session-Id"] == identifier
        assert gone.json()["error"]["code"] == "session_closed"


def test_a_session_of_merging_handlers_is_answered_alone(shared: Start) -> None:
    server = shared(MERGING).ready()
    assert invoke_in_session(server, open_session(server)).json()[:2] == ["go", 1]


def test_custom_attributes_are_echoed_and_the_inference_id_is_logged(shared: Start) -> None:
    server = shared().ready()
    headers = {
        "X-Amzn-SageMaker-Custom-Attributes": "trace=1", "X-Amzn-SageMaker-Inference-Id": "mine-7",
    }  # fmt: skip
    answer = server.invoke("secret body", **headers)
    assert answer.headers["X-Amzn-SageMaker-Custom-Attributes"] == "trace=1"
    (row,) = until(lambda: [row for row in server.log.splitlines() if '"mine-7"' in row])
    line = json.loads(row)
    assert (line["inference_id"], line["status"], line["path"]) == ("mine-7", 200, "/invocations")
    assert line["request_id"] == answer.headers["x-request-id"]
    assert (line["bytes_in"], line["bytes_out"]) == (len('"secret body"'), len(answer.content))
    assert "secret body" not in server.log


def test_metrics_are_prometheus_text(start: Start) -> None:
    code = MERGING.replace("return [len(text)]", "return [len(text), 1]")
    server = start(code).ready()
    server.invoke("abc")
    server.invoke([1])
    answer = server.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    expected = {
        'amphora_requests_total{status="200"} 1.0',
        'amphora_requests_total{status="400"} 1.0',
        "amphora_request_seconds_count 2.0",
        'amphora_batch_size_bucket{le="1.0"} 2.0',
        "amphora_tokens_total 4.0",
        "amphora_padding_tokens_total 2.0",
        "amphora_queue_requests 0.0",
        "amphora_workers 1.0",
        "amphora_worker_restarts_total 0.0",
    }
    # A worker tells what it has counted after its answers.
    until(
        lambda: expected <= set(server.http.get("/metrics").text.splitlines()),
        30,
        lambda: expected - set(server.http.get("/metrics").text.splitlines()),
    )


def front_answer(base: Path, path: str, **environ: str) -> httpx.Response:
    """GET a path of a front without its workers, in this process."""
    read = settings.read(base, environ, devices.detect({}))

    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(Front(read, environ).application())
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            return await client.get(path)

    return asyncio.run(get())


def test_batch_transform_is_told_its_parameters(tmp_path: Path) -> None:
    environ = {"SAGEMAKER_MODEL_SERVER_WORKERS": "2", "SAGEMAKER_MAX_PAYLOAD_IN_MB": "25"}
    answer = front_answer(tmp_path, "/execution-parameters", SAGEMAKER_BATCH="true", **environ)
    assert answer.json() == {
        "MaxConcurrentTransforms": 4, "BatchStrategy": "SINGLE_RECORD", "MaxPayloadInMB": 25,
    }  # fmt: skip


def duplex(
    server: Running, path: str = "/invocations-bidirectional-stream", **headers: str
) -> ClientConnection:
    return connect(f"ws://127.0.0.1:{server.port}{path}", additional_headers=headers)


def test_each_websocket_message_is_an_invocation(shared: Start) -> None:
    server = shared().ready()
    with duplex(server) as socket:
        for number in range(3):
            socket.send(json.dumps(number))
            assert json.loads(socket.recv()) == {"echo": number, "answer": 42}
        socket.send("{")
        assert json.loads(socket.recv())["error"]["code"] == "bad_request"
        socket.send(b'"bytes"')
        assert json.loads(socket.recv())["echo"] == "bytes"


def test_a_websocket_gets_a_stream_chunk_by_chunk(shared: Start) -> None:
    server = shared(STREAM).ready()
    with duplex(server) as socket:
        socket.send('{"words": 3}')
        assert [socket.recv() for _ in range(3)] == ["word0 ", "word1 ", "word2 "]


def test_a_websocket_may_have_the_path_of_a_clients_route(shared: Start) -> None:
    """SageMaker's ModelInvocationPath names it."""
    routes = """
import json
def model_fn(model_dir):
    return None
def describe_fn(model_dir, model):
    return {"routes": ["/v1/embeddings"]}
def transform_fn(model, body, content_type, accept, context):
    return json.dumps({"path": context.path, "body": json.loads(body)}), "application/json"
"""
    server = shared(routes).ready()
    for path in ("/v1/embeddings", "/openai/v1/embeddings"):
        with duplex(server, path) as socket:
            socket.send('{"input": "a"}')
            message = json.loads(socket.recv())
            assert message == {"path": "/v1/embeddings", "body": {"input": "a"}}
    with duplex(server, "/v1/completions") as socket:
        socket.send("{}")
        assert "does not answer /v1/completions" in json.loads(socket.recv())["error"]["message"]
    with pytest.raises(InvalidStatus, match="403"):
        duplex(server, "/elsewhere")


@pytest.mark.parametrize("request_line", ["POST /invocations", "GET /ping", "PUT * "])
def test_an_upgrade_that_is_no_handshake_is_answered(shared: Start, request_line: str) -> None:
    server = shared().ready()
    head = f"{request_line.strip()} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\n"
    for rest in (
        "Connection: Upgrade\r\nContent-Length: 2\r\n\r\n{}",
        "Connection: upgrade\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=240) as sock:
            sock.sendall((head + rest).encode())
            answer = sock.recv(65536).decode()
        assert re.match(r"HTTP/1\.1 4\d\d ", answer), answer
    assert server.http.get("/ping").status_code == 200


def test_the_server_stops_with_an_open_websocket(start: Start) -> None:
    server = start().ready()
    with duplex(server) as socket:
        socket.send("1")
        socket.recv()
        # It is not waited for as long as a request would be, which is 24 s.
        assert server.stop(timeout=20) == 0


def test_the_log_says_what_is_served_and_where_in_lines_of_one_form(start: Start) -> None:
    server = start(ECHO).ready()
    until(lambda: f"ready at http://localhost:{server.port}\n" in server.log, 5, lambda: server.log)
    assert re.search(r"amphora \d\S* serves /\S+/model on 127\.0\.0\.1, port", server.log)
    assert re.search(r"/code/inference\.py defines model_fn, .*predict_fn", server.log)
    lines = [line for line in server.log.splitlines() if not line.startswith("{")]
    form = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+ (amphora|recipe)\S* [A-Z]+ ")
    assert not [line for line in lines if not form.match(line)]


def test_the_page_that_is_off_says_how_to_show_it(tmp_path: Path) -> None:
    """test_hosting.py has the variables that decide."""
    refused = front_answer(tmp_path, "/", SAGEMAKER_REGION="eu-west-1")
    assert refused.status_code == 405, "it is there for POST alone"
    message = refused.json()["error"]["message"]
    assert message == "The page is off here. Set AMPHORA_UI=1 to show it."


def opened(sessions: Sessions, workers: list[int]) -> Session:
    session = sessions.find("NEW_SESSION", workers)
    assert session is not None
    return session


def test_new_sessions_spread_and_are_bounded() -> None:
    sessions = Sessions(600, most=4)
    made = [opened(sessions, [1, 2]) for _ in range(4)]
    assert sorted(session.worker for session in made) == [1, 1, 2, 2]
    with pytest.raises(Fault, match="4 sessions are open") as refused:
        opened(sessions, [1, 2])
    assert refused.value.status == 503
    sessions.lose(1)
    assert len(sessions) == 2
    for session in made:
        if session.worker == 2:
            assert sessions.find(session.id, [2]) is session
    assert [opened(sessions, [2, 3]).worker for _ in range(2)] == [3, 3]


def test_sessions_end_in_the_order_of_their_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    sessions = Sessions(10, most=100)
    first, second = opened(sessions, [1]), opened(sessions, [1])
    now += 5
    sessions.find(first.id, [1])
    now += 6
    assert sessions.expired() == [second]
    assert len(sessions) == 1
    with pytest.raises(SessionGone):
        sessions.find(second.id, [1])
    now += 10
    assert sessions.expired() == [first]
