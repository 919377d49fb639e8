"""Hostile archives: sourcedir.tar.gz of training and serving, model.tar.gz of the recipe's channel.

Each is drawn from a seed: names and links that lead out, one by one and together, devices, bombs,
sparse files, headers that lie, cut and flipped bytes.
"""

from __future__ import annotations

import gzip
import io
import shutil
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

from ordeal.common import Trial, failure, start
from tests.support.job_tree import Tree

OUTSIDE = "nothing is written outside, and no link leads out"
BOUNDED = "what is unpacked is bounded in size, and in time (20 s)"
WORDS = "a refusal is an error with words, and leaves nothing"
PROCESS = "`amphora train` and `amphora serve` refuse with exit code 2 and words"
PROMISES = (OUTSIDE, BOUNDED, WORDS, PROCESS)

LIMIT = 8 * 2**20
"""Of what is unpacked in these calls; the product's own is 2 GiB."""
SECONDS = 20.0
NAMES = (
    "a", "b", "c/d", "c", "c/d/e", "./a", "../out", "/tmp/ordeal-out", "a/../../out", "c/../../out",
    "b/out", "a/b", "b/../out", "\ud800", "n" * 300, "x\0y", "..", ".", "", "c/./../b", "-rf", "ö",
)  # fmt: skip
LINKS = (
    ".", "..", "a", "b", "../out", "/etc/passwd", "a/../out", "b/../../out", "c", "c/..", "c/../..",
    "a/a/..", "", "\ud800", "./././..", "d/../../out", "/proc/self/root", "x\0y", "b/../out",
)  # fmt: skip
KINDS = (
    tarfile.REGTYPE, tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE,
    tarfile.DIRTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.CONTTYPE, b"z",
)  # fmt: skip


def write(trial: Trial, path: Path) -> None:
    """Write an archive that is hostile in some way, or in none."""
    stream = io.BytesIO()
    pax = trial.random.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT))
    with tarfile.open(fileobj=stream, mode="w", format=pax, errors="surrogateescape") as tar:
        for _ in range(trial.random.randrange(1, 8)):
            _add(trial, tar)
    data = bytearray(stream.getvalue())
    damage = trial.random.randrange(6)
    if damage == 0:
        del data[trial.random.randrange(len(data)) :]
    elif damage == 1:
        data[trial.random.randrange(len(data))] ^= 1 << trial.random.randrange(8)
    packed = bytearray(gzip.compress(bytes(data), 1) if trial.random.random() < 0.7 else data)
    if damage == 2:
        packed[trial.random.randrange(len(packed))] ^= 1 << trial.random.randrange(8)
    elif damage == 3:
        del packed[trial.random.randrange(len(packed)) :]
    path.write_bytes(packed)


def _add(trial: Trial, tar: tarfile.TarFile) -> None:
    # Half of the members do no harm, or few archives would be unpacked to their ends.
    harmless = trial.random.random() < 0.5
    member = tarfile.TarInfo(trial.random.choice(NAMES[:5] if harmless else NAMES))
    member.type = trial.random.choice(KINDS[:4] if harmless else KINDS)
    member.linkname = trial.random.choice(LINKS[:4] if harmless else LINKS)
    member.mode = trial.random.choice((0, 0o777, 0o4755, 0o644))
    member.uid = trial.random.choice((0, 12345))
    content = b"owned"
    odd = trial.random.randrange(30 if harmless else 12)
    if odd == 0:
        content = b"\0" * (LIMIT * 2)
    elif odd == 1:
        member.pax_headers = {"mtime": trial.random.choice(("1e400", "nan", "x", "-1e30"))}
    elif odd == 2:
        member.pax_headers = {
            "GNU.sparse.major": "1", "GNU.sparse.minor": "0",
            "GNU.sparse.realsize": trial.random.choice((str(2**50), "x", "-1")),
        }  # fmt: skip
        content = f"1\n{2**50}\n0\n".encode().ljust(512, b"\0")
    elif odd == 3:
        member.pax_headers = {"size": trial.random.choice((str(2**60), "-5", "y"))}
    member.size = len(content) if member.isreg() else 0
    try:
        tar.addfile(member, io.BytesIO(content) if member.size else None)
    except (ValueError, OverflowError):
        return


