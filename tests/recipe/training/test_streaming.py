"""Trainings on rows that are made tokens beside training, a portion at a time."""

from __future__ import annotations

import csv
import dataclasses
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from transformers import AutoTokenizer, TrainingArguments

from recipe import task_table
from recipe.batching.portions import Announced, Later
from recipe.data import shards
from recipe.data.shards import Hosts
from recipe.errors import HyperparameterError
from recipe.hyperparameters import Hyperparameters
from recipe.tasks.base import Task
from recipe.tokenization.encoding import Encoder
from recipe.training import streaming
from tests.support.causal_kit import make_model, pairs, write
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
        self.arguments[self.arguments.index("--save_steps") + 1] = "8"
        self.cache = base / "cache"
        self.environment["HF_DATASETS_CACHE"] = str(self.cache)


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "processes",
    [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)],
)
def test_it_is_killed_and_goes_on_at_the_border_of_a_portion(
    tmp_path: Path, tiny_model: Path, data: Path, processes: int
) -> None:
    more = ("--max_train_steps", str(STEPS + 20), "--save_total_limit", "99")
    whole = _Streamed(tmp_path / "whole", tiny_model, data, processes, more)
    output = whole.finish()
    assert "799 training rows are made tokens beside training, in 7 portions of 128" in output
    if 8 % processes == 0:
        assert f"metric step={STEPS} {{'loss'" in output
    job = _Streamed(tmp_path / "disturbed", tiny_model, data, processes, more)
    # Some steps after a checkpoint, which is written beside training.
    code, _ = job.interrupt(signal.SIGKILL, 14)
    assert code == -signal.SIGKILL
    # Another host, which has the checkpoints and no tokens.
    shutil.rmtree(job.cache)
    killed = job.finish()
    assert "resuming from" in killed
    assert job.weights() == whole.weights()
    # Where the first portion has just ended.
    border = _Streamed(tmp_path / "border", tiny_model, data, processes, more)
    shutil.copytree(whole.checkpoints / "checkpoint-16", border.checkpoints / "checkpoint-16")
    went_on = border.finish()
    assert f"resuming from {border.checkpoints}/checkpoint-16" in went_on
    assert border.weights() == whole.weights()
    expected = dict(re.findall(r"metric step=(\d+) \{('loss': [^,}]+)", output))
    for number, loss in re.findall(r"metric step=(\d+) \{('loss': [^,}]+)", killed + went_on):
        assert loss == expected[number], number


@pytest.mark.heavy
@pytest.mark.long
@pytest.mark.timeout(900)
def test_documents_go_on_in_the_second_pass_of_two_processes(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "model")
    rows = [{"text": " ".join([text["prompt"], text["completion"]] * 3)} for text in pairs(200)]
    data = write(tmp_path / "data", rows)
    more = ("--task", "causal-lm", "--max_train_steps", "70", "--do_eval", "False")
    whole = _Streamed(tmp_path / "whole", model, data, 2, more)
    output = whole.finish()
    assert "in 2 portions of 128 rows drawn at random, to max_steps=70" in output
    job = _Streamed(tmp_path / "disturbed", model, data, 2, more)
    # The first pass is of 50 steps or more: texts of over 32 tokens are two samples.
    code, _ = job.interrupt(signal.SIGKILL, 60)
    assert code == -signal.SIGKILL
    shutil.rmtree(job.cache)
    assert "resuming from" in job.finish()
    assert job.weights() == whole.weights()


def _arguments(folder: Path, **more: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(folder), use_cpu=True, **more)


