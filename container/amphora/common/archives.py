"""Downloads code archives from S3, and unpacks them safely."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from amphora.common.aws import aws_client
from amphora.common.errors import CodeError

MAX_UNPACKED_BYTES = 2 * 1024**3
MAX_MEMBERS = 100_000


class _Bounded(io.RawIOBase):
    """Limits the bytes that are read from a stream, since a bomb hides its size."""

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


def unpack(archive: Path, folder: Path, location: str) -> None:
    """Unpack a tar file (gzip or plain) into `folder`, which is empty.

    Raises CodeError if it is not a tar file, too large, or has a member that would be written
    elsewhere or is a device; `folder` is then removed.
    """
    try:
        with archive.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            inner: io.BufferedIOBase = gzip.GzipFile(fileobj=raw) if packed else raw
            stream = _Bounded(inner, MAX_UNPACKED_BYTES)
            with tarfile.open(fileobj=stream, mode="r|") as tar:
                # Python 3.10 may lack the library's checks; ours follow.
                tar.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
                size = 0
                for count, member in enumerate(tar):
                    if count >= MAX_MEMBERS:
                        raise CodeError(f"it has more than {MAX_MEMBERS} members")
                    # A sparse file's stream is shorter than the file.
                    size += member.size
                    if size > MAX_UNPACKED_BYTES:
                        raise _too_large()
                    name, link = member.name, member.linkname
                    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
                        raise CodeError(f"{name!r} is a device or a FIFO")
                    if leaves(Path(name)):
                        raise CodeError(f"{name!r} lies outside the archive")
                    if _is_link(folder, name):
                        raise CodeError(f"{name!r} would be written through a link")
                    if (member.issym() and leaves(Path(name).parent / link)) or (
                        member.islnk() and (leaves(Path(link)) or _is_link(folder, link))
                    ):
                        raise CodeError(f"{name!r} is a link to {link!r}, outside the archive")
                    # tarfile would search for it past unchecked sizes, for years.
                    if member.islnk() and not (folder / link).is_file():
                        raise CodeError(f"{name!r} is a link to {link!r}, which is not before it")
                    member.mode = (member.mode | 0o600) & 0o755
                    member.uid = member.gid = 0
                    member.uname = member.gname = ""
                    tar.extract(member, folder, set_attrs=member.isreg())
        # Links may leave the folder only in combination: `a` to `.`, `b` to `a/../secret`.
        root = folder.resolve()
        for path in folder.rglob("*"):
            if path.is_symlink() and not path.resolve().is_relative_to(root):
                raise CodeError(
                    f"{str(path.relative_to(folder))!r} is a link that leaves the archive"
                )
    except Exception as error:  # A truncated or forged file raises many kinds.
        shutil.rmtree(folder, ignore_errors=True)
        outcome = "is refused" if isinstance(error, CodeError) else "cannot be unpacked"
        raise CodeError(
            f"The code archive {location} {outcome}: {str(error) or type(error).__name__}.",
            "Pack the folder again (tar czf sourcedir.tar.gz -C folder .), and upload all of it.",
        ) from error


def _is_link(folder: Path, name: str) -> bool:
    return any((folder / part).is_symlink() for part in (Path(name), *Path(name).parents))


def leaves(path: Path) -> bool:
    """Return whether a path leaves the folder it starts in, at any step."""
    return path.is_absolute() or Path(os.path.normpath(path)).parts[:1] == ("..",)


def download(url: str, target: Path, environ: Mapping[str, str]) -> None:
    """Download an object of S3 to a file. Raises CodeError."""
    parts = urlsplit(url)
    region = environ.get("AWS_REGION") or environ.get("SAGEMAKER_REGION") or None
    endpoint = environ.get("S3_ENDPOINT_URL") or None
    problem = f"The code {url} cannot be downloaded"
    remedy = "Check that the object exists and that the job's role and network may read it."
    with aws_client(
        "s3", CodeError, problem, remedy, region_name=region, endpoint_url=endpoint
    ) as client:
        client.download_file(parts.netloc, parts.path.lstrip("/"), str(target))
