"""Portions that a process of its own makes: real processes, that fail, end and are killed."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from recipe.batching.portions import Plan
from recipe.batching.samples import Samples
from recipe.errors import CheckpointError, DataError, OutputError
from recipe.tokenization import portion_files
from recipe.tokenization.portion_files import Others, PortionFiles

_PLAN = Plan(rows=100, size=10, seed=0)


def _samples(portion: int, shift: int = 0) -> Samples:
    ids = np.arange(10) + 100 * portion + shift
    return Samples(ids, np.arange(11), np.zeros(10, np.int64))


def _files(folder: Path, make: Callable[[int], Samples]) -> PortionFiles:
    return PortionFiles(_PLAN, folder / "portions", make, one_each=False)


def _kept(folder: Path) -> Callable[[int], Samples]:
    """Makes portions that say by whom and in which order."""

    def make(portion: int) -> Samples:
        with (folder / "log").open("a") as stream:
            stream.write(f"{os.getpid()} {portion}\n")
        return _samples(portion)

    return make


def _log(folder: Path) -> list[tuple[int, int]]:
    lines = (folder / "log").read_text().splitlines()
    return [(int(pid), int(portion)) for pid, portion in map(str.split, lines)]


def test_another_process_makes_portions_ahead_and_no_further(tmp_path: Path) -> None:
    files = _files(tmp_path, _kept(tmp_path))
    with files.making():
        assert files.samples(0) == 10
        assert files.read(0).tokens(3).tolist() == [3]
        place = 4
        deadline = time.monotonic() + 60
        while not (tmp_path / "portions" / f"{place}.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.3)
        made = [portion for pid, portion in _log(tmp_path) if pid != os.getpid()]
        assert made == [0, 1, 2, 3, 4]
        # Training went on elsewhere: what it needs comes next.
        assert files.read(8).tokens(0).tolist() == [800]
        made = [portion for pid, portion in _log(tmp_path) if pid != os.getpid()]
        assert made[5] == 8
        for at in range(10):
            files.read(at)
        (writer,) = {pid for pid, _ in _log(tmp_path)} - {os.getpid()}
        # All are made, and a later epoch makes none.
        files.read(17)
        assert sorted(json.loads(files.records())) == sorted(map(str, range(10)))
    with pytest.raises(ProcessLookupError):
        os.kill(writer, 0)
    again = _files(tmp_path, _kept(tmp_path))
    count = len(_log(tmp_path))
    with again.making():
        assert len(again.read(5)) == 10
    assert [pid for pid, _ in _log(tmp_path)][count:] == [os.getpid()]


@pytest.mark.parametrize("is_asked", [False, True])
def test_other_data_is_made_after_the_portions_wanted_soon_or_when_somebody_waits(
    tmp_path: Path, is_asked: bool
) -> None:
    begin = tmp_path / "begin"

    def make(portion: int) -> Samples:
        while not begin.exists():
            time.sleep(0.01)
        return _kept(tmp_path)(portion)

    others = Others(name="others-1", make=lambda: _kept(tmp_path)(-1))
    folder = tmp_path / "portions"
    files = PortionFiles(_PLAN, folder, make, one_each=False, others=others)

    def begin_when_asked() -> None:
        while not (folder / "others-1.asked").exists():
            time.sleep(0.01)
        begin.touch()

    with files.making():
        if is_asked:
            threading.Thread(target=begin_when_asked).start()
        else:
            begin.touch()
            deadline = time.monotonic() + 60
            while not (folder / "others-1.made").exists():
                assert time.monotonic() < deadline
                time.sleep(0.05)
        files.wait_for_others()
        made = [portion for _, portion in _log(tmp_path)]
        # Who asks waits for the portion that was begun.
        assert made[: made.index(-1)] in ([[], [0]] if is_asked else [[0, 1, 2, 3, 4]])
        files.read(9)
    assert [portion for _, portion in _log(tmp_path)].count(-1) == 1
    # What was made is not made again; what has another name is.
    for name, count in (("others-1", 1), ("others-2", 2)):
        others = Others(name=name, make=others.make)
        again = PortionFiles(_PLAN, folder, _samples, one_each=False, others=others)
        with again.making():
            again.wait_for_others()
        assert [portion for _, portion in _log(tmp_path)].count(-1) == count


def test_other_data_that_nobody_makes_any_more_is_not_waited_for(tmp_path: Path) -> None:
    def ended() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def broken() -> None:
        raise DataError("Row 3 has no tokens.")

    files = {
        name: PortionFiles(
            _PLAN, tmp_path / name, _samples, one_each=False, others=Others(name=name, make=make)
        )
        for name, make in (("ended", ended), ("broken", broken))
    }
    with files["ended"].making():
        files["ended"].wait_for_others()
    with files["broken"].making(), pytest.raises(DataError, match="Row 3 has no tokens"):
        files["broken"].wait_for_others()


def test_what_it_fails_with_ends_those_who_wait(tmp_path: Path) -> None:
    def make(portion: int) -> Samples:
        if portion == 2:
            raise OutputError("The disk is full.", "Free some.")
        return _samples(portion)

    files = _files(tmp_path, make)
    with files.making():
        files.read(1)
        with pytest.raises(OutputError, match=r"The disk is full\. Free some\."):
            files.read(2)
    # The next start tries again.
    whole = _files(tmp_path, _samples)
    with whole.making():
        assert len(whole.read(2)) == 10


def test_an_exception_of_no_kind_that_is_known_is_told(tmp_path: Path) -> None:
    def make(portion: int) -> Samples:
        raise KeyError("tokens")

    files = _files(tmp_path, make)
    with files.making(), pytest.raises(DataError, match="KeyError: 'tokens'"):
        files.read(0)


def test_a_process_that_is_killed_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portion_files, "_LOCK_SECONDS", 1.0)

    def make(portion: int) -> Samples:
        if portion == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return _samples(portion)

    files = _files(tmp_path, make)
    with files.making():
        files.read(0)
        with pytest.raises(DataError, match="has ended before portion 1"):
            files.read(1)


def test_one_that_makes_nothing_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portion_files, "_STALLED_SECONDS", 1.0)

    def make(portion: int) -> Samples:
        time.sleep(600)
        return _samples(portion)

    files = _files(tmp_path, make)
    with (
        files.making(),
        pytest.raises(DataError, match=r"Portion 0 .* is not made tokens after 1 s"),
    ):
        files.read(0)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_the_process_ends_with_its_parent(tmp_path: Path) -> None:
    """Where that is killed, too, and the next start need not wait for it."""
    parent = os.fork()
    if not parent:
        try:
            with _files(tmp_path, _kept(tmp_path)).making():
                time.sleep(600)
        finally:
            os._exit(1)
    deadline = time.monotonic() + 60
    while not (tmp_path / "portions" / "4.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    files = _files(tmp_path, _kept(tmp_path))
    with files.making():
        assert len(files.read(9)) == 10
    makers = {pid for pid, portion in _log(tmp_path) if portion in (4, 9)} - {os.getpid()}
    assert len(makers) == 2


def test_a_portion_that_has_changed_is_refused_by_name(tmp_path: Path) -> None:
    first = _files(tmp_path / "first", _samples)
    (tmp_path / "first").mkdir()
    with first.making():
        for place in range(4):
            first.read(place)
        records = first.records()
    (tmp_path / "second").mkdir()
    second = _files(tmp_path / "second", lambda portion: _samples(portion, int(portion == 3)))
    second.expect(records)
    # What a checkpoint knows is not waited for: nobody makes anything here.
    assert second.samples(3) == 10
    with second.making():
        second.read(2)
        with pytest.raises(CheckpointError, match=r"Portion 3 .* is another one"):
            second.read(3)
    third = _files(tmp_path / "second", _samples)
    with third.making():
        third.read(0)
        third._wait(3, 3)
        with pytest.raises(CheckpointError, match=r"Portion 3 .* is another one"):
            third.expect(records)
