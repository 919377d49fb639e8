"""The hosting contract: ping, invocations, statuses, error bodies, chunks, clients' routes, metrics, the log, the end."""

import asyncio
import http.client
import json
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from amphora.common import devices
from amphora.serving import settings
from amphora.serving.http.server import Front
from tests.support.paths import ROOT
from tests.support.servers import ECHO, MERGING, SERVE, Start, fault, write_code
from tests.support.until import until
from tests.support.worker_front import load_runner


def error_of(response: httpx.Response) -> dict[str, str]:
    error: dict[str, str] = response.json()["error"]
    assert error["request_id"] == response.headers["x-request-id"]
    assert set(error) == {"code", "message", "request_id"}
    return error


def test_ping_says_503_until_the_model_is_loaded_then_200_with_an_empty_body(
    start: Start, tmp_path: Path
) -> None:
    # Loaded when the test says so.
    slow_load = ECHO.replace(
        'return {"answer": 42}',
        """import os, time
        while not os.path.exists(os.environ["LOADED"]):
            time.sleep(0.01)
        return {"answer": 42}""",
    )
    server = start(slow_load, LOADED=str(tmp_path / "loaded"))
    assert until(server.ping) == 503
    early = server.invoke([1])
    assert (early.status_code, error_of(early)["code"]) == (503, "not_ready")
    assert early.headers["retry-after"] == "1"
    (tmp_path / "loaded").touch()
    until(lambda: server.ping() == 200)
    answer = server.http.post("/ping")
    assert (answer.status_code, answer.content) == (200, b"")
    assert "Serving" not in server.log
    reported = "batches of up to 32 requests, time-out 60 s, queue limit 512"
    assert server.log.count(reported) == 1, server.log


def test_each_fault_has_its_status_and_code(shared: Start) -> None:
    user_code = """
    import json

    def model_fn(model_dir):
        return {"answer": 42}

    def input_fn(body: bytes, content_type):
        if content_type == "text/xml":
            error = ValueError(f"{content_type} is not application/json")
            error.status_code = 415
            raise error
        return json.loads(body.decode())

    def predict_fn(data, model):
        if data == "fail":
            raise KeyError("lost key")
        return {"echo": data, **model}

    def output_fn(prediction, accept):
        if accept == "text/csv":
            return accept, "text/plain"
        if accept != "application/json":
            class NotAcceptable(ValueError):
                status_code = 406
            raise NotAcceptable(f"no {accept} here")
        return prediction
    """
    server = shared(
        user_code, SAGEMAKER_MAX_PAYLOAD_IN_MB="1", SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT="text/csv"
    ).ready()

    def endless() -> Iterator[bytes]:
        yield from (b"0" * 100_000 for _ in range(30))

    def fault(body: Any, kind: str = "application/json", accept: str = "*/*") -> tuple[int, str]:
        headers = {"content-type": kind, "accept": accept}
        answer = server.http.post("/invocations", content=body, headers=headers)
        return answer.status_code, error_of(answer)["code"]

    for body in (b"{", b"[" * 1040, b"\xff"):
        assert fault(body) == (400, "bad_request")
    assert "input_fn" in error_of(server.http.post("/invocations", content=b"{"))["message"]
    assert fault(b"<a/>", "text/xml") == (415, "unsupported_content_type")
    assert fault(b"0" * (1 << 20) + b"0") == (413, "payload_too_large")
    # Without a content-length.
    assert fault(endless()) == (413, "payload_too_large")
    assert fault(b"1", accept="image/png") == (406, "not_acceptable")
    assert fault(b"NaN", accept="application/json")[0] == 500  # it is no JSON
    assert error_of(server.http.get("/invocations"))["code"] == "method_not_allowed"
    assert error_of(server.http.get("/nowhere"))["code"] == "not_found"
    # A body annotated with bytes, an answer that is written as JSON, and a client without a wish.
    answer = server.invoke({"a": "ü"}, accept="application/json")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"echo": {"a": "ü"}, "answer": 42}
    assert server.invoke(1, accept="*/*").text == "text/csv"
    assert server.http.post("/invocations/", json=1, headers={"accept": "*/*"}).text == "text/csv"

    failed = server.invoke("fail")
    error = error_of(failed)
    assert (failed.status_code, error["code"]) == (500, "handler_failed")
    assert error["message"] == "predict_fn: failed: KeyError: 'lost key'"
    # Its traceback is in the log only.
    assert "Traceback" not in failed.text
    assert "Traceback" in server.log and error["request_id"] in server.log