def _task(name: str, folder: Path, **more: Any) -> tuple[Task, Hyperparameters]:
    hyperparameters = Hyperparameters(task=name, **more)
    task: Task = task_table.load(name)({"train": folder}, hyperparameters)
    return task, hyperparameters


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("text-classification", {}),
        ("causal-lm", {"max_train_steps": 5}),
        ("masked-lm", {"max_train_steps": 5, "long_texts": "truncate"}),
        ("summarization", {"text_column": "text", "label_column": "label"}),
    ],
)
@pytest.mark.usefixtures("own_cache")
def test_portions_have_the_tokens_of_the_whole(
    tmp_path: Path, tiny_model: Path, reviews: Reviews, name: str, more: dict[str, Any]
) -> None:
    path = tmp_path / "data" / "train.csv"
    path.parent.mkdir()
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([("text", "label"), *reviews(70)])
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_model))
    task, hyperparameters = _task(name, path.parent, streaming_rows=10, **more)
    arguments = _arguments(tmp_path)
    if name == "summarization":
        task.objective.longest_target = 6  # type: ignore[attr-defined]
    wanted = task.samples(tokenizer, 8)
    # Data of more than four portions is streamed unless it is told not to be.
    with streaming.samples(task, tokenizer, 8, hyperparameters, arguments, shards.ONE) as read:
        train = read["train"]
        assert isinstance(train, Announced)
        assert len(train) == 63
        held_out = read["evaluation"]
        assert isinstance(held_out, Later)
        assert len(held_out) == 7
        assert held_out.samples.fingerprint() == wanted["evaluation"].fingerprint()
        assert "test" not in read
        pieces: dict[tuple[int, ...], int] = {}
        for place in range(train.portions.plan.count):
            samples = train.portions.read(place)
            assert len(samples) == train.portions.samples(place)
            for row in range(len(samples)):
                key = (*samples.tokens(row).tolist(), int(samples.labels[row]))
                pieces[key] = pieces.get(key, 0) + 1
            if name == "text-classification":
                rows = train.portions.plan.rows_of(place)
                assert np.array_equal(samples.labels, train.labels[rows])
    whole = wanted["train"]
    for row in range(len(whole)):
        pieces[(*whole.tokens(row).tolist(), int(whole.labels[row]))] -= 1
    assert not any(pieces.values())
    never = dataclasses.replace(hyperparameters, streaming=False)
    with streaming.samples(task, tokenizer, 8, never, arguments, shards.ONE) as read:
        assert not isinstance(read["train"], Announced)


@pytest.mark.usefixtures("own_cache")
def test_evaluation_data_is_made_tokens_beside_training_and_never_that_of_before(
    tmp_path: Path, tiny_model: Path, reviews: Reviews, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, validation = tmp_path / "data" / "train.csv", tmp_path / "data" / "validation.csv"
    train.parent.mkdir()
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_model))
    rows, keys = reviews(60), []
    for held_out in (rows[:8], rows[1:9], rows[:8]):
        for path, some in ((train, rows[20:]), (validation, held_out)):
            with path.open("w", newline="") as stream:
                csv.writer(stream).writerows([("text", "label"), *some])
        task, hyperparameters = _task(
            "text-classification", train.parent, streaming=True, streaming_rows=10
        )
        with (
            streaming.samples(
                task, tokenizer, 8, hyperparameters, _arguments(tmp_path), shards.ONE
            ) as read,
            monkeypatch.context() as patch,
        ):
            # Not by this process: another one does.
            patch.setattr(Encoder, "encode", lambda *_: pytest.fail("made here"))
            later = read["evaluation"]
            assert isinstance(later, Later)
            assert later.samples is later.samples
        keys.append((later.fingerprint(), later.samples.fingerprint()))
        assert later.samples.fingerprint() == task.samples(tokenizer, 8)["evaluation"].fingerprint()
    assert keys[0] == keys[2]
    assert not set(keys[0]) & set(keys[1])
    # Whoever needs it first after the process that makes tokens has ended makes it.
    (tmp_path / "more").mkdir()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "more")
    task, hyperparameters = _task(
        "text-classification", train.parent, streaming=True, streaming_rows=10
    )
    arguments = _arguments(tmp_path)
    with streaming.samples(task, tokenizer, 8, hyperparameters, arguments, shards.ONE) as read:
        later = read["evaluation"]
    assert isinstance(later, Later)
    assert later.samples.fingerprint() == keys[0][1]


@pytest.mark.usefixtures("own_cache")
def test_what_cannot_be_streamed_is_refused_with_all_reasons(
    tmp_path: Path, tiny_model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_model))
    task, hyperparameters = _task("causal-lm", data.parent, streaming=True, text_column="review")
    hosts = Hosts(of_processes=("a", "b"), sharded=frozenset({"train"}))
    arguments = _arguments(tmp_path)
    with (
        pytest.raises(HyperparameterError, match=r"give max_steps.*ShardedByS3Key.*Leave it out"),
        streaming.samples(task, tokenizer, 8, hyperparameters, arguments, hosts),
    ):
        pass
    # What nobody asked for is done as ever, with a line.
    asked = dataclasses.replace(hyperparameters, streaming=None, streaming_rows=100)
    with streaming.samples(task, tokenizer, 8, asked, arguments, shards.ONE) as read:
        assert not isinstance(read["train"], Announced)
    assert "made tokens before the first step, not beside training: a text may be" in (
        capsys.readouterr().out
    )
    task, hyperparameters = _task(
        "text-classification", data.parent, streaming=True, long_texts="split"
    )
    with (
        pytest.raises(HyperparameterError, match="task=text-classification needs all tokens first"),
        streaming.samples(task, tokenizer, 8, hyperparameters, arguments, shards.ONE),
    ):
        pass
