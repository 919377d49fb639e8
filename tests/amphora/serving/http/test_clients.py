"""Real clients: boto3's sagemaker-runtime and curl."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError, EventStreamError

from tests.support.servers import COUNTING, NAMED, STREAM, Running, Start, write_model

Runtime = Callable[[Running], Any]


@pytest.fixture
def runtime() -> Iterator[Callable[[Running], Any]]:
    """runtime(server): a client, closed in the end."""
    clients = []

    def _runtime(server: Running) -> Any:
        clients.append(
            boto3.client(
                "sagemaker-runtime",
                endpoint_url=f"http://127.0.0.1:{server.port}",
                region_name="eu-west-1",
                aws_access_key_id="none",
                aws_secret_access_key="none",
                config=Config(retries={"max_attempts": 0}),
            )
        )
        return clients[-1]

    yield _runtime
    for client in clients:
        client.close()


def ask(client: Any, body: object, **more: str) -> Any:
    return client.invoke_endpoint(
        EndpointName="local", Body=json.dumps(body), ContentType="application/json", **more
    )


def test_boto3_invokes(runtime: Runtime, shared: Start) -> None:
    answer = ask(runtime(shared().ready()), "hello", CustomAttributes="a=b", InferenceId="7")
    assert json.loads(answer["Body"].read())["echo"] == "hello"
    assert answer["ContentType"] == "application/json"
    assert answer["CustomAttributes"] == "a=b"


def test_boto3_sees_a_model_error_with_its_status(runtime: Runtime, shared: Start) -> None:
    client = runtime(shared().ready())
    with pytest.raises(ClientError) as caught:
        client.invoke_endpoint(EndpointName="x", Body=b"{", ContentType="application/json")
    error = caught.value.response
    assert error["Error"]["Code"] == "ModelError"
    assert error["OriginalStatusCode"] == 400  # type: ignore[typeddict-item]
    original = json.loads(error["OriginalMessage"])  # type: ignore[typeddict-item]
    assert original["error"]["code"] == "bad_request"


def test_boto3_keeps_a_session(runtime: Runtime, start: Start) -> None:
    client = runtime(start(COUNTING).ready())
    identifier = ask(client, "go", SessionId="NEW_SESSION")["NewSessionId"].split(";")[0]
    assert json.loads(ask(client, "go", SessionId=identifier)["Body"].read())[0] == 2
    assert ask(client, "close", SessionId=identifier)["ClosedSessionId"] == identifier


def test_boto3_reads_a_response_stream(runtime: Runtime, start: Start) -> None:
    client = runtime(start(STREAM).ready())

    def parts(order: dict[str, int]) -> list[bytes]:
        answer = client.invoke_endpoint_with_response_stream(
            EndpointName="x", Body=json.dumps(order), ContentType="application/json"
        )
        assert answer["ContentType"] == "text/event-stream"
        with contextlib.closing(answer["Body"]):
            return [part["PayloadPart"]["Bytes"] for part in answer["Body"]]

    assert parts({"words": 3}) == [b"word0 ", b"word1 ", b"word2 "]
    with pytest.raises(EventStreamError, match="broken in the middle"):
        parts({"words": 3, "break": 2})


def test_boto3_names_the_target_model(runtime: Runtime, start: Start, tmp_path: Path) -> None:
    server = start(SAGEMAKER_MULTI_MODEL="true").ready()
    url = write_model(tmp_path / "models" / "mine", NAMED)
    server.http.post("/models", json={"model_name": "mine.tar.gz", "url": url})
    answer = ask(runtime(server), 3, TargetModel="mine.tar.gz")
    assert json.loads(answer["Body"].read()) == ["mine", 3]


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl is installed")
def test_curl_asks(shared: Start) -> None:
    server = shared().ready()
    said = subprocess.run(
        ["curl", "-sS", "-d", '{"inputs": "x"}', "-H", "content-type: application/json",
         f"http://127.0.0.1:{server.port}/invocations"],
        capture_output=True, check=True, timeout=30,
    )  # fmt: skip
    assert json.loads(said.stdout)["echo"] == {"inputs": "x"}
