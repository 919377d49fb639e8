"""Writing what a job leaves behind: whole or not at all, with errors that say what to do."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from recipe.errors import OutputError, RecipeError

_ARRIVING = ".arriving-"


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A new folder to write to, whose entries become those of `target` when the block ends well.

    An entry of the same name is replaced, others stay. After an error, `target` has nothing of
    the new folder. It lies in `target`, which may be a mount point: so giving the entries their
    places cannot fail for want of space.
    """
    target.mkdir(parents=True, exist_ok=True)
    # What a killed process left would be packed with the model.
    for left in target.glob(f"{_ARRIVING}*"):
        shutil.rmtree(left)
    aside = Path(tempfile.mkdtemp(prefix=_ARRIVING, dir=target))
    try:
        yield aside
        for entry in sorted(aside.iterdir()):
            place = target / entry.name
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place)
            entry.replace(place)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def check_writable(
    what: str, folder: Path, remedy: str, kind: type[RecipeError] = OutputError
) -> None:
    """See that `folder` can be written to or, where it is not there yet, be made.

    Raises:
        RecipeError: of `kind`; it cannot.
    """
    try:
        with tempfile.TemporaryFile(dir=_existing(folder)):
            pass
    except OSError as error:
        raise kind(f"{what}, {folder}, cannot be written to: {error.strerror}.", remedy) from error


@contextlib.contextmanager
def explained(
    what: str, folder: Path, needed: int, remedy: str, kind: type[RecipeError] = OutputError
) -> Iterator[None]:
    """Turns what goes wrong in writing into an error that says what to do.

    Args:
        needed: Bytes that are about to be written, about.

    Raises:
        RecipeError: of `kind`, for an OSError and what torch and safetensors raise in its place.
    """
    # Asked before: a file system that a half-written file has filled says nothing.
    free = free_bytes(folder)
    try:
        yield
    except Exception as error:
        # torch raises a RuntimeError for an OSError; safetensors a class of its own, or no class.
        if not (
            isinstance(error, (OSError, RuntimeError))
            or type(error) is Exception
            or "Safetensor" in type(error).__name__
        ):
            raise
        raise kind(
            f"{what} cannot be written to {folder}: {str(error).splitlines()[0]}. It takes about "
            f"{needed / 1e6:.1f} MB; {free / 1e6:.1f} MB were free.",
            remedy,
        ) from error


@contextlib.contextmanager
def results(what: str, folder: Path, needed: int, remedy: str) -> Iterator[Path]:
    """`whole_folder`, `explained`."""
    with explained(what, folder, needed, remedy), whole_folder(folder) as aside:
        yield aside


def free_bytes(folder: Path) -> int:
    """What is free on the disk of a folder, which may not be there yet."""
    return shutil.disk_usage(_existing(folder)).free


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())
