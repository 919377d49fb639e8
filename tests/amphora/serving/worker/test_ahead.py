"""The next batch is read while a device computes the present one: by a stand-in for a device."""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from amphora.serving.protocol import framing
from amphora.serving.worker import ahead as ahead_module
from amphora.serving.worker.ahead import Ahead
from amphora.serving.worker.turns import Turns
from tests.support.device_code import DEVICE
from tests.support.servers import LABELS, WORDS, Start, save_model
from tests.support.until import until
from tests.support.worker_front import Front, answers

Frames = list[tuple[dict[str, Any], bytes]]


@pytest.fixture
def open_front(tmp_path: Path) -> Iterator[Callable[..., Front]]:
    """A front over one worker of the stand-in's handlers, which has computed one call: from then on
    the worker knows that there is a device."""
    fronts: list[Front] = []

    def _open(**settings: Any) -> Front:
        fronts.append(Front(tmp_path, DEVICE, **settings))
        fronts[0].send(first={"text": "first"})
        fronts[0].until_idle()
        return fronts[0]

    yield _open
    fronts[0].sock.close()
    fronts[0].thread.join(10)
    assert not fronts[0].thread.is_alive()


def until_ahead(front: Front) -> Frames:
    """What comes until the worker takes another batch while it is at work, or is idle."""
    frames: Frames = []
    while True:
        frames.append(framing.receive(front.sock))
        header = frames[-1][0]
        is_free = header.get("ahead") or header.get("op") == "idle"
        if is_free and header["batch"] == front.number:
            return frames


def pauses_of(front: Front) -> list[float]:
    """Seconds between the end of each call of the device and the begin of the next one."""
    front.send(calls={"text": "calls"})
    calls = answers(front.until_idle())["calls"]
    return [begin - end for (_, end, _), (begin, _, _) in itertools.pairwise(calls)]


def batch(number: int, **how: Any) -> dict[str, Any]:
    return {f"{number}.{place}": {"text": f"text {number} {place}", **how} for place in range(4)}


def test_calls_follow_each_other_while_the_next_texts_become_tokens(
    open_front: Callable[..., Front],
) -> None:
    front = open_front()
    frames: Frames = []
    how = {"host": 0.004, "device": 0.06}
    for number in range(4):  # each after the answers of the one before
        front.send(**batch(number, **how))
        frames += front.until_idle()
    for number in range(4, 14):
        front.send(**batch(number, **how))
        frames += until_ahead(front)
    frames += front.until_idle()
    seen = answers(frames)
    assert len(seen) == 56
    for name, (value, size, _) in seen.items():
        assert (value, size) == (f"text {name.replace('.', ' ')}"[::-1], 4)
    pauses = pauses_of(front)
    # The four texts take 16 ms of the host. That is what the device waits for them, or does not.
    assert min(pauses[1:4]) > 0.012
    assert median(pauses[5:]) < 0.006, pauses


def test_no_third_batch_is_asked_for_while_two_are_in_hand(
    open_front: Callable[..., Front],
) -> None:
    front = open_front()
    front.send(**batch(1, device=0.5))
    assert until_ahead(front)[-1][0]["op"] == "computes"
    front.send(**batch(2, device=0.5))
    frames = until_ahead(front)
    # Not before the first one's answers are there.
    assert {name.split(".")[0] for name in answers(frames)} == {"1"}
    assert frames[-1][0]["batch"] == 3
    frames = front.until_idle()
    assert {name.split(".")[0] for name in answers(frames)} == {"2"}


def test_only_a_full_batch_comes_ahead_where_the_device_takes_longer_than_the_host(
    open_front: Callable[..., Front],
) -> None:
    front = open_front(device_kind="cuda")
    for how, expected in (({"device": 0.1, "host": 0}, 4), ({"device": 0, "host": 0.05}, 1)):
        wanted: list[int] = []
        # Some are forgotten first, and more where the machine held one up.
        while wanted[-4:] != [expected] * 4:
            assert len(wanted) < 50, wanted
            front.send(a={"text": "a", **how})
            wanted.append(until_ahead(front)[-1][0]["ahead"])
            front.until_idle()


