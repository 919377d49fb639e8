"""Checkpoints that are whole or not there: written aside, synced, renamed, verified when read.

A checkpoint is a folder `checkpoint-<step>` with a manifest of what it holds and which job it is
of. A kill at any moment leaves the checkpoints that were there before.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe.console import say
from recipe.errors import CheckpointError
from recipe.storage import atomic, checksums

MANIFEST = "manifest.json"
FINGERPRINTS = ("data", "model")
"""What a job is told by in a digest, which says nothing to a reader."""
VERSION = 2
"""Of what is in a checkpoint, and how."""
SAMPLES, CUT = "samples in a step", "cut"
"""What must stay, and how it was cut into batches for the processes, which may change."""
_NAME = re.compile(r"checkpoint-(\d+)")
_ASIDE, _REPLACED = ".writing-", ".replaced-"
# What taking a manifest apart raises that is no JSON, or other JSON.
_MISSHAPEN = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
_REMEDY = (
    "Free space there or name another folder in output_dir; save_total_limit bounds how many "
    "checkpoints are kept. The checkpoints saved before are whole."
)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found to be whole."""

    path: Path
    job: Mapping[str, Any]
    """What its job was: see `differences`."""
    finished: bool
    """Whether training had ended with it."""


def check_writable(folder: Path) -> None:
    """See that the folder of checkpoints can be written to, or made.

    Raises:
        CheckpointError: it cannot.
    """
    remedy = (
        "Name another one in the hyperparameter output_dir, or train without checkpoints by "
        "save_strategy=no."
    )
    atomic.check_writable("The folder of checkpoints", folder, remedy, CheckpointError)


def clean(folder: Path) -> None:
    """Remove what a killed process left half-written."""
    for left in (*folder.glob(f"{_ASIDE}*"), *folder.glob(f"{_REPLACED}*")):
        shutil.rmtree(left)


def aside(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written before `publish`."""
    return folder / f"{_ASIDE}{step}" / f"checkpoint-{step}"


@contextlib.contextmanager
def writing(folder: Path, step: int, needed: int) -> Iterator[Path]:
    """The folder `aside` for the checkpoint of `step`; of one that fails nothing stays.

    Args:
        needed: Bytes that it takes, about.

    Raises:
        CheckpointError: it cannot be written.
    """
    written = aside(folder, step)
    with atomic.explained("A checkpoint", folder, needed, _REMEDY, CheckpointError):
        try:
            yield written
        except BaseException:
            shutil.rmtree(written.parent, ignore_errors=True)
            raise


def publish(folder: Path, step: int, job: Mapping[str, Any], finished: bool) -> Path:
    """Give the checkpoint written `aside` its place, in the stead of one of the same step."""
    written, place = aside(folder, step), folder / f"checkpoint-{step}"
    files = {str(path.relative_to(written)): _facts(path) for path in _files(written)}
    manifest = {"job": job, "finished": finished, "files": files}
    (written / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in (*_files(written), written):
        _sync(path)
    replaced = folder / f"{_REPLACED}{step}"
    if place.exists():
        place.rename(replaced)
    written.rename(place)
    _sync(folder)
    shutil.rmtree(replaced, ignore_errors=True)
    written.parent.rmdir()
    return place


def forget(folder: Path, keep: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints but `keep`; the newest and the best one stay."""
    by_step = _by_step(folder)
    needed = {by_step[-1], *(path for path in by_step if str(path) == best)}
    old = [path for path in by_step if path not in needed]
    for path in old[: max(0, len(by_step) - max(keep, len(needed)))] if keep else []:
        shutil.rmtree(path)


def newest(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint; damaged ones are skipped with a line each."""
    for path in reversed(_by_step(folder)):
        try:
            return read(path)
        except CheckpointError as error:
            say(f"{error} It is not used.")
    return None


def read(path: Path) -> Checkpoint:
    """The checkpoint in `path`.

    Raises:
        CheckpointError: it is not whole: the message says which file.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        for name, facts in manifest["files"].items():
            if _facts(path / name) != facts:
                raise CheckpointError(f"Checkpoint {path} is damaged: {name} has changed.")
        return Checkpoint(path, dict(manifest["job"]), manifest["finished"])
    except (OSError, *_MISSHAPEN) as error:
        what = error.filename if isinstance(error, OSError) else MANIFEST
        raise CheckpointError(f"Checkpoint {path} is damaged: {what} cannot be read.") from error


def set_aside(folder: Path) -> None:
    """Move all checkpoints into a folder of their own, where no job resumes from them."""
    by_step = _by_step(folder)
    if not by_step:
        return
    number = sum(1 for _ in folder.glob("before-*")) + 1
    place = folder / f"before-{number}"
    place.mkdir()
    for path in by_step:
        path.rename(place / path.name)
    say(f"{len(by_step)} checkpoint(s) of before moved to {place}")


def check_same(saved_one: Checkpoint, job: Mapping[str, Any]) -> None:
    """See that a checkpoint is of this job.

    Raises:
        CheckpointError: it is not; names what differs.
    """
    was = saved_one.job
    # What is not its default has an entry: one that is only in the checkpoint has changed, too.
    keys = [key for key in {**job, **was} if key != CUT and was.get(key) != job.get(key)]
    if keys:
        listed = "; ".join(_change(key, was, job) for key in keys)
        raise CheckpointError(
            f"Checkpoint {saved_one.path} cannot be resumed from, since it would not end as the "
            f"job that saved it: {listed}.",
            "Start with the same, or give resume_from_checkpoint=False to train from the start, "
            "or another output_dir.",
        )


def _change(key: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    if key in FINGERPRINTS:
        return f"the {key} has changed"
    shown = ["its default" if job.get(key) is None else str(job[key]) for job in (was, now)]
    if key == SAMPLES:
        shown = [
            f"{text} (processes {cut.get('processes')} x batch size {cut.get('size')} x "
            f"gradient_accumulation_steps {cut.get('accumulation')})"
            for text, cut in zip(shown, (job.get(CUT) or {} for job in (was, now)), strict=True)
        ]
    return f"{key} was {shown[0]} and is {shown[1]}"


def newest_job(folder: Path, is_one: bool) -> Mapping[str, Any]:
    """What the newest checkpoint in `folder` says of its job, before anything of it is verified.

    Args:
        is_one: Whether `folder` is the checkpoint itself.
    """
    for path in [folder] if is_one else reversed(_by_step(folder)):
        try:
            return dict(json.loads((path / MANIFEST).read_text())["job"])
        except (OSError, *_MISSHAPEN):
            continue
    return {}


def _by_step(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first."""
    named = [(path, _NAME.fullmatch(path.name)) for path in folder.glob("checkpoint-*")]
    numbered = [(int(match[1]), path) for path, match in named if match and path.is_dir()]
    return [path for _, path in sorted(numbered)]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _facts(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": checksums.digest(path)}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
