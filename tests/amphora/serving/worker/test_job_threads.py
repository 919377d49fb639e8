"""Requests that share a worker take turns: in its process, over its socket, and behind a front."""

import json
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from amphora.serving.protocol import messages
from amphora.serving.worker import job_threads
from amphora.serving.worker.job_threads import ClientLeft, Turns
from tests.support.servers import Start, fault
from tests.support.until import until
from tests.support.worker_front import Front, answers

SLICES = """
    import json, os, time

    def model_fn(model_dir):
        return {}

    def turns_fn(model, pause):
        model["pause"] = pause

    def input_fn(body, content_type):
        return json.loads(body)

    def tokens_fn(data, model):
        return [10] * data.get("slices", 1)

    def predict_batch_fn(inputs, model):
        return [predict(data, model) for data in inputs]

    def predict(data, model):
        if "written" in data:
            return data
        if "stream" in data:
            return (f"piece{number} " for number in range(data["stream"]))
        def count():
            for number in range(data["slices"]):
                time.sleep(data.get("seconds", 0.01))
                if number == data.get("break"):
                    raise RuntimeError("broken")
                if number == data.get("crash"):
                    os._exit(3)
                if os.path.exists(data.get("gate", "")):
                    break
                model["done"] = model.get("done", 0) + 1
                model["pause"]()
            return [data["slices"], model["done"]]
        return count if data["slices"] > 1 else count()

    def predict_fn(data, model):
        return predict(data, model)()

    def output_fn(prediction, accept):
        if isinstance(prediction, dict):
            return (f"piece{number} " for number in range(prediction["written"]))
        return prediction if hasattr(prediction, "__next__") else json.dumps(prediction)
"""