def test_errors_in_the_second_batch_are_its_own(open_front: Callable[..., Front]) -> None:
    front = open_front()
    front.send(**batch(1, device=0.05))
    until = until_ahead(front)
    front.send(a={"text": "bad"}, b={"text": "good"}, c={"text": "refused"}, d={"text": "poison"})
    seen = answers(until + front.until_idle())
    assert [seen[f"1.{place}"][0] for place in range(4)] == [
        f"text 1 {place}"[::-1] for place in range(4)
    ]
    assert seen["b"][0] == "doog"
    assert [seen[name] for name in "acd"] == ["handler_failed", "bad_request", "handler_failed"]


def test_a_request_that_is_left_before_its_batch_is_read_is_not(
    open_front: Callable[..., Front], tmp_path: Path
) -> None:
    front = open_front()
    # The worker reads the first text until the second batch and its end have come.
    front.send(one={"text": "one", "until": str(tmp_path / "cancelled")})
    front.send(gone={"text": "gone"}, kept={"text": "kept"})
    front.tell(op="cancel", id="gone")
    (tmp_path / "cancelled").touch()
    assert list(answers(front.until_idle())) == ["one", "kept"]


@pytest.mark.parametrize("others_are_refused", [False, True])
def test_a_device_that_hangs_is_told(
    open_front: Callable[..., Front], others_are_refused: bool
) -> None:
    front = open_front(timeout=0.6)
    began = time.monotonic()
    front.send(one={"text": "one", "device": 100})
    frames: Frames = [({}, b"")]
    while frames[-1][0].get("op") != "hangs":
        assert time.monotonic() - began < 30
        if others_are_refused and (len(frames) == 1 or "status" in frames[-1][0]):
            front.send(two={"text": "refused"})
            time.sleep(0.02)
        frames.append(framing.receive(front.sock))
    assert time.monotonic() - began > 0.6
    # A worker that only waits for its device gives no sign of life.
    signs = [header["batch"] for header, _ in frames if header.get("op") == "computes"]
    if not others_are_refused:
        assert signs == [2] * len(signs) and len(signs) < 3, signs


def test_what_a_device_has_done_is_delivered_while_it_computes_and_not_before() -> None:
    turns, seen = Turns(lambda: False), []
    done = [False, False]

    def work(number: int) -> None:
        seen.append(f"given {number}")
        while not done[number]:
            turns.pause(lambda: done[number], computes=True)
        seen.append(f"answered {number}")

    turns.add([lambda: work(0)])
    turns.give()
    done[0] = True
    turns.add([lambda: work(1)])  # the device has nothing to do: this goes first
    turns.give()
    assert seen == ["given 0", "given 1"]
    turns.add([lambda: seen.append("new")])  # now it has
    turns.give()
    assert seen[2:] == ["answered 0"]
    done[1] = True
    while len(turns):
        turns.give()
    assert seen[3:] == ["new", "answered 1"]
    assert turns.computed > 0


def test_an_error_of_the_device_is_the_waiting_jobs_own() -> None:
    turns, seen = Turns(lambda: False), []

    def broken() -> bool:
        if len(seen):
            raise RuntimeError("the device is broken")
        return False

    def work() -> None:
        try:
            while not broken():
                turns.pause(broken, computes=True)
        except RuntimeError as error:
            seen.append(str(error))

    turns.add([work])
    turns.give()
    assert turns.computing is not None and not turns.is_runnable
    seen.append("broken now")
    turns.give()
    assert seen[1:] == ["the device is broken"] and not len(turns)


def test_batches_ahead_pay_by_what_a_call_costs_beside_its_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(ahead_module, "time", SimpleNamespace(monotonic=lambda: now))
    for seconds, tokens, pays in ((0.02, 64, True), (0.2, 64, False), (0.2, 65536, True)):
        ahead = Ahead(call_tokens=4096)
        assert not ahead.pays
        now += 0.02
        ahead.idled(0.0)
        ahead.called(seconds, tokens)
        assert ahead.pays is pays, (seconds, tokens)


