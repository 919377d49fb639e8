"""Find the folder of the model to start from in a channel, and unpack it if necessary."""

from __future__ import annotations

import functools
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from recipe.errors import ModelError

MODEL_CHANNELS = ("model", "pretrained", "pretrained_model", "base_model")
_MARKS = ("config.json", "adapter_config.json")
# The exceptions of a tar file that is truncated or forged.
_BROKEN = (
    tarfile.TarError, EOFError, OSError, zlib.error, ValueError, OverflowError, KeyError,
    RecursionError,
)  # fmt: skip
_MOST_MEMBERS = 100_000


def model_folder(channels: Mapping[str, Path], name: str | None = None) -> Path | None:
    """Return the folder of the model in channel `name`, by default in the channel called model.

    A channel may hold the files of a model or an adapter, one folder with them, or model.tar.gz.
    """
    names = [name] if name else MODEL_CHANNELS
    channel = next((channels[one] for one in names if one in channels), None)
    if channel is None or not channel.is_dir():
        return None
    archive = channel / "model.tar.gz"
    folder = _extract(archive, archive.stat().st_mtime_ns) if archive.is_file() else channel
    for pattern in (*_MARKS, *(f"*/{mark}" for mark in _MARKS)):
        if configs := sorted(folder.glob(pattern)):
            return configs[0].parent
    return None


@functools.cache  # whoever reads its configuration first unpacks it
def _extract(archive: Path, written_at: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="model-"))
    try:
        with tarfile.open(archive) as tar:
            # The library's own filters came with Python 3.11.4, and were leaky until 3.11.13.
            tar.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
            free = shutil.disk_usage(folder).free
            size = 0
            for count, member in enumerate(tar):
                size += member.size
                if count >= _MOST_MEMBERS or size > free:
                    raise tarfile.TarError(
                        f"it holds more than {_MOST_MEMBERS} files, or more than the "
                        f"{free / 1e6:.0f} MB that are free"
                    )
                if not (member.isreg() or member.isdir()):
                    raise tarfile.TarError(
                        f"{member.name!r} is not a file or folder; tar czhf packs the "
                        "targets of links"
                    )
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts:
                    raise tarfile.TarError(f"{member.name!r} lies outside the archive")
                tar.extract(member, folder, set_attrs=False)
    except _BROKEN as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise ModelError(
            f"{archive} cannot be unpacked: {error}.", "Check that the upload is complete."
        ) from error
    return folder