def test_short_work_passes_long_work_which_is_not_starved(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clocked:
        """Jobs whose slices take seconds of a clock of their own, and leave their name."""

        def __init__(self) -> None:
            self.now, self.seen = 0.0, ""
            clock = SimpleNamespace(monotonic=lambda: self.now)
            monkeypatch.setattr(job_threads, "time", clock)
            self.turns = Turns(lambda: False)

        def add(self, **slices: tuple[int, float]) -> None:
            def work(name: str, count: int, seconds: float) -> None:
                for _ in range(count):
                    self.now += seconds
                    self.seen += name
                    self.turns.pause()

            self.turns.add([partial(work, name, *value) for name, value in slices.items()])

        def give(self, count: int = 1_000_000) -> str:
            """The names of the slices of so many turns, or of all that are left."""
            self.seen = ""
            while len(self.turns) and (count := count - 1) >= 0:
                self.turns.give()
            return self.seen

    clocked = Clocked()
    clocked.add(a=(4, 0.0), b=(3, 0.0))
    assert clocked.give(2) == "ab"
    # A new job comes first.
    clocked.add(c=(1, 0.0))
    assert clocked.give() == "cababa"

    clocked.add(a=(60, 0.02), b=(60, 0.02))
    assert clocked.give(14) == "ab" * 7
    # Three slices in a row, though two others wait, each of which has had 0.14 s.
    clocked.add(c=(3, 0.005))
    assert clocked.give(4).startswith("ccc")
    # However many short ones arrive, a long one has a turn every 0.1 s.
    seen = ""
    for _ in range(40):
        clocked.add(d=(4, 0.005))
        seen += clocked.give(3)
    assert min(seen.count("a"), seen.count("b")) >= 2
    assert seen.count("d") > 3 * (seen.count("a") + seen.count("b"))

    # If each slice takes long, short work is a few of them.
    clocked = Clocked()
    clocked.add(a=(7, 0.11), b=(7, 0.11))
    assert clocked.give(12) == "ab" * 6
    clocked.add(c=(4, 0.11))
    assert clocked.give() == "ccccab"


def test_what_a_job_waits_for_comes_before_work() -> None:
    turns = Turns(lambda: False)
    seen: list[str] = []
    ready: list[int] = []

    def wait() -> None:
        turns.pause(lambda: bool(ready))
        seen.append("waited")

    def work() -> None:
        for number in range(3):
            seen.append(str(number))
            if number == 1:
                ready.append(1)
            turns.pause()

    turns.add([wait, work])
    while len(turns):
        assert turns.is_runnable
        turns.give()
    assert seen == ["0", "1", "waited", "2"]


def test_while_a_device_computes_for_one_job_another_has_its_turn() -> None:
    turns = Turns(lambda: False)
    seen: list[str] = []

    def work(name: str, ends: str) -> None:
        seen.append(f"{name} launched")
        turns.pause()  # not by a whole job
        turns.pause(lambda: ends in seen, polls=True)
        seen.append(f"{name} answers")

    for name, ends in (("a", "b launched"), ("b", "a answers"), ("c", "the device ends")):
        turns.add([partial(work, name, ends)], whole=True)
    assert turns.are_whole
    while len(turns):
        if not turns.is_runnable:
            assert turns.polls
            seen.append("the device ends")
        turns.give()
    assert seen == ["a launched", "b launched", "a answers", "b answers",
                    "c launched", "the device ends", "c answers"]  # fmt: skip


def test_a_job_that_is_left_ends_where_it_stands() -> None:
    turns = Turns(lambda: False)
    seen: list[str] = []

    def work() -> None:
        try:
            while True:
                seen.append("turn")
                turns.pause()
        except Exception:
            seen.append("caught")
        finally:
            seen.append("cleaned")

    def never() -> None:
        seen.append("never")

    first, _ = turns.add([work, work])
    (unbegun,) = turns.add([never])
    turns.leave(unbegun)
    turns.give()
    turns.leave(first)
    turns.give()
    turns.give()
    assert seen.count("cleaned") == 1
    assert {"caught", "never"}.isdisjoint(seen)
    assert len(turns) == 1


def test_an_error_of_a_job_reaches_the_main_thread_outside_of_which_a_pause_is_none() -> None:
    def work() -> None:
        raise SystemExit(0)

    turns = Turns(lambda: True)
    turns.pause()
    turns.pause(lambda: False)
    turns.add([work])
    with pytest.raises(SystemExit):
        turns.give()
    assert not issubclass(ClientLeft, Exception)


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    with Front(tmp_path, SLICES) as made:
        yield made


def test_a_short_request_waits_for_one_slice_of_a_long_one(front: Front) -> None:
    front.send(long={"slices": 100}, other={"slices": 100})
    frames = front.until("open")
    front.send(short={"slices": 1})
    frames += front.until()
    seen = answers(frames)
    assert next(iter(seen)) == "short"
    assert sorted(seen) == ["long", "other", "short"]
    # The others are whole and took turns: one after the other, the first would end at 101.
    assert seen["long"][0] == seen["other"][0] == 100
    assert min(seen["long"][1], seen["other"][1]) > 150
    assert max(seen["long"][1], seen["other"][1]) == 201
    assert sum(header.get("slices", 0) for header, _ in frames) >= 200


def test_a_request_that_is_left_costs_no_more_slices(front: Front) -> None:
    front.send(long={"slices": 200, "seconds": 0.05}, kept={"slices": 3})
    front.until("open")
    front.tell(messages.Cancel(id="long"))
    frames = front.until()
    front.send(count={"slices": 1})
    assert list(answers(frames)) == ["kept"]
    (count,) = answers(front.until()).values()
    assert count[1] < 150


def test_a_request_that_breaks_harms_no_other(front: Front) -> None:
    front.send(bad={"slices": 9, "break": 3}, good={"slices": 5}, one={"slices": 1})
    seen = answers(front.until())
    assert seen["bad"] == "handler_failed"
    assert seen["good"][0] == 5
    assert seen["one"][0] == 1


@pytest.mark.parametrize("kind", ["stream", "written"])
def test_two_streams_that_nobody_reads_hold_up_no_other(front: Front, kind: str) -> None:
    front.send(first={kind: 1000}, second={kind: 10})
    frames = front.until("rests")
    sent = sum(header.get("id") == "first" and header.get("more") for header, _ in frames)
    assert sent == messages.CHUNKS_AHEAD + 1  # the head, and what goes ahead
    assert sum(header.get("id") == "second" for header, _ in frames) == 12
    front.send(short={"slices": 1})
    frames = front.until("rests")
    assert list(answers(frames)) == ["short"]
    front.tell(messages.Credit(id="first", count=3))
    frames = front.until("rests")
    assert sum(header.get("id") == "first" for header, _ in frames) == 3
    front.tell(messages.Cancel(id="first"))
    front.until()


DEVICE = """
    import json, os, time

    MODEL = {"read": 0, "launched": 0}

    def model_fn(model_dir):
        return MODEL

    def turns_fn(model, pause):
        model["pause"] = pause

    def input_fn(body, content_type):
        MODEL["read"] += 1
        return json.loads(body)

    def predict_batch_fn(inputs, model):
        model["launched"] += len(inputs)
        # The device computes until a later batch is read, or these are the last.
        launched, ends = model["launched"], time.monotonic() + 60
        is_done = lambda: model["read"] > launched or launched >= inputs[0]["of"]
        model["pause"](lambda: is_done() or time.monotonic() > ends, polls=True)
        return [is_done()] * len(inputs)

    def predict_fn(data, model):
        raise AssertionError("it is never called")

    def output_fn(prediction, accept):
        return json.dumps(prediction)
"""


def test_a_batch_is_read_while_the_device_computes_the_one_before(tmp_path: Path) -> None:
    with Front(tmp_path, DEVICE, kind="cuda") as front:
        front.send(a={"of": 3}, b={"of": 3})
        frames = front.until("begun")
        front.send(c={"of": 3})
        frames += front.until()
    assert answers(frames) == {"a": True, "b": True, "c": True}
    states = [header["state"] for header, _ in frames if "state" in header]
    assert states == ["begun", "begun", "idle"]


def test_the_front_sends_full_batches_to_a_gpus_worker_that_is_at_work(start: Start) -> None:
    code = (
        "import dataclasses, runpy; from amphora.common import devices; usual = devices.detect;"
        "devices.detect = lambda environ: dataclasses.replace(usual(environ), kind='cuda');"
        "runpy.run_module('amphora', run_name='__main__', alter_sys=True)"
    )
    server = start(
        DEVICE,
        command=(sys.executable, "-c", code, "serve"),
        SAGEMAKER_TS_BATCH_SIZE="2",
    ).ready()
    with ThreadPoolExecutor(6) as threads:
        futures = [threads.submit(server.invoke, {"of": 5}) for _ in range(6)]
        assert [future.result().json() for future in futures] == [True] * 6
    assert server.metric("amphora_batch_size_count") >= 3


TWO_WORKERS = {"SAGEMAKER_MODEL_SERVER_WORKERS": "2"}


def test_behind_the_front_short_requests_pass_long_ones(shared: Start, tmp_path: Path) -> None:
    server = shared(SLICES, **TWO_WORKERS).ready()
    order = {"slices": 5000, "gate": f"{tmp_path}/gate"}
    with ThreadPoolExecutor(4) as threads:
        long = [threads.submit(server.invoke, order) for _ in range(3)]
        until(lambda: server.metric("amphora_batch_size_sum") >= 3)
        for _ in range(10):
            assert server.invoke({"slices": 1, "seconds": 0}).status_code == 200
        assert not any(request.done() for request in long)
        (tmp_path / "gate").touch()
        assert [request.result().json()[0] for request in long] == [5000] * 3
    assert "amphora_queue_age_seconds 0.0" in server.http.get("/metrics").text
    until(lambda: server.metric("amphora_slices_total") >= 10)


def test_readers_of_streams_that_stall_block_nobody(shared: Start) -> None:
    server = shared(SLICES, **TWO_WORKERS).ready()
    socks, before = [], server.metric("amphora_batch_size_sum")
    body = json.dumps({"stream": 300_000}).encode()
    for _ in range(4):
        sock = socket.create_connection(("127.0.0.1", server.port))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = f"POST /invocations HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)
        socks.append(sock)
    until(lambda: server.metric("amphora_batch_size_sum") - before == 4)
    # If it waited for one of them, its client would give up after 60 s.
    assert server.invoke({"slices": 1}).status_code == 200
    for sock in socks:
        sock.close()
    with server.http.stream("POST", "/invocations", json={"stream": 5000}) as answer:
        text = answer.read().decode()
    assert text.split() == [f"piece{number}" for number in range(5000)]


def test_what_was_at_work_beside_one_that_kills_its_worker_is_answered(shared: Start) -> None:
    server = shared(SLICES, **TWO_WORKERS).ready()
    with ThreadPoolExecutor(6) as threads:
        before = server.metric("amphora_batch_size_sum")
        good = [threads.submit(server.invoke, {"slices": 30}) for _ in range(5)]
        until(lambda: server.metric("amphora_batch_size_sum") - before == 5)
        bad = server.invoke({"slices": 20, "crash": 2})
        assert fault(bad) == (500, "worker_died")
        assert [entry.result().json()[0] for entry in good] == [30] * 5
