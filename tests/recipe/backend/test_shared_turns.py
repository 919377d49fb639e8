"""Work that several predictions share while they take turns in a worker."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from amphora.serving.worker.job_threads import Job, Turns
from recipe.backend import turns


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Turns]:
    """A worker's, by which predictions take their turns."""
    worker = Turns(lambda: True)
    monkeypatch.setattr(turns, "_pause", worker.pause)
    yield worker
    finish(worker)


def finish(jobs: Turns) -> None:
    while len(jobs):
        assert jobs.is_runnable, "they wait for each other"
        jobs.give()


class Counting:
    """Work of four slices, which notes each of them."""

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen
        self.begun = 0

    def __call__(self, pause: Callable[[], None]) -> str:
        self.begun += 1
        for number in range(4):
            self.seen.append(f"s{number}")
            pause()
        return "whole"


def asking(shared: turns.Shared[str], name: str, seen: list[str]) -> Callable[[], None]:
    def ask() -> None:
        seen.append(f"{name}: {shared.result()}")

    return ask


def test_an_error_in_a_slice_is_everybodys_and_holds_no_memory(jobs: Turns) -> None:
    seen: list[str] = []
    held: list[weakref.ref[Any]] = []

    class Tensor:
        """What a slice has in memory."""

    def work(pause: Callable[[], None]) -> str:
        tensor = Tensor()
        held.append(weakref.ref(tensor))
        pause()
        raise ValueError(f"a slice has failed after {len(held)}")

    shared = turns.Shared(work)

    def ask() -> None:
        with pytest.raises(ValueError, match="a slice has failed after 1"):
            shared.result()
        seen.append("told" if held[0]() is None else "held")

    jobs.add([ask] * 3)
    finish(jobs)
    assert seen == ["told"] * 3


def started(jobs: Turns, works: list[Callable[[], None]]) -> list[Job]:
    """Jobs of which each has had its first turn."""
    added = jobs.add(works)
    for _ in added:
        jobs.give()
    return added


@pytest.mark.parametrize("others_leave", [False, True])
def test_who_does_the_work_and_leaves_does_it_as_long_as_others_wait(
    jobs: Turns, others_leave: bool
) -> None:
    seen: list[str] = []
    work = Counting(seen)
    shared = turns.Shared(work)
    working, *others = started(jobs, [asking(shared, name, seen) for name in "abc"])
    jobs.leave(working)
    jobs.give()
    assert not working.is_done
    if others_leave:
        for other in others:
            jobs.leave(other)
    finish(jobs)
    assert work.begun == 1
    ends = [text for text in seen if ":" in text]
    assert ends == ([] if others_leave else ["b: whole", "c: whole"])
    assert ("s3" in seen) is not others_leave


def test_who_comes_after_it_was_left_begins_again(jobs: Turns) -> None:
    seen: list[str] = []
    work = Counting(seen)
    shared = turns.Shared(work)
    (working,) = started(jobs, [asking(shared, "a", seen)])
    jobs.leave(working)
    finish(jobs)
    assert seen == ["s0"]
    jobs.add([asking(shared, "b", seen)])
    finish(jobs)
    assert work.begun == 2
    assert seen[1:] == ["s0", "s1", "s2", "s3", "b: whole"]


@pytest.mark.parametrize("fails", [False, True])
def test_threads_without_turns_may_begin_at_the_same_time(fails: bool) -> None:
    """The first outcome counts."""
    begun: list[str] = []

    def work(_: Callable[[], None]) -> str:
        begun.append(f"outcome {len(begun)}")
        outcome = begun[-1]
        if len(begun) == 1:
            shared._is_at_work = False  # as a thread sees it that has looked before
            with contextlib.suppress(ValueError):
                shared.result()
        if fails:
            raise ValueError(outcome)
        return outcome

    shared = turns.Shared(work)
    for _ in range(2):
        try:
            assert shared.result() == "outcome 1"
        except ValueError as error:
            assert fails and str(error) == "outcome 1"
    assert len(begun) == 2
