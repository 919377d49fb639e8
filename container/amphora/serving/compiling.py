"""`amphora compile`: a model's programs ahead of its endpoint, kept in its folder or archive.

What compiles is the image's own code, in a process whose environment is a model worker's.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from amphora.common import archives, devices
from amphora.common.errors import CodeError, ConfigError
from amphora.serving import programs
from amphora.serving import settings as serving_settings
from amphora.serving.pool.spawner import worker_environment

LOG = logging.getLogger("amphora.compile")
PROGRAM = "compile.py"


def compile_model(base_dir: Path, environ: Mapping[str, str], model: str | None) -> int:
    """Compile a model, in its place.

    Args:
        base_dir: Stands for /opt/ml.
        environ: The container's environment; AMPHORA_BUCKETS and the others of serving.
        model: A folder or a model.tar.gz; None means `base_dir`/model.

    Returns:
        0, or the exit code of what compiles, which has said why; the archive is then unchanged.

    Raises:
        AmphoraError: There is no model, its archive cannot be read, or the configuration is wrong.
    """
    place = Path(model) if model else base_dir / "model"
    if not place.exists():
        raise ConfigError(
            f"There is no model in {place}.",
            "Name a folder or a model.tar.gz: amphora compile PATH",
        )
    if place.is_dir():
        return _compile(place, base_dir, environ)
    # Beside the archive, which may be larger than what the system keeps for temporary files.
    with tempfile.TemporaryDirectory(prefix=".amphora-compile-", dir=place.parent) as name:
        folder, packed = Path(name) / "model", Path(name) / place.name
        folder.mkdir()
        archives.unpack(place, folder, str(place))
        code = _compile(folder, base_dir, environ)
        if code == 0:
            with tarfile.open(packed, "w:gz") as archive:
                for path in sorted(folder.iterdir()):
                    archive.add(path, path.name)
            packed.replace(place)
            LOG.info("%s has its compiled programs.", place)
        return code


def _compile(folder: Path, base_dir: Path, environ: Mapping[str, str]) -> int:
    host = devices.detect(environ)
    environ = {**environ, **host.variables}
    settings = serving_settings.read(base_dir, environ, host)
    program = settings.image_code / PROGRAM
    if not program.is_file():
        raise CodeError(f"There is no {program}.", "AMPHORA_CODE_DIR names the image's own code.")
    if programs.has_handlers(folder / "code", settings.program):
        LOG.warning(
            "%s has handlers of its own: programs are compiled as the image's own handlers take"
            " the model.", folder / "code",
        )  # fmt: skip
    variables = worker_environment(settings, environ, index=0, share=False)
    command = [sys.executable, str(program), str(folder)]
    return subprocess.run(command, env=variables, check=False).returncode
