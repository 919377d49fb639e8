"""Trainings on rows that are made tokens beside training, a portion at a time."""

from __future__ import annotations

import csv
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.trainings import STEPS, Job, Reviews

_ROWS = 128
"""Of a portion, which is 16 steps of 8 samples: 7 portions, the last one of 4 steps."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, reviews: Reviews) -> Path:
    path = tmp_path_factory.mktemp("data") / "reviews.csv"
    with path.open("w", newline="") as stream:
        # A tenth is held out.
        csv.writer(stream).writerows([("review", "sentiment"), *reviews(8 * STEPS * 10 // 9)])
    return path


class _Streamed(Job):
    """A job whose tokens are its own."""

    def __init__(
        self, base: Path, model: Path, data: Path, processes: int = 1, more: tuple[str, ...] = ()
    ) -> None:
        streamed = ("--streaming", "True", "--streaming_rows", str(_ROWS))
        super().__init__(base, model, data, processes, (*streamed, *more))
        self.cache = base / "cache"
        self.environment["HF_DATASETS_CACHE"] = str(self.cache)


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "processes",
    [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)],
)
def test_it_is_killed_in_a_portion_and_at_the_border_of_one(
    tmp_path: Path, tiny_model: Path, data: Path, processes: int
) -> None:
    more = ("--max_train_steps", str(STEPS + 20))
    whole = _Streamed(tmp_path / "whole", tiny_model, data, processes, more)
    output = whole.finish()
    assert "799 training rows are made tokens beside training, in 7 portions of 128" in output
    assert f"metric step={STEPS} epoch=1 loss" in output
    job = _Streamed(tmp_path / "disturbed", tiny_model, data, processes, more)
    code, _ = job.interrupt(signal.SIGKILL, 9)
    assert code == -signal.SIGKILL
    # Another host, which has the checkpoints and no tokens; stopped where a portion ends.
    shutil.rmtree(job.cache)
    _, resumed = job.interrupt(signal.SIGTERM, 15)
    assert "resuming from" in resumed
    shutil.rmtree(job.cache)
    last = job.finish()
    assert re.search(r"resuming from .*/checkpoint-1[5-9]", last)
    assert job.weights() == whole.weights()
    expected = dict(re.findall(r"metric step=(\d+) \S+ (loss=\S+)", output))
    for number, loss in re.findall(r"metric step=(\d+) \S+ (loss=\S+)", resumed + last):
        assert loss == expected[number], number