def run(trial: Trial) -> None:
    """Unpack thousands of archives by both unpackers, then some by real processes."""
    from amphora.common import archives
    from amphora.common.errors import CodeError
    from recipe.data.layout import model_channel
    from recipe.errors import ModelError

    archives.MAX_UNPACKED_BYTES, archives.MAX_MEMBERS = LIMIT, 1000

    def code(archive: Path, folder: Path) -> Path:
        try:
            archives.unpack(archive, folder, "it")
        except CodeError as error:
            raise Refused(str(error)) from error
        return folder

    def model(archive: Path, folder: Path) -> Path:
        model_channel.tempfile.tempdir = str(folder)
        try:
            model_channel.model_folder({"model": archive.parent})
            return next(folder.iterdir())
        except ModelError as error:
            trial.check(WORDS, not list(folder.iterdir()), f"left: {list(folder.iterdir())}")
            raise Refused(str(error)) from error
        finally:
            model_channel.tempfile.tempdir = None

    archive = trial.folder / "model.tar.gz"
    for number in range(100 if trial.short else 6000):
        if not trial.has_time():
            break
        write(trial, archive)
        _unpack(trial, f"code {number}", code, archive)
        _unpack(trial, f"model {number}", model, archive)
    for name, size in (("bomb", 50 * LIMIT), ("many", 0)):
        with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
            for number in range(1 if size else 2000):
                member = tarfile.TarInfo(f"{name}{number}")
                member.size = size
                tar.addfile(member, _Zeros())
        _unpack(trial, name, code, archive)
    _processes(trial, archive)


class Refused(Exception):
    """An archive was refused with words."""


class _Zeros(io.RawIOBase):
    def read(self, size: int = -1) -> bytes:
        return b"\0" * size


def _unpack(trial: Trial, name: str, unpack: Callable[[Path, Path], Path], archive: Path) -> None:
    box = trial.folder / "box"
    shutil.rmtree(box, ignore_errors=True)
    inside = box / "deep" / "inside"
    inside.mkdir(parents=True)
    began, folder, links = time.monotonic(), inside, []
    try:
        folder = unpack(archive, inside)
        links = [p for p in folder.rglob("*") if p.is_symlink() and not _is_within(p, folder)]
        trial.count("unpacked")
    except Refused as error:
        trial.count("refused")
        trial.check(WORDS, len(str(error)) > 20, error)
    except Exception as error:
        trial.check(WORDS, False, f"{name}: {error!r}; {_kept(trial, archive)}")
    took = time.monotonic() - began
    there = [path for path in box.rglob("*") if path not in (box / "deep", inside)]
    size = sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if not path.is_symlink())
    trial.check(BOUNDED, took < SECONDS and size < 4 * LIMIT, f"{name}: {took:.1f} s, {size}")
    beyond = [path for path in there if not path.is_relative_to(folder)] + links
    beyond += [path for path in (Path("/tmp/ordeal-out"), trial.folder / "out") if path.exists()]
    trial.check(OUTSIDE, not beyond, f"{name}: {beyond} {_kept(trial, archive) if beyond else ''}")


def _is_within(path: Path, folder: Path) -> bool:
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):
        return True  # A link to itself leads nowhere.


def _kept(trial: Trial, archive: Path) -> Path:
    return Path(shutil.copy(archive, trial.folder / f"broken-{time.monotonic_ns()}.tar.gz"))


def _processes(trial: Trial, archive: Path) -> None:
    """Check exit codes and the failure file of real processes, and that nothing was started."""
    with tarfile.open(archive, "w:gz") as tar:
        for name, link in (("a", "."), ("b", "a/../secret"), ("b", "")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = (tarfile.SYMTYPE, link) if link else (b"0", "")
            member.size = 0 if link else 5
            tar.addfile(member, None if link else io.BytesIO(b"owned"))
    base = trial.folder / "job"
    Tree(base).configure(
        {"sagemaker_program": "train.py", "sagemaker_submit_directory": str(archive)}
    )
    log = trial.folder / "train.log"
    code = start(base, "train", log).wait(60)
    text = failure(base)
    trial.check(PROCESS, code == 2 and "code archive" in text and "link" in text, (code, text))
    left = [path for path in base.rglob("*") if path.name in ("a", "b", "secret", "train.py")]
    trial.check(OUTSIDE, not left, left)
    served = trial.folder / "served"
    (served / "model").mkdir(parents=True)
    log = trial.folder / "serve.log"
    code = start(served, "serve", log, SAGEMAKER_SUBMIT_DIRECTORY=str(archive)).wait(60)
    text = log.read_text()
    trial.check(PROCESS, code == 2 and "code archive" in text, (code, text[-1500:]))
    trial.check(PROCESS, "Traceback" not in text, text[-1500:])
