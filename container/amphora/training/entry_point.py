"""Finds the user's code: downloads and unpacks it, and determines how to run it.

Differences from sagemaker-training: a code folder with files does not hide the job's own code; an
archive with members outside its folder is refused; requirements.txt is installed for every kind of
entry point; errors name the step that failed and the reason.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from amphora.common import archives
from amphora.common.errors import CodeError
from amphora.common.packages import PACKAGE, REQUIREMENTS
from amphora.common.variables import image_code
from amphora.contract.job import Job

log = logging.getLogger("amphora")

_SUBMIT = "sagemaker_submit_directory"
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class ProgramKind(Enum):
    SCRIPT = "python script"
    MODULE = "python module"
    COMMAND = "command"


@dataclass(frozen=True, kw_only=True)
class Program:
    root: Path
    kind: ProgramKind
    name: str
    """A path below `root`, or a module's dotted name."""

    @property
    def path(self) -> Path:
        return self.root / self.name

    @property
    def script(self) -> Path | None:
        """Return the Python file that runs first, or None if there is none."""
        if self.kind is ProgramKind.MODULE:
            inside = self.root / Path(*self.name.split("."))
            files = (inside.with_suffix(".py"), inside / "__main__.py")
            return next((file for file in files if file.is_file()), None)
        return self.path if self.kind is ProgramKind.SCRIPT else None

    @property
    def command(self) -> list[str]:
        """Return the words after `python` or torchrun; of a COMMAND, the whole command.

        That is the file itself if it is a binary, else the program of its #! line, else the shell.
        """
        if self.kind is ProgramKind.MODULE:
            return ["-m", self.name]
        if self.kind is ProgramKind.COMMAND:
            with self.path.open("rb") as file:
                start = file.readline(512)
            if start.startswith(b"\x7fELF"):
                return [str(self.path)]
            if start.endswith(b"\r\n"):
                raise CodeError(
                    f"{self.path} has Windows line endings, with which a shell runs other commands"
                    " than written.",
                    f"Convert it: sed -i 's/\\r$//' {self.name}",
                )
            first_line = start.decode("utf-8", "replace").strip()
            named = first_line[2:].strip() if first_line.startswith("#!") else ""
            interpreter = named.split(maxsplit=1) or [shutil.which("bash") or "/bin/sh"]
            return [*interpreter, str(self.path)]
        return [str(self.path)]


def locate(
    job: Job, environ: Mapping[str, str], scratch: Path, code_dir: Path | None = None
) -> Program:
    """Find the job's code; download and unpack it if necessary.

    Args:
        scratch: A folder for downloads; it lives as long as the job.
        code_dir: The folder to unpack an archive in; /opt/ml/code by default.

    Raises CodeError if that fails, or the code lacks the entry point.
    """
    if job.entry_point is None:
        if location := job.sagemaker.get(_SUBMIT):
            raise CodeError(
                f"{_SUBMIT} is {location!r}, but no entry point is named.",
                "Set sagemaker_program to a file of it, or leave out both to train by the recipe.",
            )
        recipe = recipe_dir(environ)
        _check_unnamed(job, recipe)
        return Program(root=recipe, kind=ProgramKind.SCRIPT, name="train.py")
    location = job.submit_directory.removeprefix("file://")
    path = Path(location)
    if location.startswith("s3://"):
        path = scratch / "sourcedir.tar.gz"
        archives.download(location, path, environ)
    if path.is_dir():
        root = path.absolute()
    elif path.is_file():
        root = (code_dir or job.paths.code).absolute()
        if root.exists() and any(root.iterdir()):
            log.info("%s is not empty: the job's code is unpacked into another folder", root)
            root = scratch / "code"
        root.mkdir(parents=True, exist_ok=True)
        archives.unpack(path, root, location)
    else:
        raise CodeError(
            f"sagemaker_submit_directory is {location!r}, which does not exist.",
            "Give s3://bucket/sourcedir.tar.gz, a .tar.gz file or a folder, or mount the code at"
            f" {job.paths.code}.",
        )
    return _entry(root, job.entry_point)


def recipe_dir(environ: Mapping[str, str]) -> Path:
    """Return the folder of the image's recipe. Raises CodeError if it is not there."""
    folder = image_code(environ)
    if not (folder / "train.py").is_file():
        raise CodeError(
            f"The image's recipe is not at {folder / 'train.py'}.",
            "Set AMPHORA_CODE_DIR to the folder that holds it, or sagemaker_program to a script.",
        )
    return folder


def _check_unnamed(job: Job, recipe: Path) -> None:
    """Raise CodeError if the job has a training script that no setting names."""
    for folder in (job.paths.code, job.paths.data / "code"):
        for name in ("train.py", "train.sh"):
            if (folder / name).is_file() and not folder.samefile(recipe):
                submit = "" if folder == job.paths.code else f" and {_SUBMIT}={folder}"
                raise CodeError(
                    f"{folder / name} is in the job, but no entry point is named, so that the"
                    " image's recipe would train in its place.",
                    f"Set sagemaker_program={name}{submit} (hyperparameters) to run it, or remove"
                    " it to train by the recipe.",
                )


def install_steps(source: Program) -> list[str]:
    """Return what pip installs for the code, for `packages.index`."""
    steps = [REQUIREMENTS] if (source.root / REQUIREMENTS).is_file() else []
    if source.kind is not ProgramKind.COMMAND and is_package(source.root):
        steps.append(PACKAGE)
    return steps


def is_package(root: Path) -> bool:
    """Return whether the folder is installed, and its entry point run as a module if it can be.

    As in sagemaker-training, setup.py decides; a pyproject.toml may hold only settings of tools.
    """
    return (root / "setup.py").is_file()


def _entry(root: Path, name: str) -> Program:
    path = root / name
    if archives.leaves(Path(name)) or name.startswith("-") or not name.strip():
        raise CodeError(
            f"sagemaker_program is {name!r}.",
            "Give a path within the code folder, such as train.py.",
        )
    module = name.removesuffix(".py").replace("/", ".")
    if is_package(root) and not name.endswith((".sh", ".PY")) and _MODULE.fullmatch(module):
        return Program(root=root, kind=ProgramKind.MODULE, name=module)
    if name.endswith(".ipynb"):
        raise CodeError(
            f"sagemaker_program is {name!r}, a notebook, which is not a program.",
            f"Convert it (jupyter nbconvert --to script {name}) and name the .py file.",
        )
    if path.is_file():
        kind = ProgramKind.SCRIPT if path.suffix.lower() == ".py" else ProgramKind.COMMAND
        return Program(root=root, kind=kind, name=name)
    if (path / "__main__.py").is_file() and _MODULE.fullmatch(module):
        return Program(root=root, kind=ProgramKind.MODULE, name=module)
    problem = "is a folder without __main__.py" if path.is_dir() else "does not exist"
    raise CodeError(
        f"sagemaker_program is {name!r}, but {path} {problem} "
        f"(existing files: {list_files(root)}).",
        "Name a file of the code folder, or mount the code at that path.",
    )


def list_files(root: Path) -> str:
    """Return the files of a folder and of the folders in it for a message, or 'none'."""
    files = (file for pattern in ("*", "*/*") for file in root.glob(pattern) if file.is_file())
    return ", ".join(sorted(str(file.relative_to(root)) for file in files)[:20]) or "none"
