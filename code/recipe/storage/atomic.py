"""Write the results of a job completely or not at all, with errors that name a remedy."""

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
    """Yield a new folder whose entries move to `target` if the block succeeds.

    Entries of the same name are replaced, others stay. After an error, `target` is unchanged. The
    new folder is inside `target`, which may be a mount point, so the move needs no space.
    """
    target.mkdir(parents=True, exist_ok=True)
    # SageMaker would pack the remains of a killed process with the model.
    for left in target.glob(f"{_ARRIVING}*"):
        shutil.rmtree(left)
    aside = Path(tempfile.mkdtemp(prefix=_ARRIVING, dir=target))
    try:
        yield aside
        for entry in sorted(aside.iterdir()):
            destination = target / entry.name
            if destination.is_dir() and not destination.is_symlink():
                shutil.rmtree(destination)
            entry.replace(destination)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def check_writable(
    what: str, folder: Path, remedy: str, kind: type[RecipeError] = OutputError
) -> None:
    """Check that `folder` can be written to or created.

    Raises:
        RecipeError: Of class `kind`, if it cannot.
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
    """Convert errors of writing into an error with sizes and a remedy.

    Args:
        needed: Approximate bytes to be written.

    Raises:
        RecipeError: Of class `kind`, for an OSError and what torch and safetensors raise instead.
    """
    # Measured first: afterwards, an incomplete file may fill the disk.
    free = free_bytes(folder)
    try:
        yield
    except Exception as error:
        # For an OSError, torch raises RuntimeError and safetensors SafetensorError or Exception.
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
    """Combine `whole_folder` and `explained`."""
    with explained(what, folder, needed, remedy), whole_folder(folder) as aside:
        yield aside


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk of a folder, which need not exist."""
    return shutil.disk_usage(_existing(folder)).free


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())
