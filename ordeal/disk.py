"""Disks that are full, read-only or wrong, for trainings and for served models.

Not tried: a bit flipped within a served model's weights. safetensors has no checksum to see it by.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

from ordeal.common import Trial, configure, failure, made_elsewhere, reviews, start
from ordeal.serving import Server, copy_model

FULL = "on a disk of any size a training ends well, or with words about the space, and no model"
LOCKED = "a read-only folder is an error that names it"
DAMAGED = "damaged checkpoints: a training ends with the undisturbed weights, or says why not"
SERVED = "a damaged model is refused with words, or answers as the whole one does"
PROMISES = (FULL, LOCKED, DAMAGED, SERVED)


def run(trial: Trial) -> None:
    """Trainings by the recipe; then servers, each on a copy of one model."""
    model = made_elsewhere(trial.folder / "pretrained")
    data = trial.folder / "train"
    data.mkdir()
    reviews(data / "train.csv", 90)
    whole = _job(trial, "whole", model, data)
    assert _train(trial, whole) == 0, failure(whole)
    size = sum(path.stat().st_size for path in whole.rglob("*") if path.is_file()) // 1024
    shares = (0.5,) if trial.short else (0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 1.5)
    if _may_mount():
        for share in shares:
            _full(trial, f"full-{share}", model, data, int(size * share) + 8)
        for folder in ("model", "checkpoints", "output")[: 1 if trial.short else 3]:
            _read_only(trial, folder, model, data)
    for number in range(1 if trial.short else 24):
        if trial.has_time():
            _damaged_checkpoints(trial, number, whole, model, data)
    for number in range(2 if trial.short else 30):
        if trial.has_time():
            _served(trial, number)


def _job(trial: Trial, name: str, model: Path, data: Path) -> Path:
    base = trial.folder / name
    hyperparameters = {
        "model_name_or_path": str(model), "epochs": 1, "batch_size": 8, "save_steps": 3,
        "max_length": 16, "save_total_limit": 3,
    }  # fmt: skip
    configure(base, hyperparameters, inputdataconfig={"train": {}})
    (base / "input" / "data").mkdir(parents=True)
    (base / "input" / "data" / "train").symlink_to(data)
    return base


def _train(trial: Trial, base: Path) -> int:
    return start(base, "train", trial.folder / f"{base.name}.log").wait(300)


def _may_mount() -> bool:
    return os.geteuid() == 0 and shutil.which("mount") is not None


def _full(trial: Trial, name: str, model: Path, data: Path, kilobytes: int) -> None:
    base = trial.folder / name
    base.mkdir()
    options = ["-o", f"size={kilobytes}k", "tmpfs", str(base)]
    if subprocess.run(["mount", "-t", "tmpfs", *options], capture_output=True).returncode:
        return  # No right to mount: the promise stays untried, and the table says so.
    try:
        code = _train(trial, _job(trial, name, model, data))
        text = failure(base) or (trial.folder / f"{name}.log").read_text()
        is_whole = (base / "model" / "model.safetensors").is_file()
        said = re.search(r"No space left|are free|cannot be written|disk|space", text[:2000])
        fine = is_whole if code == 0 else said and not list((base / "model").glob("*.safetensors"))
        trial.check(FULL, bool(fine), (name, code, text[:600], list((base / "model").glob("*"))))
        trial.count("ended well" if code == 0 else "refused for space")
    finally:
        subprocess.run(["umount", str(base)], check=True)


def _read_only(trial: Trial, folder: str, model: Path, data: Path) -> None:
    base = _job(trial, f"locked-{folder}", model, data)
    place = base / folder
    place.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(place)]
    if subprocess.run(mounted, capture_output=True).returncode:
        return
    try:
        code = _train(trial, base)
        text = failure(base) + (trial.folder / f"{base.name}.log").read_text()
        trial.check(LOCKED, code != 0 and str(place) in text, (folder, code, text[-1200:]))
    finally:
        subprocess.run(["umount", str(place)], check=True)


def _damage(trial: Trial, path: Path) -> str:
    """Cut, flip a bit of, empty or remove a file; what was done."""
    data = bytearray(path.read_bytes())
    how = trial.random.choice(("cut", "flip", "empty", "remove"))
    # Of weights as they are served, the header only: see above.
    is_served = path.name == "model.safetensors" and path.parent.name == "model"
    most = 8 + int.from_bytes(data[:8], "little") if is_served and how == "flip" else len(data)
    at = trial.random.randrange(most)
    if how == "remove":
        path.unlink()
    else:
        if how == "flip":
            data[at] ^= 1 << trial.random.randrange(8)
        path.write_bytes(data[:at] if how == "cut" else data if how == "flip" else b"")
    return f"{how} at {at} of {path.name}"


def _damaged_checkpoints(trial: Trial, number: int, whole: Path, model: Path, data: Path) -> None:
    """As after a kill before the model was written, with something wrong in some checkpoints."""
    base = _job(trial, f"damaged-{number}", model, data)
    shutil.copytree(whole / "checkpoints", base / "checkpoints")
    done = []
    for checkpoint in sorted((base / "checkpoints").glob("checkpoint-*")):
        if trial.random.random() < 0.7:
            files = sorted(path for path in checkpoint.rglob("*") if path.stat().st_size)
            done.append(f"{checkpoint.name}: {_damage(trial, trial.random.choice(files))}")
    code = _train(trial, base)
    weights = [each / "model" / "model.safetensors" for each in (base, whole)]
    same = code == 0 and weights[0].read_bytes() == weights[1].read_bytes()
    said = code != 0 and "Checkpoint" in failure(base)
    trial.check(DAMAGED, same or said, (done, code, failure(base)[:600]))


def _served(trial: Trial, number: int) -> None:
    """A model with one damaged file, by a server of its own."""
    good = trial.folder / "pretrained"
    own = Trial.begin("served", [], trial.folder / f"served-{number}", 0, True)
    copy_model(good, own.folder / "model")
    names = ("model.safetensors", "model.safetensors", "config.json", "tokenizer.json")
    done = _damage(trial, own.folder / "model" / trial.random.choice(names))
    expected = trial.figures.setdefault("undamaged answer", _answer_of(trial, good))
    server = Server(own, workers=1)
    try:
        with server:
            status, body = server.invoke()
            same = status == 200 and json.loads(body) == json.loads(expected)
            trial.count("served in spite of it")
            trial.check(SERVED, same, (done, status, body, expected))
    except AssertionError:
        server.process.wait()
        text = server.text
        last = text.strip().splitlines()[-1]
        trial.count("refused to serve")
        trial.check(SERVED, "cannot be served" in last or "holds" in last, (done, last))


def _answer_of(trial: Trial, model: Path) -> str:
    own = Trial.begin("disk/undamaged", [], trial.folder / "undamaged", 0, True)
    copy_model(model, own.folder / "model")
    with Server(own, workers=1) as server:
        return server.invoke()[1].decode()
