"""Merging: the plan, the delay, and a real server whose handlers declare it."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amphora.serving.protocol.batching import BatchDelay, Size, plan
from tests.support.servers import MERGING, Running, Start


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


def test_lengths_do_not_matter_where_nothing_is_padded() -> None:
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


def test_the_batch_size_setting_is_a_limit(start: Start) -> None:
    server = start(MERGING, SAGEMAKER_TS_BATCH_SIZE="2").ready()
    answers = ask_together(server, ["a"] * 8)
    assert {size for _, (_, size, _, _) in answers} <= {1, 2}  # type: ignore[misc]


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


def test_without_the_hook_requests_go_one_at_a_time(start: Start) -> None:
    code = MERGING.replace("def predict_batch_fn", "def _predict_batch").replace(
        "predict_batch_fn([text]", "_predict_batch([text]"
    )
    answers = ask_together(start(code).ready(), ["a"] * 6)
    assert {json.dumps(answer[:3]) for _, answer in answers} == {'["a", 1, 1]'}  # type: ignore[index]