def test_handlers_run_in_the_models_folder_as_with_the_servers_of_aws(start: Start) -> None:
    """An optional file that is not found would change the answers in silence."""
    code = """
    import os

    LIMIT = 1
    if os.path.exists("code/limit.txt"):
        LIMIT = int(open("code/limit.txt").read())

    def model_fn(model_dir):
        return [LIMIT, os.path.samefile(os.getcwd(), model_dir)]

    def predict_fn(data, model, ctx=None):
        return [*model, ctx.get_request_id() is not None]
    """
    server = start(code, files={"limit.txt": "7"}).ready()
    assert server.invoke({}).json() == [7, True, True]


def test_transform_fn_with_context_answers_alone(start: Start) -> None:
    """Text in its type's charset, a status without a body, and a call of sys.exit, too."""
    code = """
    import sys
    ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"

    def model_fn(model_dir, context=None):
        return context.system_properties["model_dir"]

    def transform_fn(model, body, content_type, accept, context):
        if body == "3":
            sys.exit(3)
        if body == "204":
            context.set_response_status(204)
        if body in ("half", "1"):
            return "\\ud800" if body == "half" else "é", "text/plain; charset=iso-8859-1"
        name, attributes = model.rsplit("/", 1)[1], context.headers.get(ATTRIBUTES)
        return f"{name}|{body}|{content_type}|{accept}|{attributes}", "text/plain"
    """
    server = start(code).ready()
    headers = {"accept": "text/plain", "X-Amzn-SageMaker-Custom-Attributes": "a=1"}
    kind = {"content-type": "text/csv; charset=utf-8"}
    answer = server.http.post("/invocations", content="é".encode(), headers=headers | kind)
    assert answer.text == "model|é|text/csv; charset=utf-8|text/plain|a=1"
    assert answer.headers["content-type"] == "text/plain"
    assert server.invoke(1).content == "é".encode("iso-8859-1")
    assert [server.invoke(204).status_code, server.invoke(204).content] == [204, b""]
    ended = server.invoke(3)
    assert error_of(ended)["message"] == "transform_fn: failed: SystemExit: 3"
    half = server.http.post("/invocations", content="half", headers={"content-type": "text/csv"})
    assert error_of(half)["message"].startswith("transform_fn: failed: TypeError: a str cannot")
    server.stop()
    assert "failed in the server" not in server.log and "has ended with" not in server.log


def test_sigterm_answers_everything_that_has_arrived_and_exits_0(start: Start) -> None:
    code = ECHO.replace('return {"echo"', 'import time; time.sleep(0.03); return {"echo"')
    server = start(code).ready()
    clients = [http.client.HTTPConnection("127.0.0.1", server.port) for _ in range(64)]
    for client in clients:
        client.request("POST", "/invocations", "1", {"content-type": "application/json"})
    assert server.stop() == 0
    answers = [client.getresponse() for client in clients]
    assert [answer.status for answer in answers] == [200] * 64
    assert all(json.loads(answer.read())["answer"] == 42 for answer in answers)
    for client in clients:
        client.close()


def test_a_request_that_is_on_its_way_at_sigterm_is_answered(start: Start) -> None:
    program = (
        "from amphora.cli import main; from amphora.serving.http import server;"
        " server._LINGER_SECONDS = 1; raise SystemExit(main())"
    )
    server = start(command=(sys.executable, "-c", program, "serve")).ready()
    client = http.client.HTTPConnection("127.0.0.1", server.port)
    client.connect()
    server.process.send_signal(signal.SIGTERM)
    until(lambda: not server.listens())
    client.request("POST", "/invocations", "1", {"content-type": "application/json"})
    answer = client.getresponse()
    assert (answer.status, answer.getheader("connection")) == (200, "close")
    client.close()
    assert server.process.wait(240) == 0


def test_sigterm_while_loading_exits_0_at_once(start: Start) -> None:
    server = start(ECHO.replace('return {"answer": 42}', "import time; time.sleep(600)"))
    until(server.ping)
    assert server.stop(timeout=20) == 0


