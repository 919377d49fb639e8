"""The user's code: fetched, unpacked and installed, and what kind of program it is.

Unlike sagemaker-training: a code folder that is not empty does not hide the job's own code; the
archive is refused rather than bent where it points outside; requirements.txt counts for every kind
of entry point; and a step that fails says which and why.
"""

from __future__ import annotations

import gzip
import io
import logging
import re
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from urllib.parse import urlsplit

from amphora.contract import Job
from amphora.errors import CodeError

log = logging.getLogger("amphora")

MAX_UNPACKED_BYTES = 2 * 1024**3
MAX_MEMBERS = 100_000
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
# What reading a tar file raises that is cut short, or made up.
_BROKEN = (
    tarfile.TarError, EOFError, OSError, zlib.error, ValueError, OverflowError, KeyError,
    RuntimeError,
)  # fmt: skip
_PACKAGE_TABLE = re.compile(r"^\[(project|build-system)\]", re.MULTILINE)


class Kind(Enum):
    """How an entry point is run."""

    SCRIPT = "python script"
    MODULE = "python module"
    COMMAND = "command"


@dataclass(frozen=True, kw_only=True)
class Source:
    """The code of a job, ready to run."""

    root: Path
    kind: Kind
    name: str
    """A path below `root`, or a module's dotted name."""

    @property
    def path(self) -> Path:
        return self.root / self.name

    @property
    def command(self) -> list[str]:
        """What follows `python` (or torchrun); for a command, the whole of it."""
        if self.kind is Kind.MODULE:
            return ["-m", self.name]
        if self.kind is Kind.COMMAND:
            return [*_interpreter(self.path), str(self.path)]
        return [str(self.path)]


def locate(
    job: Job, environ: Mapping[str, str], scratch: Path, code_dir: Path | None = None
) -> Source:
    """Find the job's code, fetching and unpacking it where it is elsewhere.

    Args:
        scratch: A folder for what is fetched; it lives as long as the job.
        code_dir: Where an archive is unpacked; default /opt/ml/code.

    Raises:
        CodeError: The code cannot be fetched or unpacked, or the entry point is not in it.
    """
    if job.entry_point is None:
        return Source(root=recipe_dir(environ), kind=Kind.SCRIPT, name="train.py")
    root = _fetched(job, environ, scratch, code_dir or job.paths.code)
    return _entry(root, job.entry_point)


def recipe_dir(environ: Mapping[str, str]) -> Path:
    """The folder of the image's recipe: AMPHORA_CODE_DIR, or code/ of a source checkout."""
    named = environ.get("AMPHORA_CODE_DIR")
    folder = Path(named) if named else Path(__file__).parents[2] / "code"
    if not (folder / "train.py").is_file():
        raise CodeError(
            f"The image's recipe is not at {folder / 'train.py'}.",
            "Set AMPHORA_CODE_DIR to the folder that holds it, or sagemaker_program to a script.",
        )
    return folder.absolute()


def evaluate_modules(environ: Mapping[str, str]) -> Path | None:
    """The folder of `evaluate` modules that the image's code brings, or None."""
    try:
        found = sorted(recipe_dir(environ).rglob("evaluate_modules"))
    except CodeError:
        return None
    return next((folder for folder in found if folder.is_dir()), None)


def install_steps(source: Source) -> list[tuple[str, list[str]]]:
    """The pip runs that the code asks for: what is installed, and pip's arguments."""
    steps = []
    if (source.root / "requirements.txt").is_file():
        steps.append(("requirements.txt", ["-r", "requirements.txt"]))
    if source.kind is Kind.MODULE and is_package(source.root):
        steps.append(("the package in the code folder", ["."]))
    return steps


def is_package(root: Path) -> bool:
    """Whether pip can install the folder. A pyproject.toml with only tools' settings is none."""
    pyproject = root / "pyproject.toml"
    return (root / "setup.py").is_file() or (
        pyproject.is_file()
        and _PACKAGE_TABLE.search(pyproject.read_text(errors="replace")) is not None
    )


def _fetched(job: Job, environ: Mapping[str, str], scratch: Path, code_dir: Path) -> Path:
    """The folder with the code."""
    place = job.submit_directory.removeprefix("file://")
    if place.startswith("s3://"):
        archive = scratch / "sourcedir.tar.gz"
        download(place, archive, environ)
        return _unpacked(archive, code_dir, place, scratch)
    path = Path(place)
    if path.is_dir():
        return path.absolute()
    if path.is_file():
        return _unpacked(path, code_dir, place, scratch)
    raise CodeError(
        f"sagemaker_submit_directory is {place!r}, which is not there.",
        "Give s3://bucket/sourcedir.tar.gz, a .tar.gz file or a folder; or mount the code at"
        f" {job.paths.code}.",
    )


