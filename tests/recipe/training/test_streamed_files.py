"""Trainings on files that are read while others are trained on, and forgotten again."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from transformers import AutoTokenizer, TrainingArguments

from recipe import task_table
from recipe.batching.portions import Announced, Streamed
from recipe.data import classification, shards
from recipe.data.kinds import word_tags
from recipe.data.layout import file_portions
from recipe.errors import DataError, HyperparameterError, OutputError
from recipe.hyperparameters import Hyperparameters
from recipe.tasks.base import training_rows
from recipe.training import streaming
from tests.support import serving_kit
from tests.support.causal_kit import make_model, pairs
from tests.support.trainings import Job, Reviews

_FILES, _ROWS = 14, 24
"""Of the training data, and of its first file; each has one row more than that before it."""


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def write(path: Path, rows: list[tuple[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([("review", "sentiment"), *rows])


@pytest.fixture
def channels(tmp_path: Path) -> dict[str, Path]:
    """Classes that are not in each file, and one that is in a single one."""
    for at in range(_FILES):
        rows = [(f"the film {at} was number {n}", f"class {at // 4}") for n in range(_ROWS + at)]
        write(tmp_path / "train" / f"part-{at}.csv", rows)
    write(tmp_path / "train" / "part-x.csv", [("the film x was alone", "rare")])
    write(tmp_path / "validation" / "all.csv", [("the film 0", "class 0"), ("the film 9", "rare")])
    return {"train": tmp_path / "train", "validation": tmp_path / "validation"}


def _arguments(folder: Path) -> TrainingArguments:
    return TrainingArguments(output_dir=str(folder), use_cpu=True)


def test_every_row_is_trained_once_in_an_epoch_and_few_tokens_are_kept(
    own_cache: Path, tiny_model: Path, channels: dict[str, Path], tmp_path: Path
) -> None:
    job = Hyperparameters(task="text-classification", streaming_files=1)
    task: Any = task_table.load(job.task)(channels, job)
    assert task.splits.labels.names == (*(f"class {n}" for n in range(4)), "rare")
    total = sum(_ROWS + at for at in range(_FILES)) + 1
    assert training_rows(task) == total
    assert len(task.train) < 50, "rows of the first file"
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    with streaming.samples(task, tokenizer, 32, job, _arguments(tmp_path), shards.ONE) as both:
        samples = both["train"]
        assert isinstance(samples, Announced) and len(samples) == total
        training = Streamed(samples=samples, portions=samples.portions, size=8)
        portions = samples.portions.plan.count
        assert portions == _FILES + 1
        orders = []
        for epoch in range(2):
            drawn, read, most = training.epoch(epoch, True), Counter[tuple[str, str]](), 0
            order: list[int] = []
            for number in range(len(drawn)):
                own, rows, _, first = drawn.of(number, 0)
                order += [first >> 32] * (first >> 32 not in order)
                texts = tokenizer.batch_decode(
                    [own.tokens(row) for row in rows], skip_special_tokens=True
                )
                names = [task.splits.labels.names[label] for label in own.labels[rows]]
                read.update(zip(texts, names, strict=True))
                most = max(most, len(list(own_cache.glob("tokens/portions-*/tokens-*"))))
            expected = {
                (f"the film {at} was number {n}", f"class {at // 4}")
                for at in range(_FILES) for n in range(_ROWS + at)
            }  # fmt: skip
            words = Counter((re.sub(r" ?##", "", text), name) for text, name in read)
            assert sum(read.values()) == total
            assert set(read.values()) == {1} and len(words) == total
            assert Counter(name for _, name in read) == Counter(
                name for _, name in expected | {("the film x was alone", "rare")}
            )
            # Those of which one is being removed, or made, among them.
            assert most <= file_portions.MOST + 1
            orders.append(order)
        assert sorted(orders[0]) == sorted(orders[1]) == list(range(portions))
        assert orders[0] != orders[1]
        assert not list(own_cache.glob("tokens/rows-*")) or most
    named = training.named([(3 << 32) + 5])
    assert re.fullmatch(r"the rows 5, counted from 0, of part-\w+\.csv", named)


@pytest.mark.parametrize("name", ["text-classification", "token-classification"])
def test_a_start_again_does_not_read_all_files_for_their_labels(
    name: str, channels: dict[str, Path], tmp_path: Path, own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    job = Hyperparameters(task=name, streaming_files=1, max_train_steps=50)
    if name == "token-classification":
        channels, job = _of_task(name, tmp_path / "words", 9)
    else:
        job = dataclasses.replace(job, label_column="gold_label")
        nothing = channels["train"] / "part-x.csv"  # labels that say that they are none
        nothing.write_text("review,gold_label\nthe film x was alone,rare\nthe film y,-\n")
        for path in [*channels["train"].iterdir(), *channels["validation"].iterdir()]:
            path.write_text(path.read_text().replace("sentiment", "gold_label"))
    module: Any = word_tags if name == "token-classification" else classification
    read, looked_at = module.read_training, list[Path]()

    def counted(layout: Any, paths: Any, *more: Any) -> Any:
        looked_at.extend(paths)
        return read(layout, paths, *more)

    monkeypatch.setattr(module, "read_training", counted)

    def told() -> tuple[int, Any]:
        looked_at.clear()
        task: Any = task_table.load(name)(channels, job)
        names = task.splits.names if hasattr(task.splits, "names") else task.splits.labels
        portions = task.files.identity(), task.files.rows
        return len(looked_at), (names, portions, task.found, task.train[:])

    files = len(list(channels["train"].iterdir()))
    first, said = told()
    assert first == files - 1
    assert told() == (0, said)
    # A file that was written again, even with the same bytes, is read again; a broken survey too.
    task_table.load(name)(channels, job).files.portions[-1][0].touch()
    assert told() == (files - 1, said)
    for path in (own_cache / "surveys").iterdir():
        path.write_text(path.read_text()[:-9])
    assert told() == (files - 1, said)
    shutil.rmtree(own_cache / "surveys")
    (own_cache / "surveys").touch()
    assert told() == told() == (files - 1, said), "nothing can be kept"


@pytest.mark.usefixtures("own_cache")
def test_what_cannot_be_is_refused(
    channels: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(kind: type[Exception], task: str = "text-classification", **more: Any) -> str:
        job = Hyperparameters(task=task, **{"streaming_files": 2, **more})
        with pytest.raises(kind) as caught:
            streaming.check(task_table.load(task), job)
            task_table.load(task)(channels, job)
        return str(caught.value)

    assert "class_weight weighs all rows" in refused(HyperparameterError, class_weight="balanced")
    said = refused(HyperparameterError, "causal-lm", text_column="review")
    assert "give max_steps" in said and "Leave it out" in said
    assert "takes rows of all files" in refused(HyperparameterError, "reranking")
    assert "takes rows of all files" in refused(HyperparameterError, "preference")
    for task in ("masked-lm", "token-classification", "summarization"):
        assert "give max_steps" in refused(HyperparameterError, task)
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage(tmp_path)._replace(free=2_000)
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        said = refused(OutputError)
        assert "0.00 GB are free" in said and "smaller files" in said
    (channels["train"] / "notes.txt").write_text("a text\n")
    assert "notes.txt may not be read by itself" in refused(HyperparameterError)
    (channels["train"] / "notes.txt").unlink()
    rows = [{"review": "a", "sentiment": "class 0", "split": "test"},
            {"review": "b", "sentiment": "class 0", "split": "train"}]  # fmt: skip
    (channels["train"] / "part-y.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert "says that rows are test data" in refused(DataError, seed=3)
    (channels["train"] / "part-y.jsonl").unlink()
    del channels["validation"]
    assert "no channel has evaluation data" in refused(HyperparameterError)


@pytest.mark.usefixtures("own_cache")
def test_large_data_in_fastfile_mode_is_read_so_by_default(
    channels: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Hyperparameters(task="text-classification")

    def read() -> Any:
        return task_table.load(job.task)(channels, job)

    monkeypatch.setattr(file_portions, "_LARGE", 5_000)
    monkeypatch.setattr(file_portions, "_BYTES", 1_000)
    assert read().files is None
    mode = {"train": {"TrainingInputMode": "FastFile"}}
    monkeypatch.setenv("SM_INPUT_DATA_CONFIG", json.dumps(mode))
    task = read()
    assert len(task.files.portions) > 7
    assert any("files of training data" in line for line in task.found)
    monkeypatch.setattr(file_portions, "_BYTES", 5_000)
    task = read()
    assert task.files is None and len(task.train) > 400
    assert any("is read whole before training: 15 files are" in line for line in task.found)


def _of_task(task: str, folder: Path, files: int) -> tuple[dict[str, Path], Hyperparameters]:
    """Rows of a task in some files, of which not each has all tags, and the last one no row that
    can be used; and the validation data."""
    for at in range(files + 1):
        channel = folder / ("train" if at < files else "validation")
        channel.mkdir(parents=True, exist_ok=True)
        rows: list[dict[str, Any]] = []
        for n in range(20 + at):
            words = f"the film {at} was number {n} and good".split()[: 4 + n % 5]
            kind = "AB"[at % 2]
            tags = ["O", f"B-{kind}", *["I-" + kind if n % 2 else "O"] * (len(words) - 2)]
            rows.append({
                "masked-lm": {"text": " ".join(words)},
                "token-classification": {"tokens": words, "ner_tags": tags},
                "summarization": {"document": " ".join(words), "summary": words[2] if n else ""},
            }[task])  # fmt: skip
        (channel / f"{at}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = Hyperparameters(task=task, streaming_files=1, max_train_steps=50)
    return {name: folder / name for name in ("train", "validation")}, made


def _model_of(task: str, folder: Path, tiny_model: Path) -> Path:
    kinds = {"masked-lm": "BertForMaskedLM", "summarization": "T5ForConditionalGeneration"}
    return serving_kit.save(kinds[task], folder) if task in kinds else tiny_model


_BY_TOKENS = ["masked-lm", "token-classification", "summarization"]


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("name", _BY_TOKENS)
def test_portions_of_other_tasks_have_the_tokens_of_the_whole(
    tmp_path: Path, tiny_model: Path, name: str
) -> None:
    channels, job = _of_task(name, tmp_path / "data", 9)
    tokenizer = AutoTokenizer.from_pretrained(_model_of(name, tmp_path / "model", tiny_model))

    def read(job: Hyperparameters) -> Any:
        task: Any = task_table.load(name)(channels, job)
        if name == "summarization":
            task.objective.longest_target = 6
        return task

    def counted(samples: Any) -> Counter[tuple[Any, ...]]:
        """All that the samples say of their tokens, whatever their numbers."""
        beside = [
            getattr(samples, field.name) for field in dataclasses.fields(samples)
            if field.name in ("tags", "heads", "back")
        ]  # fmt: skip
        numbers = samples.labels if samples.labels.ndim == 1 else samples.labels[:, 0]
        return Counter(
            (
                *samples.tokens(row).tolist(), "|", int(numbers[row]),
                *(each for of in beside for each in of[samples.span(row)].tolist()),
                int(getattr(samples, "sources", np.zeros(len(samples)))[row]),
            )
            for row in range(len(samples))
        )  # fmt: skip

    whole = read(dataclasses.replace(job, streaming_files=0))
    wanted = counted(whole.samples(tokenizer, 8)["train"])
    task = read(job)
    assert training_rows(task) is None and len(task.train) < 40
    with streaming.samples(task, tokenizer, 8, job, _arguments(tmp_path), shards.ONE) as both:
        announced = both["train"]
        assert isinstance(announced, Announced)
        portions = announced.portions
        assert portions.plan.count == 9
        got: Counter[tuple[Any, ...]] = Counter()
        for place in range(9):
            got.update(counted(portions.read(place)))
        assert got == wanted
        if name == "token-classification":
            assert task.splits.names == whole.splits.names
            # Of a model that has the tags in another order, other tokens are kept.
            task._names = task._names[::-1]
            arguments = _arguments(tmp_path)
            with streaming.samples(task, tokenizer, 8, job, arguments, shards.ONE) as again:
                assert again["train"].fingerprint() != announced.fingerprint()


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "processes",
    [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)],
)
def test_it_is_killed_and_goes_on(
    tmp_path: Path, tiny_model: Path, reviews: Reviews, processes: int
) -> None:
    data = tmp_path / "data"
    rows = reviews(330)
    for at in range(11):
        write(data / f"{at}.csv", rows[30 * at : 30 * at + 30])
    more = ("--streaming_files", "1", "--do_eval", "False", "--save_total_limit", "99")

    def job(name: str) -> Job:
        made = Job(tmp_path / name, tiny_model, data, processes, more)
        made.environment["HF_DATASETS_CACHE"] = str(tmp_path / name / "cache")
        return made

    whole = job("whole")
    output = whole.finish()
    assert "11 files of training data" in output and "in 11 portions" in output
    disturbed = job("disturbed")
    code, _ = disturbed.interrupt(signal.SIGKILL, 54)
    assert code == -signal.SIGKILL
    # Another host, in the second epoch, whose files were written at another time.
    shutil.rmtree(tmp_path / "disturbed" / "cache")
    for path in data.iterdir():
        path.touch()
    killed = disturbed.finish()
    assert "resuming from" in killed
    assert "report written" in output and "report written" in killed
    assert disturbed.weights() == whole.weights()
    expected = dict(re.findall(r"metric step=(\d+) \{('loss': [^,}]+)", output))
    assert len(expected) == 2 * 11 * 4 or processes == 3
    for number, loss in re.findall(r"metric step=(\d+) \{('loss': [^,}]+)", killed):
        assert loss == expected[number], number


def _held_to_each_other(whole: Job, killed: Job) -> None:
    """A training that is killed, and loses its cache, ends in the weights of one that is not."""
    for job in (whole, killed):
        job.environment["HF_DATASETS_CACHE"] = str(job.base / "cache")
    assert "in 9 portions" in whole.finish()
    code, _ = killed.interrupt(signal.SIGKILL, 38)
    assert code == -signal.SIGKILL
    shutil.rmtree(killed.base / "cache")
    assert "resuming from" in killed.finish()
    assert killed.weights() == whole.weights()


@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_documents_go_on_too(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "model")
    (tmp_path / "data").mkdir()
    texts = [" ".join([each["prompt"], each["completion"]] * 3) for each in pairs(90)]
    for at in range(9):
        (tmp_path / "data" / f"{at}.txt").write_text("\n".join(texts[10 * at : 10 * at + 10]))
    more = ("--streaming_files", "1", "--do_eval", "False", "--task", "causal-lm")
    more += ("--max_train_steps", "50")
    jobs = [Job(tmp_path / name, model, tmp_path / "data", 1, more) for name in ("a", "b")]
    _held_to_each_other(*jobs)
    kept = list((jobs[0].base / "cache").glob("tokens/portions-*/tokens-*"))
    assert 0 < len(kept) <= file_portions.MOST + 1


@pytest.mark.heavy
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", _BY_TOKENS)
def test_other_tasks_go_on_too(tmp_path: Path, tiny_model: Path, name: str) -> None:
    channels, _ = _of_task(name, tmp_path / "data", 9)
    model = _model_of(name, tmp_path / "model", tiny_model)
    more = ("--streaming_files", "1", "--task", name, "--max_train_steps", "50")
    more += ("--eval_strategy", "no")
    jobs = [Job(tmp_path / which, model, channels["train"], 1, more) for which in ("a", "b")]
    _held_to_each_other(*jobs)