def test_a_port_in_use_is_named(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        server = start(SAGEMAKER_BIND_TO_PORT=port)
        assert server.process.wait(240) == 2
    assert f"Port {port} cannot be used" in server.log
    assert "SAGEMAKER_BIND_TO_PORT" in server.log


def test_a_secret_that_the_handlers_print_is_masked(start: Start) -> None:
    code = ECHO.replace(
        "def model_fn(model_dir):", "def model_fn(model_dir):\n        import os, sys"
    )
    code = code.replace(
        "import os, sys",
        "import os, sys; print('printed', os.environ['MY_TOKEN'], file=sys.stderr);"
        " sys.stdout.writelines([str(os.environ)])",
    )
    server = start(code, MY_TOKEN="planted-and-printed").ready()
    assert "printed ******" in server.log
    assert "planted-and-printed" not in server.log


def test_the_front_opens_as_many_files_as_it_may(start: Start) -> None:
    command = ("sh", "-c", 'ulimit -S -n 300; exec "$@"', "sh", *SERVE)
    server = start(command=command).ready()
    assert server.invoke(0).is_success
    limits = Path(f"/proc/{server.process.pid}/limits").read_text()
    assert int(limits.partition("Max open files")[2].split()[0]) > 300


def test_outside_a_container_only_this_machine_is_let_in(start: Start, tmp_path: Path) -> None:
    server = start().ready()
    other = socket.gethostbyname(socket.gethostname())
    for address in {other, "127.0.0.2"} - {"127.0.0.1"}:
        with pytest.raises(OSError), socket.create_connection((address, server.port), timeout=5):
            pass
    server.stop()
    everywhere = start(AMPHORA_BIND="0.0.0.0").ready()
    with socket.create_connection(("127.0.0.2", everywhere.port), timeout=5):
        pass
    for path in ROOT.glob("Dockerfile.*"):
        assert "AMPHORA_BIND=0.0.0.0" in path.read_text()


ROUTED = (
    ECHO
    + """
    def describe_fn(model_dir, model):
        return {"task": "echo", "model": "mine", "routes": ["/v1/completions"], **model}

    def predict_fn(data, model, context):
        if data == "refused":
            error = ValueError("as asked")
            error.status_code, error.code = 422, "context_length_exceeded"
            error.param = "prompt"
            raise error
        return {"echo": data, "path": context.path}
"""
)


def test_only_the_described_routes_are_answered_in_the_form_of_their_api(shared: Start) -> None:
    server = shared(ROUTED).ready()
    answer = server.http.post("/v1/completions", json={"prompt": "x"})
    assert answer.json() == {"echo": {"prompt": "x"}, "path": "/v1/completions"}
    assert server.http.post("/", json="x").json() == {"echo": "x", "path": "/"}
    assert server.invoke("x").json()["path"] == "/invocations"
    absent = server.http.post("/v1/embeddings", json={"input": "x"})
    assert absent.status_code == 404
    error = absent.json()["error"]
    assert (error["type"], error["param"]) == ("not_found_error", None)
    assert "Routes: /invocations, /v1/completions" in error["message"]
    unknown = server.http.post("/v1/complete", json={}).json()["error"]["message"]
    assert "Routes: /ping, /invocations, /v1/completions" in unknown
    assert "/v1/embeddings" not in unknown
    assert server.http.get("/health").status_code == 200
    assert server.http.post("/embed", json={"inputs": "x"}).json()["error_type"] == "Validation"
    (model,) = server.http.get("/v1/models").json()["data"]
    assert model["id"] == "mine"
    assert server.http.get("/v1/models/mine").json() == model
    assert server.http.get("/v1/models/other").status_code == 404
    info = server.http.get("/info").json()
    assert (info["model_id"], info["task"], info["answer"]) == ("mine", "echo", 42)
    answer = server.http.post("/v1/completions", json="refused")
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
    assert (error["param"], error["message"]) == ("prompt", "as asked")
    assert server.invoke("refused").json()["error"].keys() == {"code", "message", "request_id"}


def test_sagemakers_openai_path_and_the_custom_attribute_name_the_route(shared: Start) -> None:
    server = shared(ROUTED).ready()
    answer = server.http.post("/openai/v1/completions", json={"model": "", "prompt": "x"})
    assert answer.json()["path"] == "/v1/completions"
    assert server.http.get("/openai/v1/models").json() == server.http.get("/v1/models").json()
    named = {"X-Amzn-SageMaker-Custom-Attributes": "trace=1, route=/v1/completions"}
    answer = server.http.post("/invocations", json="x", headers=named)
    assert answer.json() == {"echo": "x", "path": "/v1/completions"}
    refused = server.http.post("/invocations", json="refused", headers=named).json()["error"]
    assert refused["type"] == "invalid_request_error"
    absent = {"X-Amzn-SageMaker-Custom-Attributes": "route=/v1/embeddings"}
    answer = server.http.post("/invocations", json="x", headers=absent)
    assert fault(answer) == (404, "not_found")
    assert "Routes: /invocations, /v1/completions" in answer.text
    # What an attribute means to a user's own handlers is theirs to say.
    local = shared().ready()
    assert local.http.post("/invocations", json="x", headers=absent).status_code == 200
    answer = local.http.post("/v1/chat/completions", json={"messages": []})
    assert answer.status_code == 404
    assert "does not answer /v1/chat/completions. Routes: /invocations." in answer.text


@pytest.mark.parametrize("value", ["'text'", "{'tensor': object()}"])
def test_a_description_that_json_does_not_hold_is_refused_at_start(
    tmp_path: Path, value: str
) -> None:
    code = ECHO + f"\n    def describe_fn(model_dir, model):\n        return {value}\n"
    with pytest.raises(TypeError, match=r"describe_fn|JSON serializable"):
        load_runner(write_code(tmp_path, {"code/inference.py": code}))


def test_a_session_is_ignored_custom_attributes_are_echoed_and_the_inference_id_is_logged(
    shared: Start,
) -> None:
    server = shared().ready()
    session = server.invoke("x", **{"X-Amzn-SageMaker-Session-Id": "NEW_SESSION"})
    assert session.status_code == 200
    headers = {
        "X-Amzn-SageMaker-Custom-Attributes": "trace=1", "X-Amzn-SageMaker-Inference-Id": "mine-7",
    }  # fmt: skip
    answer = server.invoke("secret body", **headers)
    assert answer.headers["X-Amzn-SageMaker-Custom-Attributes"] == "trace=1"
    refused = server.http.post("/invocations", content=b"{", headers=headers)
    assert refused.status_code == 400
    assert refused.headers["X-Amzn-SageMaker-Custom-Attributes"] == "trace=1"
    (row, _) = until(lambda: [row for row in server.log.splitlines() if '"mine-7"' in row])
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


def test_the_log_says_what_is_served_and_where_in_lines_of_one_form(start: Start) -> None:
    server = start(ECHO).ready()
    until(lambda: f"ready at http://localhost:{server.port}\n" in server.log, 5, lambda: server.log)
    assert re.search(r"amphora \d\S* serves /\S+/model on 127\.0\.0\.1, port", server.log)
    assert re.search(r"/code/inference\.py defines model_fn, .*predict_fn", server.log)
    lines = [line for line in server.log.splitlines() if not line.startswith("{")]
    form = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+ (amphora|recipe)\S* [A-Z]+ ")
    assert not [line for line in lines if not form.match(line)]


STREAM = (
    ECHO
    + """
    import os, time

    def predict_fn(data, model):
        def words():
            for number in range(data["words"]):
                if number == data.get("break"):
                    raise RuntimeError("broken in the middle")
                yield f"word{number} "
                time.sleep(data.get("pause", 0))
                while "after" in data and not os.path.exists(f"{data['after']}{number}"):
                    time.sleep(0.01)
        return words()

    def output_fn(prediction, accept):
        return prediction, "text/event-stream"
"""
)


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


def test_a_stream_that_fails_or_is_left_ends_alone(shared: Start) -> None:
    server = shared(STREAM).ready()
    answer = server.invoke({"words": 3, "break": 0})
    assert fault(answer) == (500, "handler_failed")
    with (
        pytest.raises(httpx.RemoteProtocolError),
        server.http.stream("POST", "/invocations", json={"words": 3, "break": 2}) as answer,
    ):
        assert answer.status_code == 200
        answer.read()
    assert "broken in the middle" in server.log
    assert server.invoke({"words": 1}).text == "word0 "
    with server.http.stream("POST", "/invocations", json={"words": 1000, "pause": 0.1}) as answer:
        next(answer.iter_raw())
    until(lambda: '"status": 499' in server.log)
    # Long before the stream would have ended, and within its client's 60 s.
    assert server.invoke({"words": 1}).text == "word0 "
    answer = server.invoke({"words": 0})
    assert (answer.status_code, answer.content) == (200, b"")


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


def test_a_worker_that_hangs_in_a_stream_is_replaced(start: Start, tmp_path: Path) -> None:
    server = start(STREAM, SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS="1").ready()
    order = {"words": 2, "after": f"{tmp_path}/never"}
    with pytest.raises(httpx.RemoteProtocolError):
        server.invoke(order)
    assert "has not answered for 1 s; it is replaced." in server.log
    until(lambda: server.ping() == 200)
    assert server.invoke({"words": 1}).text == "word0 "


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
