"""Fetches a model's code and installs its requirements, before the model is loaded."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from amphora.common import archives, packages, transformers4
from amphora.common.errors import CodeError
from amphora.serving import handler_files
from amphora.serving.settings import ServerSettings

_USED = ("transformers", "sentence-transformers", "tokenizers", "peft", "numpy")
LOG = logging.getLogger("amphora.pool")


def _versions() -> dict[str, str]:
    """Return the installed versions of what the image's handlers use."""
    versions = {}
    for name in _USED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


class UserCode:
    """One model's code. The methods block; `cancel` ends a pip that runs."""

    def __init__(self, settings: ServerSettings, environ: Mapping[str, str]) -> None:
        self._settings = settings
        self._environ = environ
        self._pip: subprocess.Popen[str] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def prepare(self) -> Path:
        """Return the folder of the user's code, ready to import. Raises CodeError, ConfigError."""
        settings = self._settings
        code = handler_files.inner_folder(settings.code_dir, settings.program)
        # SDKs set SAGEMAKER_SUBMIT_DIRECTORY to the prefix of a multi-model endpoint's models, and
        # to the model archive, which SageMaker has unpacked.
        name = urlsplit(settings.submitted).path.rpartition("/")[2]
        is_prefix = settings.submitted.startswith("s3://") and "." not in name
        has_code = handler_files.has_handlers(settings.code_dir, settings.program)
        is_model = name == "model.tar.gz" or settings.is_multi_model
        if is_prefix or (settings.submitted and has_code and is_model):
            LOG.info(
                "SAGEMAKER_SUBMIT_DIRECTORY %s is not used: it names no archive of other code.",
                settings.submitted,
            )
        elif settings.submitted:
            self._folder = tempfile.TemporaryDirectory(prefix="amphora-code-")
            archive = Path(settings.submitted.removeprefix("file://"))
            if settings.submitted.startswith("s3://"):
                archive = Path(self._folder.name) / "sourcedir.tar.gz"
                archives.download(settings.submitted, archive, self._environ)
            folder = Path(self._folder.name) / "code"
            folder.mkdir()
            archives.unpack(archive, folder, settings.submitted)
            code = handler_files.inner_folder(folder, settings.program)
        root = settings.model_dir / packages.REQUIREMENTS
        if code != settings.model_dir and root.is_file():
            LOG.warning("%s is not installed: only that of the handlers' folder is.", root)
        self.install(code)
        return code

    def install(self, code: Path) -> None:
        """Install the requirements of a folder, if it has any. Raises CodeError, ConfigError."""
        requirements = code / packages.REQUIREMENTS
        if not requirements.is_file():
            return
        before = _versions()
        with packages.index(self._environ, code, packages.REQUIREMENTS) as index:
            LOG.info("Installing %s from %s.", requirements, index.shown)
            self._pip = subprocess.Popen(
                index.argv, cwd=code, env=dict(index.environ), stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, errors="replace",
            )  # fmt: skip
            output, _ = self._pip.communicate()
            exit_code = self._pip.returncode
            if exit_code != 0:
                raise packages.failed(
                    packages.REQUIREMENTS, code, exit_code, output.splitlines(), index
                )
        after = _versions()
        replaced = {name: after.get(name, "") for name in before if after.get(name) != before[name]}
        if not replaced:
            return
        what = ", ".join(f"{name} {before[name]} by {replaced[name]}" for name in replaced)
        LOG.warning("%s replaced packages of the image: %s.", requirements, what)
        # The image is not made for another major version.
        major = before.get("transformers", "").partition(".")[0]
        if replaced.get("transformers", major).partition(".")[0] != major:
            raise CodeError(
                f"{requirements} replaced {what}, and the image is for transformers {major}.",
                f"Leave transformers out, or {transformers4.IMAGE}.",
            )

    def cancel(self) -> None:
        """End a running pip, and remove fetched code."""
        if self._pip is not None:
            self._pip.kill()
        if self._folder is not None:
            self._folder.cleanup()
