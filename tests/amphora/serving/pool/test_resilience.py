"""Overload, deadlines, hanging and dying workers, clients that go away."""

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.servers import ECHO, Start, children, fault
from tests.support.until import until

WORK = (
    ECHO
    + """
    import os, time

    def predict_fn(data, model):
        if isinstance(data, dict) and "gate" in data:
            # The test opens it when all else is as it should be.
            open(data["gate"] + ".began", "w").close()
            while not os.path.exists(data["gate"]):
                time.sleep(0.01)
        if data == "count":
            return [open(os.environ["SEEN"]).read()]
        if "SEEN" in os.environ:
            open(os.environ["SEEN"], "a").write(f"{data} ")
        return [data, os.getpid()]
"""
)


class Gate:
    """A request's work, which ends when the test says so."""

    def __init__(self, path: Path) -> None:
        self.order = {"gate": str(path)}
        self.open = path.touch
        self._began = path.with_name(f"{path.name}.began")

    def wait_until_at_work(self) -> None:
        until(self._began.exists, what="the request's work did not begin")


def test_beyond_the_queues_bound_503_soon_with_retry_after(start: Start, tmp_path: Path) -> None:
    server = start(WORK, AMPHORA_QUEUE_LIMIT="2").ready()
    gate = Gate(tmp_path / "gate")

    with ThreadPoolExecutor(6) as threads:
        requested = [threads.submit(server.invoke, gate.order)]
        gate.wait_until_at_work()
        requested += [threads.submit(server.invoke, gate.order) for _ in range(5)]
        try:
            # They are answered while all others wait.
            until(lambda: sum(entry.done() for entry in requested) == 3)
            refused = [entry.result() for entry in requested if entry.done()]
        finally:
            gate.open()
    for answer in refused:
        assert fault(answer) == (503, "overloaded")
        assert answer.headers["retry-after"] == "1"
    assert [entry.result().status_code for entry in requested].count(200) == 3


def test_a_deadline_that_passes_in_the_queue_costs_no_work(start: Start, tmp_path: Path) -> None:
    seen = f"{tmp_path}/seen"
    server = start(WORK, SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS="3", SEEN=seen).ready()
    one, two = Gate(tmp_path / "one"), Gate(tmp_path / "two")
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(server.invoke, one.order)
        one.wait_until_at_work()
        second = threads.submit(server.invoke, two.order)
        until(lambda: server.metric("amphora_queue_requests") == 1)
        third = threads.submit(server.invoke, "never")
        until(lambda: server.metric("amphora_queue_requests") == 2)
        one.open()
        assert first.result().status_code == 200
        # The second one is at work when its time is over, and the third one waits for it.
        for late in (second.result(), third.result()):
            assert fault(late) == (504, "deadline_exceeded")
    two.open()
    assert "never" not in server.invoke("count").json()[0]


@pytest.mark.parametrize(
    ("end", "status"), [("time.sleep(600)", 504), ("os._exit(9)", 500)], ids=["hangs", "dies"]
)
def test_a_request_that_ends_its_worker_is_not_tried_again(
    start: Start, tmp_path: Path, end: str, status: int
) -> None:
    """Though the handlers declare that predictions may be repeated."""
    code = f"""
        import json, os, time

        def model_fn(model_dir):
            return None

        def predict_batch_fn(inputs, model):
            if "end" in inputs:
                open({str(tmp_path / "seen")!r}, "a").write("x")
                {end}
            return [os.getpid() for _ in inputs]

        def input_fn(body, content_type):
            return json.loads(body)

        def output_fn(prediction, accept):
            return json.dumps(prediction)
    """
    server = start(code, SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS="1.5").ready()
    before = server.answer("x")
    ended = server.invoke("end")
    assert ended.status_code == status
    assert server.answer("x") != before
    assert (tmp_path / "seen").read_text() == "x"
    if status == 504:
        assert "has not answered for 1.5 s" in server.log
    else:
        assert fault(ended) == (500, "worker_died")


def test_all_workers_killed_are_back_within_seconds_and_ping_tells(start: Start) -> None:
    server = start(WORK, SAGEMAKER_MODEL_SERVER_WORKERS="2").ready()
    killed = server.wait_for_workers(2)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    assert server.invoke("x").status_code == 200
    assert not set(server.wait_for_workers(2)) & set(killed)
    assert server.metric("amphora_worker_restarts_total") == 2
    assert server.ping() == 200


def test_the_whole_tree_below_the_front_killed_comes_back(start: Start, tmp_path: Path) -> None:
    held = tmp_path / "held"
    code = WORK.replace(
        "def model_fn(model_dir):",
        f"def model_fn(model_dir):\n        while os.path.exists({str(held)!r}): time.sleep(0.01)",
    )
    server = start(code).ready()
    (worker,) = server.wait_for_workers(1)
    (parent,) = children(server.process.pid)
    held.touch()
    for pid in (parent, worker):
        os.kill(pid, signal.SIGKILL)
    until(lambda: server.ping() == 503)
    held.unlink()
    server.ready()
    assert server.invoke("x").status_code == 200


def test_a_client_that_goes_while_it_sends_leaves_a_line_and_no_traceback(shared: Start) -> None:
    server = shared().ready()
    with socket.create_connection(("127.0.0.1", server.port)) as gone:
        gone.sendall(b"POST /invocations HTTP/1.1\r\nhost: x\r\ncontent-length: 60\r\n\r\n[")
        time.sleep(0.2)
    until(lambda: '"status": 499' in server.log)
    assert server.invoke("x").status_code == 200
    assert "Traceback" not in server.log


def test_workers_end_when_the_front_is_killed(start: Start) -> None:
    def runs(pid: int) -> bool:
        try:
            return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False

    server = start(WORK, SAGEMAKER_MODEL_SERVER_WORKERS="2").ready()
    workers = server.wait_for_workers(2)
    server.process.kill()
    server.process.wait()
    until(lambda: not any(map(runs, workers)))


def test_workers_of_code_that_imports_arrow_share_the_model(start: Start) -> None:
    code = ECHO + "\n    import pyarrow\n"
    server = start(code, SAGEMAKER_MODEL_SERVER_WORKERS="2").ready()
    assert server.invoke("a").json() == {"echo": "a", "answer": 42}
    assert "each worker loads the model itself" not in server.log
    assert len(children(server.process.pid)) == 1
