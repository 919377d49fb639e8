"""A training that is killed or stopped anywhere ends as one that was not."""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerState, TrainingArguments

from recipe.errors import CheckpointError, DivergedError, OutputError
from recipe.runtime import memory
from recipe.storage import checkpoints
from recipe.tasks import base
from recipe.training import resuming
from recipe.training.interruptions import EXIT_CODE, Interruptions, evaluation_is_due
from recipe.training.resuming import Resumable
from recipe.training.snapshot import Snapshot
from tests.support.jobs import QUICK, SHARDED, Job, run, write
from tests.support.refusals import refused
from tests.support.words import reviews

STEPS = 40
"""Of an epoch; there are two."""
REVIEWS = [{"text": text, "label": label} for text, label in reviews(8 * STEPS * 10 // 9)]
ARGV = (
    "--epochs", "2", "--lr", "1e-3", "--batch_size", "8", "--logging_steps", "1", "--save_steps", "7",
    "--save_strategy", "steps", "--max_length", "32",
)  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("data"), REVIEWS)


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize("more", [(), pytest.param(SHARDED, marks=pytest.mark.long)])
def test_two_processes_killed_and_stopped_end_with_the_same_weights(
    tmp_path: Path,
    tiny_model: Path,
    data: Path,
    preloaded: Mapping[str, str],
    more: tuple[str, ...],
) -> None:
    """Of one process, tests/contract stops every task; ordeal/kill.py kills it."""
    argv = ("--model_id", str(tiny_model), *ARGV, "--batch_size", "4", *more)
    whole, job = (
        Job(tmp_path / name, {"train": data}, argv, {**preloaded, **QUICK})
        for name in ("whole", "disturbed")
    )
    whole.finish(processes=2)
    assert len(whole.losses) == 2 * STEPS
    job.interrupt("metric step=17 {'loss'", by=signal.SIGKILL, processes=2)
    assert -signal.SIGKILL in job.codes and 0 not in job.codes
    resumed = job.interrupt("metric step=44 {'loss'", processes=2).log
    assert job.codes == {EXIT_CODE}, resumed
    assert re.search(r"resuming from .*/checkpoint-\d+", resumed)
    (step,) = re.findall(r"stopped at step (\d+) of", resumed)
    assert resumed.count(f"training stopped after step {step} of {2 * STEPS}") == 1
    kept = job.checkpoints / f"checkpoint-{step}" / "model.safetensors"
    partial, saved = job.weights, load_file(kept)
    assert all(torch.equal(partial[key], saved[key]) for key in partial)
    losses = job.losses
    last = job.finish(processes=2).log
    assert f"resuming from {kept.parent}" in last
    assert job.files == whole.files
    # Each step was logged with the same loss, whichever start it was in.
    assert whole.losses.items() >= {**losses, **job.losses}.items()
    # Once more: training had ended, the model is written again.
    (job.model / "model.safetensors").unlink()
    again = job.finish(processes=2)
    assert not again.losses
    assert f"this job was finished before, at step {2 * STEPS}: nothing is trained" in again.log
    assert job.files == whole.files


@pytest.mark.heavy
def test_a_stop_during_an_evaluation_repeats_it(
    tmp_path: Path, tiny_model: Path, preloaded: Mapping[str, str]
) -> None:
    channels = {"train": write(tmp_path / "in", REVIEWS[:48]),
                "test": write(tmp_path / "test", REVIEWS, "test")}  # fmt: skip
    argv = ("--model_id", str(tiny_model), *ARGV, "--save_strategy", "epoch",
            "--load_best_model_at_end", "True")  # fmt: skip
    whole, job = (
        Job(tmp_path / name, channels, argv, {**preloaded, **QUICK})
        for name in ("whole", "disturbed")
    )
    job.interrupt("metric step=6 {'loss'")
    assert job.codes == {EXIT_CODE}, job.log
    assert "stopped at step 6 of 12; checkpoint saved in" in job.log
    assert "eval_loss" not in job.log
    assert job.finish().files == whole.finish().files
    scores = [re.findall(r"step=6 .*'eval_loss': ([^,}]+)", folder.log) for folder in (whole, job)]
    assert len(scores[0]) == 1
    assert scores[0] == scores[1]


@pytest.mark.parametrize(
    ("values", "step", "epoch", "is_due"),
    [
        ({"eval_strategy": "epoch"}, 4, 1.0, True),
        ({"eval_strategy": "epoch"}, 3, 0.75, False),
        ({"eval_strategy": "epoch", "eval_delay": 2}, 4, 1.0, False),
        # The last step ends an epoch, also within one.
        ({"eval_strategy": "epoch"}, 10, 2.5, True),
        ({"eval_strategy": "steps", "eval_steps": 3}, 6, 1.5, True),
        ({"eval_strategy": "steps", "eval_steps": 3, "eval_delay": 7}, 6, 1.5, False),
        ({"eval_strategy": "no"}, 4, 1.0, False),
    ],
)
def test_an_evaluation_is_due_where_the_trainer_makes_one(
    tmp_path: Path, values: dict[str, Any], step: int, epoch: float, is_due: bool
) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **values)
    state = TrainerState(global_step=step, epoch=epoch, max_steps=10)
    state.compute_steps(args, state.max_steps)
    assert evaluation_is_due(args, state) is is_due
    state.log_history = [{"step": step, "eval_loss": 1.0}]
    assert not evaluation_is_due(args, state)


