"""Find the folders of a job: from the SM_* variables, or else in the /opt/ml tree."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from recipe.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Folders:
    """The folders of one training job."""

    channels: Mapping[str, Path]
    """Folder (or file) of each channel, by name."""
    model_dir: Path
    output_data_dir: Path
    checkpoints: Path
    tensorboard: Path


def from_environment(environ: Mapping[str, str]) -> Folders:
    """Return the folders of SM_CHANNEL_<NAME>, SM_MODEL_DIR and SM_OUTPUT_DATA_DIR.

    Defaults are the folders under SAGEMAKER_BASE_DIR (default /opt/ml).
    """
    base = Path(environ.get("SAGEMAKER_BASE_DIR") or "/opt/ml")
    data = base / "input" / "data"
    folders = [path for path in sorted(data.iterdir()) if path.is_dir()] if data.is_dir() else []
    file = base / "input" / "config" / "checkpointconfig.json"
    try:
        local = json.loads(file.read_text(encoding="utf-8")).get("LocalPath")
    except FileNotFoundError:
        local = None
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {error}.",
            'It has the form {"S3Uri": "s3://...", "LocalPath": "/opt/ml/checkpoints"}.',
        ) from error
    path = Path(local or "/opt/ml/checkpoints")
    prefix = "SM_CHANNEL_"
    # SM_CHANNELS has the original names; the names of variables are upper case.
    written = {name.upper(): name for name in json.loads(environ.get("SM_CHANNELS") or "[]")}
    by_name = {
        key[len(prefix) :]: value for key, value in environ.items() if key.startswith(prefix)
    }
    # A container may set both SM_CHANNEL_MY_DATA and SM_CHANNEL_MY-DATA; SM_CHANNELS decides.
    listed = (
        {name: value for name, value in by_name.items() if name in written} if written else by_name
    )
    named = {written.get(name, name.lower()): value for name, value in sorted(listed.items())}
    return Folders(
        channels=({name: follow_link(Path(value)) for name, value in named.items() if value})
        or {folder.name: follow_link(folder) for folder in folders},
        model_dir=Path(environ.get("SM_MODEL_DIR") or base / "model"),
        output_data_dir=Path(environ.get("SM_OUTPUT_DATA_DIR") or base / "output" / "data"),
        checkpoints=(
            base / path.relative_to("/opt/ml") if path.is_relative_to("/opt/ml") else path
        ),
        tensorboard=base / "output" / "tensorboard",
    )


def follow_link(path: Path) -> Path:
    """Return where an absolute link leads, another path unchanged: `amphora train FILE` makes such
    links, and messages name the user's file."""
    target = path.readlink() if path.is_symlink() else path
    return target if target.is_absolute() else path
