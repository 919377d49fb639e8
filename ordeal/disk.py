"""Disks that are full, read-only or wrong, for trainings and for served models."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ordeal.common import Trial, failure, make_model, start
from ordeal.serving import Server
from tests.support.job_tree import Tree
from tests.support.words import write_reviews

FULL = "on a disk of any size a training ends well, or with words about the space, and no model"
LOCKED = "a read-only folder is an error that names it"
DAMAGED = "damaged checkpoints: a training ends with the undisturbed weights, or says why not"
SERVED = "a damaged model is refused with words, or answers as the whole one does"
BEGUN = "a training that starts from a damaged model says so, or ends as from the whole one"
FAILING = "where writing fails for another reason, an error says what and where; no model is left"
PROMISES = (FULL, LOCKED, FAILING, DAMAGED, SERVED, BEGUN)


def run(trial: Trial) -> None:
    """Train with the recipe; then serve damaged copies of its model."""
    model = make_model(trial.folder / "pretrained")
    data = trial.folder / "train"
    data.mkdir()
    write_reviews(data / "train.csv", 90)
    whole = _job(trial, "whole", model, data)
    assert _train(trial, whole) == 0, failure(whole)
    size = sum(path.stat().st_size for path in whole.rglob("*") if path.is_file()) // 1024
    shares = (0.5,) if trial.short else (0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 1.5)
    if os.geteuid() == 0 and shutil.which("mount") is not None:
        for share in shares:
            _full(trial, f"full-{share}", model, data, int(size * share) + 8)
        for folder in ("model", "checkpoints", "output")[: 1 if trial.short else 3]:
            _read_only(trial, folder, model, data)
    for share in shares:
        _failing(trial, f"failing-{share}", model, data, int(share * 100_000))
    for number in range(1 if trial.short else 24):
        if trial.has_time():
            _damaged_checkpoints(trial, number, whole, model, data)
    expected = _answer_of(trial, whole / "model")
    for number in range(2 if trial.short else 30):
        if trial.has_time():
            _served(trial, number, whole / "model", expected)
    again = _job(trial, "again", whole / "model", data)
    assert _train(trial, again) == 0, failure(again)
    for number in range(1 if trial.short else 12):
        if trial.has_time():
            _begun(trial, number, again, whole / "model", data)


def _job(trial: Trial, name: str, model: Path, data: Path) -> Path:
    base = trial.folder / name
    hyperparameters = {
        "model_name_or_path": str(model), "epochs": 1, "batch_size": 8, "save_steps": 3,
        "max_length": 16, "save_total_limit": 3,
    }  # fmt: skip
    Tree(base).configure(hyperparameters, inputdataconfig={"train": {}})
    (base / "input" / "data").mkdir(parents=True)
    (base / "input" / "data" / "train").symlink_to(data)
    return base


def _train(trial: Trial, base: Path) -> int:
    return start(base, "train", trial.folder / f"{base.name}.log").wait(300)


@contextmanager
def _mounted(path: Path, options: str) -> Iterator[bool]:
    """Mount a tmpfs during a block; False without the right to, and the promise stays untried."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    is_mounted = subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", str(path)], check=True)


def _full(trial: Trial, name: str, model: Path, data: Path, kilobytes: int) -> None:
    base = trial.folder / name
    with _mounted(base, f"size={kilobytes}k") as is_mounted:
        if not is_mounted:
            return
        code = _train(trial, _job(trial, name, model, data))
        text = failure(base) or (trial.folder / f"{name}.log").read_text()
        is_whole = (base / "model" / "model.safetensors").is_file()
        is_reported = re.search(r"No space left|are free|cannot be written|disk|space", text[:2000])
        weights = list((base / "model").glob("*.safetensors"))
        fine = is_whole if code == 0 else is_reported and not weights
        trial.check(FULL, bool(fine), (name, code, text[:600], list((base / "model").glob("*"))))
        trial.count("ended well" if code == 0 else "refused for space")


def _read_only(trial: Trial, folder: str, model: Path, data: Path) -> None:
    base = _job(trial, f"locked-{folder}", model, data)
    with _mounted(base / folder, "ro,size=1m") as is_mounted:
        if not is_mounted:
            return
        code = _train(trial, base)
        text = failure(base) + (trial.folder / f"{base.name}.log").read_text()
        is_named = str(base / folder) in text
        trial.check(LOCKED, code != 0 and is_named, (folder, code, text[-1200:]))