@pytest.mark.heavy
def test_the_images_handlers_answer_alike_with_two_batches_in_hand(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPHORA_DTYPE", "float32")
    save_model("BertForSequenceClassification", tmp_path, tokenizer, {"id2label": LABELS})
    front = Front(tmp_path, None)
    texts = [" ".join(WORDS[k % 10] for k in range(n, n + 2 + n % 5)) for n in range(32)]

    def batches(is_ahead: bool) -> dict[str, Any]:
        frames: Frames = []
        for start in range(0, 32, 4):
            front.send(**{text: {"inputs": text} for text in texts[start : start + 4]})
            frames += until_ahead(front) if is_ahead else front.until_idle()
        return answers(frames + (front.until_idle() if is_ahead else []))

    expected = batches(is_ahead=False)
    from recipe.inference import rows

    usual, given, most = rows.Coming.__init__, 0, 0

    class Event:
        def __init__(self) -> None:
            nonlocal given, most
            given += 1
            most = max(most, given)
            self.end: float | None = time.monotonic() + 0.03

        def query(self) -> bool:
            nonlocal given
            if self.end is not None and time.monotonic() > self.end:
                self.end, given = None, given - 1
            return self.end is None

        def synchronize(self) -> None:
            assert self.query()

    def coming(self: rows.Coming, values: rows.Values) -> None:
        usual(self, values)
        self._is_there = Event()

    monkeypatch.setattr(rows.Coming, "__init__", coming)
    assert batches(is_ahead=False) == expected
    assert most == 1
    assert batches(is_ahead=True) == expected
    assert most == 2
    front.sock.close()
    front.thread.join(10)


def test_behind_the_front_every_client_gets_its_own_answer_and_calls_have_no_pauses(
    shared: Start,
) -> None:
    server = shared(DEVICE, SAGEMAKER_TS_BATCH_SIZE="4").ready()
    how = {"host": 0.002, "device": 0.02}

    def client(number: int) -> list[int]:
        sizes, drawn = [], random.Random(number)
        for each in range(15):
            if each % 5 == number % 5:
                bad = server.invoke({"text": ["refused", "bad", "poison"][number % 3], **how})
                assert bad.status_code == [400, 500, 500][number % 3]
            text = f"{number} {each} {drawn.random()}"
            value, size, _ = server.invoke({"text": text, **how}).json()
            assert value == text[::-1]
            sizes.append(size)
        return sizes

    for clients in (1, 3, 12):
        with ThreadPoolExecutor(clients) as threads:
            sizes = [size for own in threads.map(client, range(clients)) for size in own]
    assert max(sizes) == 4
    before = len(server.invoke({"text": "calls"}).json())
    with ThreadPoolExecutor(12) as threads:
        slow = {"host": 0.004, "device": 0.1}
        list(threads.map(lambda n: server.invoke({"text": f"{n}", **slow}), range(60)))
    calls = server.invoke({"text": "calls"}).json()[before:]
    pauses = [begin - end for (_, end, _), (begin, _, _) in itertools.pairwise(calls)]
    # Four texts take the host 16 ms.
    assert median(pauses) < 0.006, pauses
    assert len(calls) < 30


def test_a_worker_killed_with_two_batches_in_hand_loses_no_request(shared: Start) -> None:
    server = shared(DEVICE, SAGEMAKER_TS_BATCH_SIZE="4").ready()
    server.invoke({"text": "a"})
    with ThreadPoolExecutor(12) as threads:
        asked = [
            threads.submit(server.invoke, {"text": f"text {n}", "device": 0.2}) for n in range(12)
        ]
        time.sleep(0.3)
        (worker,) = server.workers()
        os.kill(worker, signal.SIGKILL)
        assert [each.result().json()[0] for each in asked] == [f"text {n}"[::-1] for n in range(12)]
        crash = threads.submit(server.invoke, {"text": "crash", "device": 0.1})
        good = [threads.submit(server.invoke, {"text": f"{n}", "device": 0.1}) for n in range(9)]
        assert crash.result().json()["error"]["code"] == "worker_died"
        assert [each.result().json()[0] for each in good] == [f"{n}" for n in range(9)]


def test_a_client_that_leaves_and_a_drain_with_two_batches_in_hand(shared: Start) -> None:
    server = shared(DEVICE, SAGEMAKER_TS_BATCH_SIZE="4").ready()
    server.invoke({"text": "a"})

    def arrived() -> float:
        return server.metric("amphora_batch_size_sum") + server.metric("amphora_queue_requests")

    before = arrived()
    with ThreadPoolExecutor(12) as threads:
        asked = [
            threads.submit(server.invoke, {"text": f"text {n}", "device": 0.3}) for n in range(12)
        ]
        body = b'{"text": "gone", "device": 0.3}'
        head = f"POST /invocations HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as gone:
            gone.sendall(head.encode() + body)
            until(lambda: arrived() - before == 13)
        server.process.send_signal(signal.SIGTERM)
        assert [each.result().json()[0] for each in asked] == [f"text {n}"[::-1] for n in range(12)]
    assert server.process.wait(60) == 0
    assert "All requests are answered" in server.log