def _unpacked(archive: Path, target: Path, place: str, scratch: Path) -> Path:
    """Unpack beside the target, then move: an archive that is refused leaves nothing."""
    if target.exists() and any(target.iterdir()):
        log.info("%s is not empty: the job's own code goes to a folder of its own", target)
        target = scratch / "code"
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=target.parent))
    try:
        unpack(archive, part, place)
        part.chmod(0o755)
        if target.exists():
            target.rmdir()
        part.replace(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target.absolute()


class _Bounded(io.RawIOBase):
    """A stream that is refused beyond a number of bytes: a bomb does not say its size."""

    def __init__(self, inner: io.BufferedIOBase, limit: int) -> None:
        self._inner, self._left = inner, limit

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._inner.read(min(size, self._left + 1) if size >= 0 else self._left + 1)
        self._left -= len(data)
        if self._left < 0:
            raise _too_large()
        return data


def _too_large() -> CodeError:
    return CodeError(f"it unpacks to more than {MAX_UNPACKED_BYTES // 1024**2} MiB")


def unpack(archive: Path, folder: Path, place: str) -> None:
    """Unpack a tar file (gzip or plain) into `folder`, which is empty.

    Raises:
        CodeError: It is no tar file, or a member would be written elsewhere, is neither a file nor
            a folder, or there is too much of it. What was unpacked until then stays in `folder`.
    """
    try:
        with archive.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            inner: io.BufferedIOBase = gzip.GzipFile(fileobj=raw) if packed else raw
            stream = _Bounded(inner, MAX_UNPACKED_BYTES)
            with tarfile.open(fileobj=stream, mode="r|") as tar:
                _extract(tar, folder)
    except CodeError as error:
        raise CodeError(
            f"The code archive {place} is refused: {error}.",
            "Pack it afresh from the folder itself: tar czf sourcedir.tar.gz -C folder .",
        ) from None
    except _BROKEN as error:
        raise CodeError(
            f"The code archive {place} cannot be unpacked: {error or type(error).__name__}.",
            "It must be a .tar.gz file; upload it again if the upload was cut short.",
        ) from error


def _extract(tar: tarfile.TarFile, folder: Path) -> None:
    # The checks are ours, since Python 3.10 images may lack the library's.
    tar.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
    size = 0
    for count, member in enumerate(tar):
        if count >= MAX_MEMBERS:
            raise CodeError(f"it has more than {MAX_MEMBERS} members")
        # A sparse file's stream is shorter than the file.
        size += member.size
        if size > MAX_UNPACKED_BYTES:
            raise _too_large()
        _check_member(member, folder)
        member.mode = (member.mode | 0o600) & 0o755
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        tar.extract(member, folder, set_attrs=member.isreg())
    _check_links(folder)


def _check_member(member: tarfile.TarInfo, folder: Path) -> None:
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        raise CodeError(f"{member.name!r} is a device or a FIFO")
    if _leaves(Path(member.name)):
        raise CodeError(f"{member.name!r} lies outside the archive")
    if _is_link(folder, member.name):
        raise CodeError(f"{member.name!r} would be written through a link")
    if member.issym() and _leaves(Path(member.name).parent / member.linkname):
        raise CodeError(f"{member.name!r} is a link to {member.linkname!r}, outside the archive")
    if member.islnk() and (_leaves(Path(member.linkname)) or _is_link(folder, member.linkname)):
        raise CodeError(f"{member.name!r} is a link to {member.linkname!r}, outside the archive")
    # tarfile would read on to look for it, past sizes that nobody has checked: for years.
    if member.islnk() and not (folder / member.linkname).is_file():
        raise CodeError(f"{member.name!r} is a link to {member.linkname!r}, which is not before it")


def _is_link(folder: Path, name: str) -> bool:
    """Whether a name passes through a link, at its end too: then it says nothing of the place."""
    return any((folder / part).is_symlink() for part in (Path(name), *Path(name).parents))


def _check_links(folder: Path) -> None:
    """Links can lead out together where none does so alone: `a` to `.`, `b` to `a/../secret`."""
    root = folder.resolve()
    for path in folder.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            raise CodeError(f"{str(path.relative_to(folder))!r} is a link that leaves the archive")


def _leaves(path: Path) -> bool:
    """Whether a relative path leads out of the folder it starts in, at any step."""
    if path.is_absolute():
        return True
    depth = 0
    for part in path.parts:
        depth += -1 if part == ".." else 1
        if depth < 0:
            return True
    return False


def download(url: str, target: Path, environ: Mapping[str, str]) -> None:
    """Fetch an object of S3 into a file. Raises CodeError where it cannot be read."""
    # boto3 is a quarter of a second to import: only jobs with code on S3 pay for it.
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    parts = urlsplit(url)
    client = boto3.client(
        "s3",
        region_name=environ.get("AWS_REGION") or environ.get("SAGEMAKER_REGION") or None,
        endpoint_url=environ.get("S3_ENDPOINT_URL") or None,
    )
    try:
        client.download_file(parts.netloc, parts.path.lstrip("/"), str(target))
    except (BotoCoreError, ClientError) as error:
        raise CodeError(
            f"The code {url} cannot be downloaded: {error}.",
            "Check that the object exists and that the job's role and network may read it.",
        ) from error


def _entry(root: Path, name: str) -> Source:
    path = root / name
    if _leaves(Path(name)) or name.startswith("-") or not name.strip():
        raise CodeError(f"sagemaker_program is {name!r}.", "Name a file below the code folder.")
    module = name.removesuffix(".py").replace("/", ".")
    if is_package(root) and not name.endswith(".sh") and _MODULE.fullmatch(module):
        return Source(root=root, kind=Kind.MODULE, name=module)
    if path.is_file():
        kind = Kind.SCRIPT if name.endswith(".py") else Kind.COMMAND
        return Source(root=root, kind=kind, name=name)
    if (path / "__main__.py").is_file() and _MODULE.fullmatch(module):
        return Source(root=root, kind=Kind.MODULE, name=module)
    present = sorted(str(each.relative_to(root)) for each in root.glob("*") if each.is_file())
    raise CodeError(
        f"sagemaker_program is {name!r}, but {path} is not there"
        f" (there: {', '.join(present[:20]) or 'nothing'}).",
        "Name a file of the code folder, or mount the code there.",
    )


def _interpreter(path: Path) -> list[str]:
    """The program of the script's #! line; the shell where it has none."""
    with path.open("rb") as file:
        first = file.readline(512).decode("utf-8", "replace").strip()
    if first.startswith("#!") and first[2:].strip():
        return first[2:].split(maxsplit=1)
    return [shutil.which("bash") or "/bin/sh"]
