"""The hosting contract's plain part: ping, invocations, statuses, error bodies, the end."""

import http.client
import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.servers import ECHO, SERVE, Running, Start, write_code
from tests.support.until import until


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
    server = start(limits={"linger": 1}).ready()
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


def test_the_front_opens_as_many_files_as_it_may(tmp_path: Path) -> None:
    write_code(tmp_path, ECHO, "inference.py", None)
    command = ("sh", "-c", 'ulimit -S -n 300; exec "$@"', "sh", *SERVE)
    with Running(tmp_path, {}, command) as server:
        assert server.ready().invoke(0).is_success
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


def test_the_images_listen_on_every_interface() -> None:
    root = Path(__file__).parents[4]
    for name in ("Dockerfile.gpu", "Dockerfile.neuron"):
        assert "AMPHORA_BIND=0.0.0.0" in (root / name).read_text()
