"""Attributes, metrics, the access log, batch transform, upgrades."""

import asyncio
import json
import re
import socket
from pathlib import Path

import httpx
import pytest

from amphora.common import devices
from amphora.serving import settings
from amphora.serving.http.server import Front
from tests.support.servers import ECHO, MERGING, Start, fault
from tests.support.until import until


def test_a_session_is_refused(shared: Start) -> None:
    refused = shared().ready().invoke("x", **{"X-Amzn-SageMaker-Session-Id": "NEW_SESSION"})
    assert fault(refused) == (400, "no_sessions")


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


def test_batch_transform_is_told_its_parameters(tmp_path: Path) -> None:
    def front_answer(base: Path, path: str, **environ: str) -> httpx.Response:
        """GET a path of a front without its workers, in this process."""
        read = settings.read(base, environ, devices.detect({}))

        async def get() -> httpx.Response:
            transport = httpx.ASGITransport(Front(read, environ).application())
            async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
                return await client.get(path)

        return asyncio.run(get())

    environ = {"SAGEMAKER_MODEL_SERVER_WORKERS": "2", "SAGEMAKER_MAX_PAYLOAD_IN_MB": "25"}
    answer = front_answer(tmp_path, "/execution-parameters", SAGEMAKER_BATCH="true", **environ)
    assert answer.json() == {
        "MaxConcurrentTransforms": 4, "BatchStrategy": "SINGLE_RECORD", "MaxPayloadInMB": 25,
    }  # fmt: skip


@pytest.mark.parametrize("request_line", ["POST /invocations", "GET /invocations", "PUT * "])
def test_a_request_to_upgrade_is_answered_as_any_other(shared: Start, request_line: str) -> None:
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


def test_the_log_says_what_is_served_and_where_in_lines_of_one_form(start: Start) -> None:
    server = start(ECHO).ready()
    until(lambda: f"ready at http://localhost:{server.port}\n" in server.log, 5, lambda: server.log)
    assert re.search(r"amphora \d\S* serves /\S+/model on 127\.0\.0\.1, port", server.log)
    assert re.search(r"/code/inference\.py defines model_fn, .*predict_fn", server.log)
    lines = [line for line in server.log.splitlines() if not line.startswith("{")]
    form = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+ (amphora|recipe)\S* [A-Z]+ ")
    assert not [line for line in lines if not form.match(line)]
