"""Merging requests, overload, deadlines, hanging and dying workers, clients that go away."""

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amphora.serving.protocol.batching import BatchDelay, Size, plan
from tests.support.processes import children
from tests.support.servers import ECHO, MERGING, Running, Start, fault
from tests.support.until import until


def ask_together(server: Running, texts: list[str]) -> list[tuple[int, object]]:
    """All at once, in the order of `texts`, behind one that keeps the worker busy."""
    barrier = threading.Barrier(len(texts))

    def ask(text: str) -> tuple[int, object]:
        barrier.wait()
        answer = server.invoke(text)
        return answer.status_code, answer.json()

    with ThreadPoolExecutor(len(texts)) as threads:
        return list(threads.map(ask, texts))


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=12),
    st.integers(20, 200),
    st.sampled_from([0, 8, 1000]),
)
def test_a_plan_holds_every_request_once_within_the_bound(
    lengths: list[int], most: int, call: int
) -> None:
    groups = plan([Size.from_tokens([length]) for length in lengths], most, call)
    assert sorted(index for group in groups for index in group.members) == list(range(len(lengths)))
    for group in groups:
        inside = [lengths[index] for index in group.members]
        assert group.padded == max(inside) * len(inside)
        assert group.tokens == sum(inside)
        assert group.padded <= most or len(inside) == 1


def test_like_lengths_go_together_where_another_call_is_cheaper_than_padding() -> None:
    sizes = [Size.from_tokens([length]) for length in (10, 100, 12, 90)]
    assert [sorted(g.members) for g in plan(sizes, 10_000, call_tokens=24)] == [[0, 2], [1, 3]]
    assert len(plan(sizes, 10_000, call_tokens=4096)) == 1
    sizes = [Size.from_tokens(lengths, pads=False) for lengths in ([10, 3], [100], [12], [90])]
    (group,) = plan(sizes, 215, call_tokens=24)
    assert (group.tokens, group.padded) == (215, 215)
    assert all(group.padded <= 200 for group in plan(sizes, 200, call_tokens=24))
    assert len(plan(sizes, 200, call_tokens=24)) == 2


def test_delay_is_zero_when_idle_and_bounded_under_load() -> None:
    delay = BatchDelay(most=0.02)
    assert delay.wait(waiting=1, oldest=10.0, now=10.0) == 0
    for _ in range(10):
        delay.learn(size=16, seconds=0.1, now=11.0)
    assert delay.wait(waiting=1, oldest=11.0, now=11.0) == pytest.approx(0.015, rel=0.1)
    assert delay.wait(waiting=16, oldest=11.0, now=11.0) == 0
    assert delay.wait(waiting=1, oldest=11.0, now=11.02) == 0
    assert delay.wait(waiting=1, oldest=12.0, now=12.0) == 0, "after a pause nobody waits"


def test_requests_go_one_at_a_time_without_the_hook_and_within_the_batch_size(start: Start) -> None:
    server = start(MERGING, SAGEMAKER_TS_BATCH_SIZE="2").ready()
    answers = ask_together(server, ["a"] * 8)
    assert {size for _, (_, size, _, _) in answers} <= {1, 2}  # type: ignore[misc]
    code = MERGING.replace("def predict_batch_fn", "def _predict_batch").replace(
        "predict_batch_fn([text]", "_predict_batch([text]"
    )
    answers = ask_together(start(code).ready(), ["a"] * 6)
    assert {json.dumps(answer[:3]) for _, answer in answers} == {'["a", 1, 1]'}  # type: ignore[index]


@pytest.mark.parametrize(
    ("bad", "status"),
    [("poison", 500), ("bad item", 500), ("no output", 500), ("cannot be measured", 400), ("", 0)],
)
def test_merged_requests_get_their_own_answers_and_a_bad_one_harms_no_neighbour(
    shared: Start, bad: str, status: int
) -> None:
    server = shared(MERGING).ready()
    good = [f"{number}" * (1 + number % 7) for number in range(24)]
    texts = [bad if bad and number % 4 == 0 else text for number, text in enumerate(good)]
    answers = ask_together(server, texts)
    for text, (got, answer) in zip(texts, answers, strict=True):
        assert got == (status if text == bad else 200), answer
        assert text == bad or answer[0] == text  # type: ignore[index]
    if not bad:
        assert max(size for _, (_, size, _, _) in answers) >= 4  # type: ignore[misc]


def test_an_item_that_kills_its_worker_harms_no_neighbour(start: Start) -> None:
    server = start(MERGING, SAGEMAKER_MODEL_SERVER_WORKERS="2").ready()
    texts = ["crash" if number == 5 else f"good {number}" for number in range(16)]
    for text, (status, answer) in zip(texts, ask_together(server, texts), strict=True):
        if text == "crash":
            assert (status, answer["error"]["code"]) == (500, "worker_died")  # type: ignore[index,call-overload]
        else:
            assert status == 200, answer
    assert server.invoke("afterwards").status_code == 200
    assert "ended with exit code 3" in server.log


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
        assert answer.elapsed.total_seconds() >= 0.1  # for clients that try again at once
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


# Forks would share the position of a file, as they would share a connection and its answers.
@pytest.mark.parametrize(
    ("line", "processes"), [("import pyarrow", 1), ("FILE = open(__file__)", 2)]
)
def test_workers_share_a_model_that_keeps_no_thread_and_no_file(
    start: Start, line: str, processes: int
) -> None:
    server = start(f"{ECHO}\n    {line}\n", SAGEMAKER_MODEL_SERVER_WORKERS="2").ready()
    server.wait_for_workers(2)
    assert len(children(server.process.pid)) == processes
