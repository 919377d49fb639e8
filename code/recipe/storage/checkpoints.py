"""Write and read checkpoints that are complete or absent: synced, renamed, verified when read.

A checkpoint is a folder `checkpoint-<step>` with a manifest of its files and its job. If the
process is killed at any moment, the earlier checkpoints stay valid.
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
FINGERPRINTS = ("data", "evaluation data", "model")
"""Keys whose values are hashes, which messages do not show."""
VERSION = 2
"""Version of the contents of a checkpoint."""
SAMPLES, CUT = "samples in a step", "cut"
"""The samples of a step must stay; their split over processes and batches may change."""
_NAME = re.compile(r"checkpoint-(\d+)")
_ASIDE, _REPLACED = ".writing-", ".replaced-"
# Raised by reading a manifest that is not JSON or has other keys.
_MISSHAPEN = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
_REMEDY = (
    "Free space there or set output_dir to another folder; save_total_limit bounds how many "
    "checkpoints are kept. The earlier checkpoints are intact."
)


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint."""

    path: Path
    job: Mapping[str, Any]
    """What identifies its job: see `check_same`."""
    finished: bool
    """Whether training had ended."""


def check_writable(folder: Path) -> None:
    """Check that the checkpoints folder can be written to or created.

    Raises:
        CheckpointError: It cannot.
    """
    remedy = (
        "Set the hyperparameter output_dir to another folder, or save_strategy=no to train without "
        "checkpoints."
    )
    atomic.check_writable("The checkpoints folder", folder, remedy, CheckpointError)


def clean(folder: Path) -> None:
    """Remove incomplete checkpoints of a killed process."""
    for left in (*folder.glob(f"{_ASIDE}*"), *folder.glob(f"{_REPLACED}*")):
        shutil.rmtree(left)


def aside(folder: Path, step: int) -> Path:
    """Return the folder in which a checkpoint is written before `publish`."""
    return folder / f"{_ASIDE}{step}" / f"checkpoint-{step}"


@contextlib.contextmanager
def writing(folder: Path, step: int, needed: int) -> Iterator[Path]:
    """Yield the folder `aside` for the checkpoint of `step`, and remove it after an error.

    Args:
        needed: Approximate size in bytes.

    Raises:
        CheckpointError: The checkpoint cannot be written.
    """
    written = aside(folder, step)
    with atomic.explained("A checkpoint", folder, needed, _REMEDY, CheckpointError):
        try:
            yield written
        except BaseException:
            shutil.rmtree(written.parent, ignore_errors=True)
            raise


def publish(folder: Path, step: int, job: Mapping[str, Any], finished: bool) -> Path:
    """Move the checkpoint from `aside` to its place, replacing one of the same step."""
    written, destination = aside(folder, step), folder / f"checkpoint-{step}"
    files = {str(path.relative_to(written)): _facts(path) for path in _files(written)}
    manifest = {"job": job, "finished": finished, "files": files}
    (written / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in (*_files(written), written):
        _sync(path)
    replaced = folder / f"{_REPLACED}{step}"
    if destination.exists():
        destination.rename(replaced)
    written.rename(destination)
    _sync(folder)
    shutil.rmtree(replaced, ignore_errors=True)
    written.parent.rmdir()
    return destination


def forget(folder: Path, keep: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints, so that `keep` remain, with the newest and the best."""
    by_step = _sorted_checkpoints(folder)
    needed = {by_step[-1], *(path for path in by_step if str(path) == best)}
    old = [path for path in by_step if path not in needed]
    for path in old[: max(0, len(by_step) - max(keep, len(needed)))] if keep else []:
        shutil.rmtree(path)


def newest(folder: Path) -> Checkpoint | None:
    """Return the newest intact checkpoint; log and skip damaged ones."""
    for path in reversed(_sorted_checkpoints(folder)):
        try:
            return read(path)
        except CheckpointError as error:
            say(f"{error} It is skipped.")
    return None


def read(path: Path) -> Checkpoint:
    """Read and verify the checkpoint in `path`.

    Raises:
        CheckpointError: It is damaged; the message names the file.
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
    """Move all checkpoints to a subfolder, from which no job resumes."""
    by_step = _sorted_checkpoints(folder)
    if not by_step:
        return
    number = sum(1 for _ in folder.glob("before-*")) + 1
    destination = folder / f"before-{number}"
    destination.mkdir()
    for path in by_step:
        path.rename(destination / path.name)
    say(f"{len(by_step)} earlier checkpoint(s) moved to {destination}")


def check_same(saved_one: Checkpoint, job: Mapping[str, Any]) -> None:
    """Check that a checkpoint belongs to this job.

    Raises:
        CheckpointError: It does not; the message names the differences.
    """
    was, changes = saved_one.job, []
    # Only values that are not defaults are listed, so a key in one job only is a difference.
    for key in {**job, **was}:
        if key == CUT or was.get(key) == job.get(key):
            continue
        if key in FINGERPRINTS:
            changes.append(f"the {key} has changed")
            continue
        shown = []
        for one in (was, job):
            shown.append("its default" if one.get(key) is None else str(one[key]))
            if key == SAMPLES:
                cut = one.get(CUT) or {}
                shown[-1] += (
                    f" (processes {cut.get('processes')} x batch size {cut.get('size')} x "
                    f"gradient_accumulation_steps {cut.get('accumulation')})"
                )
        changes.append(f"{key} was {shown[0]} and is {shown[1]}")
    if changes:
        raise CheckpointError(
            f"Checkpoint {saved_one.path} cannot be resumed from, since the job has changed: "
            f"{'; '.join(changes)}.",
            "Use the former values; or set resume_from_checkpoint=False to train from the "
            "beginning, or another output_dir.",
        )


def requested(value: Any) -> bool | Path:
    """Return what resume_from_checkpoint says: whether to resume from the newest checkpoint, or the
    folder of another one. None, the default, resumes."""
    known: Mapping[str, bool] = {"": True, "true": True, "1": True, "false": False, "0": False}
    word = "" if value is None else str(value)
    return known.get(word.lower(), Path(word))


def requested_job(folder: Path, value: Any) -> Mapping[str, Any]:
    """Return what identifies the job of the checkpoint to resume from, not verified.

    Args:
        folder: The folder of checkpoints.
        value: resume_from_checkpoint.
    """
    named = requested(value)
    every = reversed(_sorted_checkpoints(folder)) if named else ()
    for path in [named] if isinstance(named, Path) else every:
        try:
            return dict(json.loads((path / MANIFEST).read_text())["job"])
        except (OSError, *_MISSHAPEN):
            continue
    return {}


def _sorted_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, oldest first."""
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
