"""What SDK v3's ModelTrainer sends, made by the SDK's own code, and a container to run it in.

The package is read, not imported: `sagemaker-train` brings an ML platform's worth of dependencies,
and only three methods and a folder of it matter here.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import json
import logging
import os
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.job_tree import Tree, clean_environ

_METHODS = ("_prepare_train_script", "_write_source_code_json", "_write_distributed_json")
BASH_ENV = Path(__file__).parents[2] / "container" / "amphora" / "hook" / "bash_env.sh"
# A container as far as this matters: bash becomes PID 1, and /opt/ml is the job's tree. /opt is
# made anew, in a mount namespace, of what it holds here and of that tree.
_CONTAINER = """
set -eu
stage=$1 base=$2; shift 2
mount -t tmpfs amphora-test "$stage"
for entry in /opt/*; do
    [ -d "$entry" ] && [ "$entry" != /opt/ml ] || continue
    mkdir "$stage/${entry##*/}"
    mount --rbind "$entry" "$stage/${entry##*/}"
done
mkdir "$stage/ml"
mount --bind "$base" "$stage/ml"
mount --rbind "$stage" /opt
cd /
exec "$@"
"""
_UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")


def package(name: str, version: str) -> Path:
    """Where an SDK's package lies; the test is skipped where it is not installed."""
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    assert distribution.version == version
    return Path(str(distribution.locate_file("sagemaker")))


def distributed(kind: str, **settings: Any) -> SimpleNamespace:
    """A DistributedConfig: Torchrun, MPI, or a user's own."""
    script = {"Torchrun": "torchrun_driver.py", "MPI": "mpi_driver.py"}.get(kind, "own_driver.py")
    config = type(kind, (SimpleNamespace,), {})(driver_script=script)
    config.model_dump = lambda: settings
    return config


@dataclass
class ModelTrainer(Tree):
    """A job of SDK v3 on a tree of its own."""

    hyperparameters: dict[str, Any] = field(default_factory=dict)
    channels: list[str] = field(default_factory=list)
    hosts: tuple[str, ...] = ("algo-1",)

    @property
    def code(self) -> Path:
        return self.base / "input" / "data" / "code"

    def send(self, runner: Any = None, **source_code: Any) -> ModelTrainer:
        """Lay out what the SDK and SageMaker would, for `SourceCode(**source_code)`."""
        data = self.base / "input" / "data"
        drivers, output = data / "sm_drivers", self.base / "output"
        for folder in (self.code, output, *(data / name for name in self.channels)):
            folder.mkdir(parents=True, exist_ok=True)
        train = package("sagemaker-train", "1.27.0") / "train"
        core = package("sagemaker-core", "2.27.0") / "core"
        shutil.copytree(train / "container_drivers", drivers, dirs_exist_ok=True)
        shutil.copy(core / "utils" / "install_requirements.py", drivers / "scripts")
        source = {"source_dir": "src", "entry_script": None, "command": None, "args": None}
        source |= {"requirements": None} | source_code
        code = SimpleNamespace(**source, model_dump=lambda: source)
        methods = sdk_methods(train)
        this = SimpleNamespace(hyperparameters=self.hyperparameters, _jumpstart_config=None)
        temporary_folder = SimpleNamespace(name=str(drivers))
        methods["_prepare_train_script"](this, temporary_folder, code, runner)
        methods["_write_source_code_json"](this, temporary_folder, code)
        methods["_write_distributed_json"](this, temporary_folder, runner)
        sent = {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in self.hyperparameters.items()
        }
        channels = {
            name: {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated"}
            for name in (*self.channels, "code", "sm_drivers")
        }
        resources = {
            "current_host": self.hosts[0],
            "current_instance_type": "ml.m5.xlarge",
            "hosts": self.hosts,
            "network_interface_name": "eth0",
        }
        return self.configure(sent, inputdataconfig=channels, resourceconfig=resources)

    def command(self) -> list[str]:
        constants = runpy.run_path(
            str(package("sagemaker-train", "1.27.0") / "train" / "constants.py")
        )
        sent = [
            *constants["DEFAULT_CONTAINER_ENTRYPOINT"],
            *constants["DEFAULT_CONTAINER_ARGUMENTS"],
        ]
        stage = self.base.parent / "opt"
        stage.mkdir(exist_ok=True)
        container = ["sh", "-c", _CONTAINER, "container", str(stage), str(self.base)]
        return [*_UNSHARE, *container, *sent]

    def environment(self, **extra: str) -> dict[str, str]:
        """The image's, with this checkout's `amphora` first on PATH."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        image = {"PATH": path, "BASH_ENV": str(BASH_ENV), "TRAINING_JOB_NAME": "a-job"}
        return clean_environ(**{**image, **self.environ, **extra})

    @contextlib.contextmanager
    def started(self, **environ: str) -> Iterator[subprocess.Popen[str]]:
        process = self.start(**environ)
        try:
            yield process
        finally:
            process.kill()  # And by --kill-child all that is in its namespace.
            process.communicate()


def sdk_methods(train: Path) -> dict[str, Any]:
    """ModelTrainer's methods that write the driver, compiled out of model_trainer.py."""
    tree = ast.parse((train / "model_trainer.py").read_text(encoding="utf-8"))
    trainer = next(
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ModelTrainer"
    )
    tree.body = [
        node for node in trainer.body if isinstance(node, ast.FunctionDef) and node.name in _METHODS
    ]
    names: dict[str, Any] = {"json": json, "os": os, "shlex": shlex, "logger": logging.getLogger()}
    for module in ("templates", "constants"):
        names |= runpy.run_path(str(train / f"{module}.py"))
    flags = __future__.annotations.compiler_flag
    exec(compile(tree, "model_trainer.py", "exec", flags=flags), names)
    return names


def may_make_a_container() -> bool:
    probe = subprocess.run([*_UNSHARE, "true"], capture_output=True, check=False)
    return probe.returncode == 0


def stop(process: subprocess.Popen[str]) -> str:
    """SIGTERM to the container's PID 1, as `docker stop` sends it. Returns what it printed."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    os.kill(int(children.read_text().split()[0]), signal.SIGTERM)
    return process.communicate(timeout=240)[0]
