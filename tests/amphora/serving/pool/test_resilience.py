"""Overload, deadlines, hanging and dying workers, clients that go away."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.support.servers import ECHO, Start, children

WORK = (
    ECHO
    + """
    import os, time

    def predict_fn(data, model):
        if isinstance(data, dict) and "sleep" in data:
            time.sleep(data["sleep"])
        if data == "count":
            return [open(os.environ["SEEN"]).read()]
        if "SEEN" in os.environ:
            open(os.environ["SEEN"], "a").write(f"{data} ")
        return [data, os.getpid()]
"""
)


def test_beyond_the_queues_bound_503_soon_with_retry_after(start: Start) -> None:
    server = start(WORK, AMPHORA_QUEUE_LIMIT="2").ready()
    with ThreadPoolExecutor(6) as threads:
        began = time.monotonic()
        timed = list(
            threads.map(
                lambda _: (server.invoke({"sleep": 0.4}), time.monotonic() - began), range(6)
            )
        )
    refused = [(answer, seconds) for answer, seconds in timed if answer.status_code == 503]
    assert len(refused) == 3
    for answer, seconds in refused:
        assert answer.json()["error"]["code"] == "overloaded"
        assert answer.headers["retry-after"] == "1"
        # Not at once: clients that ask again at once would keep the server busy with refusals.
        assert 0.1 <= seconds < 0.4
    assert [answer.status_code for answer, _ in timed].count(200) == 3


def test_a_deadline_that_passes_in_the_queue_costs_no_work(start: Start, tmp_path: object) -> None:
    seen = f"{tmp_path}/seen"
    server = start(WORK, SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS="0.5", SEEN=seen).ready()
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(server.invoke, {"sleep": 0.45})
        time.sleep(0.1)
        second = threads.submit(server.invoke, {"sleep": 0.4})
        time.sleep(0.1)
        third = threads.submit(server.invoke, "never")
        assert first.result().status_code == 200
        for late in (second.result(), third.result()):
            assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
    time.sleep(0.5)
    assert "never" not in server.invoke("count").json()[0]


def test_a_worker_that_hangs_is_replaced(start: Start) -> None:
    server = start(WORK, SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS="0.5").ready()
    before = server.invoke("x").json()[1]
    assert server.invoke({"sleep": 30}).status_code == 504
    time.sleep(0.3)
    after = server.invoke("x")
    assert after.status_code == 200
    assert after.json()[1] != before
    assert "has not answered for 0.5 s" in server.log


def test_all_workers_killed_are_back_within_seconds_and_ping_tells(start: Start) -> None:
    server = start(WORK, SAGEMAKER_MODEL_SERVER_WORKERS="2").ready()
    killed = server.wait_for_workers(2)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    assert server.invoke("x").status_code == 200
    assert time.monotonic() - began < 5
    assert not set(server.workers()) & set(killed)
    assert server.ping() == 200


def test_the_whole_tree_below_the_front_killed_comes_back(start: Start) -> None:
    server = start(WORK).ready()
    (parent,) = children(server.process.pid)
    for pid in (parent, *server.workers()):
        os.kill(pid, signal.SIGKILL)
    while server.ping() != 503:
        pass
    server.ready()
    assert server.invoke("x").status_code == 200


def test_impure_handlers_are_not_repeated_when_their_worker_dies(start: Start) -> None:
    server = start(WORK.replace("return [data, os.getpid()]", "os._exit(9)")).ready()
    answer = server.invoke("x")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "worker_died")


def test_ping_answers_within_100_ms_under_full_load(start: Start) -> None:
    code = ECHO.replace('return {"echo"', 'sum(range(3_000_000)); return {"echo"')
    server = start(code, SAGEMAKER_MODEL_SERVER_WORKERS="2").ready()
    stop = threading.Event()

    def hammer() -> None:
        with httpx.Client(base_url=server.http.base_url, timeout=30) as client:
            while not stop.is_set():
                client.post(
                    "/invocations", content="1", headers={"content-type": "application/json"}
                )

    threads = [threading.Thread(target=hammer) for _ in range(8)]
    for thread in threads:
        thread.start()
    took = []
    for _ in range(30):
        began = time.perf_counter()
        assert server.ping() == 200
        took.append(time.perf_counter() - began)
        time.sleep(0.02)
    stop.set()
    for thread in threads:
        thread.join()
    assert sorted(took)[-2] < 0.1, took


def test_a_client_that_goes_away_leaves_no_work(start: Start, tmp_path: object) -> None:
    seen = f"{tmp_path}/seen"
    server = start(WORK, SEEN=seen).ready()
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(server.invoke, {"sleep": 0.5})
        time.sleep(0.1)
        with socket.create_connection(("127.0.0.1", server.port)) as gone:
            gone.sendall(
                b"POST /invocations HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b'content-length: 6\r\n\r\n"gone"'
            )
            time.sleep(0.1)
        assert first.result().status_code == 200
    assert "gone" not in server.invoke("count").json()[0]


def test_a_client_that_goes_while_it_sends_leaves_a_line_and_no_traceback(start: Start) -> None:
    server = start(WORK).ready()
    with socket.create_connection(("127.0.0.1", server.port)) as gone:
        gone.sendall(b"POST /invocations HTTP/1.1\r\nhost: x\r\ncontent-length: 60\r\n\r\n[")
        time.sleep(0.2)
    while '"status": 499' not in server.log:
        time.sleep(0.02)
    assert server.invoke("x").status_code == 200
    assert "Traceback" not in server.log


def test_workers_end_when_the_front_is_killed(start: Start) -> None:
    server = start(WORK, SAGEMAKER_MODEL_SERVER_WORKERS="2").ready()
    workers = server.wait_for_workers(2)
    server.process.kill()
    server.process.wait()
    end = time.monotonic() + 5
    while any(map(_runs, workers)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [pid for pid in workers if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_workers_of_code_that_imports_arrow_share_the_model(start: Start) -> None:
    code = ECHO + "\n    import pyarrow\n"
    server = start(code, SAGEMAKER_MODEL_SERVER_WORKERS="2").ready()
    assert server.invoke("a").json() == {"echo": "a", "answer": 42}
    assert "each worker loads the model itself" not in server.log
    assert len(children(server.process.pid)) == 1