def _failing(trial: Trial, name: str, model: Path, data: Path, most: int) -> None:
    """Train while no file can grow beyond `most` bytes (EFBIG), with room on the disk."""
    if shutil.which("prlimit") is None:
        return
    base = _job(trial, name, model, data)
    launcher = ["prlimit", f"--fsize={most}"]
    job = start(base, "train", trial.folder / f"{name}.log", launcher)
    code, text = job.wait(300), failure(base)
    is_whole = (base / "model" / "model.safetensors").is_file()
    fine = is_whole if code == 0 else "cannot be written" in text and str(base) in text
    trial.check(FAILING, bool(fine), (most, code, text[:600]))
    trial.check(FAILING, code == 0 or not list((base / "model").glob("*")), most)


def _damage(trial: Trial, path: Path) -> str:
    """Cut, flip a bit of, empty or remove a file; return what was done."""
    data = bytearray(path.read_bytes())
    how = trial.random.choice(("cut", "flip", "empty", "remove"))
    offset = trial.random.randrange(len(data))
    if how == "remove":
        path.unlink()
    else:
        if how == "flip":
            data[offset] ^= 1 << trial.random.randrange(8)
        path.write_bytes(data[:offset] if how == "cut" else data if how == "flip" else b"")
    return f"{how} at {offset} of {path.name}"


def _damaged_checkpoints(trial: Trial, number: int, whole: Path, model: Path, data: Path) -> None:
    """Resume from checkpoints of which some are damaged."""
    base = _job(trial, f"damaged-{number}", model, data)
    shutil.copytree(whole / "checkpoints", base / "checkpoints")
    done = []
    for checkpoint in sorted((base / "checkpoints").glob("checkpoint-*")):
        if trial.random.random() < 0.7:
            files = sorted(path for path in checkpoint.rglob("*") if path.stat().st_size)
            done.append(f"{checkpoint.name}: {_damage(trial, trial.random.choice(files))}")
    code = _train(trial, base)
    weights = [folder / "model" / "model.safetensors" for folder in (base, whole)]
    same = code == 0 and weights[0].read_bytes() == weights[1].read_bytes()
    is_reported = code != 0 and "Checkpoint" in failure(base)
    trial.check(DAMAGED, same or is_reported, (done, code, failure(base)[:600]))


def _damaged_model(trial: Trial, good: Path, model_folder: Path) -> str:
    """Copy a model and damage one file; return what was done."""
    shutil.copytree(good, model_folder)
    weights = "model.safetensors"
    names = (weights, weights, "config.json", "tokenizer.json", "SHA256SUMS")
    return _damage(trial, model_folder / trial.random.choice(names))


def _served(trial: Trial, number: int, good: Path, expected: str) -> None:
    """Serve a model with one damaged file."""
    undamaged = Trial.begin("served", [], trial.folder / f"served-{number}", 0, True)
    done = _damaged_model(trial, good, undamaged.folder / "model")
    server = Server(undamaged, workers=1)
    try:
        with server:
            status, body = server.post()
            same = status == 200 and json.loads(body) == json.loads(expected)
            trial.count("served in spite of it")
            trial.check(SERVED, same, (done, status, body, expected))
    except AssertionError:
        server.process.wait()
        text = server.log
        last = text.strip().splitlines()[-1]
        trial.count("refused to serve")
        trial.check(SERVED, "cannot be served" in last or "holds" in last, (done, last))


def _begun(trial: Trial, number: int, again: Path, good: Path, data: Path) -> None:
    """Train from a model with one damaged file."""
    start = trial.folder / f"start-{number}"
    done = _damaged_model(trial, good, start)
    base = _job(trial, f"begun-{number}", start, data)
    code = _train(trial, base)
    weights = [folder / "model" / "model.safetensors" for folder in (base, again)]
    same = code == 0 and weights[0].read_bytes() == weights[1].read_bytes()
    is_reported = code != 0 and str(start) in failure(base) and "Error" in failure(base)
    trial.check(BEGUN, same or is_reported, (done, code, failure(base)[:600]))


def _answer_of(trial: Trial, model: Path) -> str:
    undamaged = Trial.begin("disk/undamaged", [], trial.folder / "undamaged", 0, True)
    shutil.copytree(model, undamaged.folder / "model")
    with Server(undamaged, workers=1) as server:
        return server.post()[1].decode()