@pytest.mark.heavy
def test_schedule_and_patience_count_each_evaluation_once(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schedule that follows evaluations, and early stopping, which one before the first step
    precedes: stopped during the second evaluation of five, and within the third epoch."""
    channels = {"train": write(tmp_path / "in", REVIEWS[:16]),
                "test": write(tmp_path / "test", REVIEWS[:8], "test")}  # fmt: skip
    argv = "--epochs 8 --batch_size 8 --eval_on_start True --early_stopping_patience 3"
    argv += " --lr_scheduler_type reduce_lr_on_plateau --lr_scheduler_kwargs patience=0"
    # No weight changes, so no evaluation is better than the first.
    argv += " --lr 1e-20 --logging_steps 1 --bf16 False --use_cpu True"
    job = Job(tmp_path / "job", channels, ("--model_id", str(tiny_model), *argv.split()))
    stops: list[Any] = [
        lambda where, step: where == "evaluation" and step == 4,
        lambda where, step: step == 5,
    ]
    usual = Interruptions._agreed
    step = 0

    def agreed(self: Interruptions, where: str) -> tuple[bool, bool]:
        nonlocal step
        step += where == "step"
        if stops and stops[0](where, step):
            stops.pop(0)
            return True, False
        return usual(self, where)

    monkeypatch.setattr(Interruptions, "_agreed", agreed)
    for _ in range(2):
        with pytest.raises(SystemExit):
            job.run_here()
    job.run_here()
    state = TrainerState.load_from_json(
        str(job.checkpoints / f"checkpoint-{step}" / "trainer_state.json")
    )
    evaluated = [entry["step"] for entry in state.log_history if "eval_loss" in entry]
    # The first one in the training is the best; three others are not better.
    assert evaluated == [0, 2, 4, 6, 8]
    rates = [entry["learning_rate"] for entry in state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([1e-20] * 4 + [1e-21] * 2 + [1e-22] * 2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, data: Path) -> Job:
    argv = ("--model_id", str(tiny_model), *ARGV, "--max_steps", "15")
    job = Job(tmp_path_factory.mktemp("job"), {"train": data}, argv)
    job.run_here()
    return job


@pytest.mark.heavy
def test_each_checkpoint_has_its_own_step_though_copies_share_their_memory(
    tmp_path: Path, tiny_model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses: list[set[int]] = []
    take = Resumable._snapshot

    def taken(trainer: Resumable, copies: bool) -> Snapshot:
        actual = take(trainer, copies)
        if copies:
            states = (actual.optimizer or {})["state"].values()
            tensors = [*actual.weights.values(), *(folder["exp_avg"] for folder in states)]
            addresses.append({folder.data_ptr() for folder in tensors})
        return actual

    def slowly(self: Snapshot, folder: Path, write: Any = Snapshot.write) -> None:
        time.sleep(0.2)  # steps go on, and the next copy is asked for
        write(self, folder)

    monkeypatch.setattr(Resumable, "_snapshot", taken)
    monkeypatch.setattr(Snapshot, "write", slowly)
    for name, in_background in (("beside", True), ("within", False)):
        free = None if in_background else 0
        there = SimpleNamespace(available=lambda free=free: free, size=memory.size)
        monkeypatch.setattr(resuming, "memory", there)
        argv = ("--max_steps", "5", "--save_strategy", "steps", "--save_steps", "1",
                "--save_total_limit", "9", "--lr", "1e-3")  # fmt: skip
        run(tmp_path / name, tiny_model, {"train": data}, *argv)
    assert len(addresses) == 4, "the last step's is written in the step"
    assert addresses[0] == addresses[1] == addresses[2] == addresses[3]
    seen = set()
    for step in range(1, 6):
        both = [
            tmp_path / name / "checkpoints" / f"checkpoint-{step}" for name in ("beside", "within")
        ]
        one, other = ((folder / "model.safetensors").read_bytes() for folder in both)
        assert one == other
        seen.add(one)
        moments, theirs = (torch.load(folder / "optimizer.pt")["state"] for folder in both)
        for number, state in moments.items():
            assert all(torch.equal(value, theirs[number][key]) for key, value in state.items())
    assert len(seen) == 5


def test_checkpoints_are_whole_few_and_listed(trained: Job) -> None:
    assert {path.name for path in trained.checkpoints.iterdir()} == {
        "checkpoint-14",
        "checkpoint-15",
    }
    newest = checkpoints.newest(trained.checkpoints)
    assert newest is not None
    assert (newest.path.name, newest.finished) == ("checkpoint-15", True)
    folder = trained.checkpoints / "checkpoint-15"
    manifest = json.loads((folder / checkpoints.MANIFEST).read_text())
    there = {path.name for path in folder.iterdir()} - {checkpoints.MANIFEST}
    assert set(manifest["files"]) == there
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"} < there
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    assert state["state"][0]["step"] == 15


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "no manifest"])
def test_a_damaged_checkpoint_is_skipped_with_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    for step in (1, 2):
        folder = checkpoints.aside(tmp_path, step)
        folder.mkdir(parents=True)
        (folder / "optimizer.pt").write_bytes(b"0123456789")
        checkpoints.publish(tmp_path, step, {"seed": 1}, False)
    file = tmp_path / "checkpoint-2" / "optimizer.pt"
    if damage == "cut":
        file.write_bytes(b"01234")
    elif damage == "flipped":
        file.write_bytes(b"0123456780")
    elif damage == "gone":
        file.unlink()
    else:
        (tmp_path / "checkpoint-2" / checkpoints.MANIFEST).unlink()
    newest = checkpoints.newest(tmp_path)
    assert newest is not None
    assert newest.path.name == "checkpoint-1"
    line = capsys.readouterr().out
    name = checkpoints.MANIFEST if damage == "no manifest" else "optimizer.pt"
    assert "checkpoint-2 is damaged" in line
    assert name in line


@pytest.mark.parametrize(
    "manifest",
    [
        b"", b"\xff", b'""', b"[]", b"{}", b"9", b'{"files": []}', b'{"files": {"a": 1}}',
        b'{"files": {}, "job": 1, "finished": true}', b"[" * 100_000,
        b'{"files": {"a\\u0000": {}}, "job": {}, "finished": true}',
    ],
    ids=lambda manifest: ascii(manifest[:20]),
)  # fmt: skip
def test_a_manifest_of_any_shape_is_read_or_refused(tmp_path: Path, manifest: bytes) -> None:
    (tmp_path / checkpoints.MANIFEST).write_bytes(manifest)
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoints.read(tmp_path)


@pytest.mark.parametrize(
    ("keep", "best", "left"),
    [
        (None, None, [2, 9, 10, 11]),
        (2, None, [10, 11]),
        (2, 2, [2, 11]),
        (1, 9, [9, 11]),
        (3, 11, [9, 10, 11]),
    ],
)
def test_the_newest_and_the_best_are_kept(
    tmp_path: Path, keep: int | None, best: int | None, left: list[int]
) -> None:
    for step in (2, 9, 10, 11):
        (tmp_path / f"checkpoint-{step}").mkdir()
    checkpoints.forget(tmp_path, keep, best and str(tmp_path / f"checkpoint-{best}"))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"checkpoint-{step}" for step in left}


def test_half_written_checkpoints_are_no_checkpoints(tmp_path: Path) -> None:
    folder = checkpoints.aside(tmp_path, 3)
    folder.mkdir(parents=True)
    (folder / "optimizer.pt").write_bytes(b"0")
    assert checkpoints.newest(tmp_path) is None
    checkpoints.clean(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_job_does_not_resume(trained: Job, tmp_path: Path) -> None:
    longer = {"train": write(tmp_path, [*REVIEWS, REVIEWS[0]])}
    changes = ["--batch_size", "4", "--seed", "1", "--class_weight", "balanced"]
    changes += ["--adam_beta2", "0.98"]
    with refused(
        CheckpointError,
        "checkpoint-15 cannot be resumed from, since the job has changed:",
        "samples in a step was 8 (processes 1 x batch size 8 x gradient_accumulation_steps 1) and "
        "is 4 (processes 1 x batch size 4",
        "seed was 42 and is 1",
        "class_weight was its default and is balanced",
        "adam_beta2 was its default and is 0.98",
        "the data has changed",
        "resume_from_checkpoint=False",
    ):
        replace(trained, channels=longer).run_here(*changes)


@pytest.mark.heavy
def test_another_model_does_not_resume(
    trained: Job, tmp_path: Path, tiny_model: Path, preloaded: Mapping[str, str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    weights = load_file(other / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][0] += 1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    changes = ("--model_id", str(other), "--batch_size", "4")
    errors = replace(trained, environ=preloaded).run(*changes, processes=2).errors
    line = next(line for line in errors.splitlines() if "CheckpointError:" in line)
    assert "the model has changed" in line
    assert "samples in a step" not in line, "which another number of processes keeps"
    assert "data" not in line.partition("since")[2].partition("resume_from")[0]


def test_it_starts_anew_where_asked_to(
    tmp_path: Path, trained: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job = replace(trained, base=tmp_path)
    job.run_here("--max_steps", "3", "--save_minutes", "0.00001")
    assert {path.name for path in job.checkpoints.iterdir()} == {"checkpoint-2", "checkpoint-3"}
    capsys.readouterr()
    job.run_here("--max_steps", "3", "--resume_from_checkpoint", "False")
    output = capsys.readouterr().out
    assert "resuming" not in output
    assert "2 earlier checkpoint(s) moved" in output
    assert {path.name for path in job.checkpoints.iterdir()} == {"before-1", "checkpoint-3"}


def test_a_finished_job_whose_checkpoints_were_moved_writes_its_best_weights(
    tmp_path: Path, trained: Job
) -> None:
    argv = ("--max_steps", "6", "--save_steps", "2", "--eval_strategy", "steps", "--eval_steps", "2",
            "--load_best_model_at_end", "True")  # fmt: skip
    channels = {**trained.channels, "validation": write(tmp_path / "validation", REVIEWS[:16])}
    base = replace(trained, channels=channels)
    job, moved = (replace(base, base=tmp_path / name) for name in ("job", "moved"))
    job.run_here(*argv)
    moved.base.mkdir()
    shutil.move(job.checkpoints, moved.checkpoints)
    moved.run_here(*argv)
    assert moved.files == job.files
    best = json.loads((moved.checkpoints / "checkpoint-6" / "trainer_state.json").read_text())
    shutil.rmtree(moved.checkpoints / f"checkpoint-{best['best_global_step']}")
    with pytest.raises(CheckpointError, match=f"checkpoint-{best['best_global_step']} has no"):
        moved.run_here(*argv)
    write(tmp_path / "validation", REVIEWS[1:16])
    with refused(CheckpointError, "the job has changed: the evaluation data has changed."):
        moved.run_here(*argv)


def test_a_loss_that_is_no_number_names_step_and_rows(tmp_path: Path, trained: Job) -> None:
    with pytest.raises(DivergedError) as raised:
        replace(trained, base=tmp_path).run_here(
            "--lr", "1", "--weight_decay", "1e38", "--lr_scheduler_type", "constant"
        )
    for words in (
        "The loss of step",
        "is NaN or infinite. Its batch",
        "Lower learning_rate, or look at these rows.",
    ):
        assert words in str(raised.value)
    assert re.search(r"has (\S+/train.jsonl line \d+(, |\. )){8}", str(raised.value))


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path) -> Job:
    """A job of eight steps."""
    channels = {"train": write(tmp_path / "in", REVIEWS[:64]),
                "test": write(tmp_path / "test", REVIEWS[:16], "test")}  # fmt: skip
    argv = (
        "--model_id",
        str(tiny_model),
        "--batch_size",
        "8",
        "--epochs",
        "1",
        "--lr",
        "1e-3",
        "--bf16",
        "False",
    )
    return Job(tmp_path, channels, argv)


def stop(job: Job, *argv: str, step: int = 2, number: int = signal.SIGTERM) -> None:
    """Train in this process, which gets a signal after a step."""
    usual = Interruptions.on_step_end

    def on_step_end(self: Interruptions, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == step:
            os.kill(os.getpid(), number)
        usual(self, args, state, control, **more)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(SystemExit) as stopped:
        patched.setattr(Interruptions, "on_step_end", on_step_end)
        job.run_here(*argv)
    assert stopped.value.code == EXIT_CODE


def test_the_best_is_left_if_the_best_is_kept(job: Job) -> None:
    # A step without effect is as good as the one before it: the first evaluation is the best.
    argv = "--epochs 2 --lr 1e-20 --load_best_model_at_end True --eval_strategy steps "
    argv += "--eval_steps 2 --save_strategy steps --save_steps 2"
    stop(job, *argv.split(), step=5)
    assert job.metrics["partial"] == {"step": 2, "stopped_at": 5, "of_steps": 16}
    assert "eval_loss" in job.metrics
    best = load_file(job.checkpoints / "checkpoint-2" / "model.safetensors")
    assert all(torch.equal(weight, best[key]) for key, weight in job.weights.items())


def test_without_checkpoints_the_model_is_left_too(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    stop(job, "--save_strategy", "no", number=signal.SIGINT)
    output = capsys.readouterr().out
    assert "nothing is saved: save_strategy=no" in output
    assert "A partial model: training stopped after step 2 of 8, and the weights" in output
    assert job.weights


def test_a_model_that_cannot_be_written_is_absent_and_the_job_resumes(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def save(self: Any, model: Any, weights: Any, tokenizer: Any, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OutputError("The disk is full.")

    monkeypatch.setattr(base.Task, "save", save)
    stop(job)
    assert "warning: no partial model is left: The disk is full." in capsys.readouterr().out
    assert list(job.model.iterdir()) == []
    assert (job.checkpoints / "checkpoint-2").is_dir()


@pytest.mark.heavy
def test_two_processes_with_shards_leave_one_model(job: Job, preloaded: Mapping[str, str]) -> None:
    job.environ = {**preloaded, **QUICK}
    argv = ("--epochs", "6", "--logging_steps", "1", *SHARDED)
    job.interrupt("metric step=2 {'loss'", *argv, processes=2)
    assert job.codes == {EXIT_CODE}, job.log + job.errors
    assert job.log.count("A partial model: training stopped after step") == 1
    kept = job.checkpoints / f"checkpoint-{job.metrics['partial']['step']}" / "model.safetensors"
    saved = load_file(kept)
    assert all(torch.equal(weight, saved[key]) for key, weight in job.weights.items())
