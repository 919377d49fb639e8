"""A Docker engine, a stand-in base, the images built from it, and a job's folders to mount."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
NO_ENGINE = 3


@dataclass(frozen=True)
class Docker:
    """The docker client that `engine.sh` chose."""

    client: str

    def __call__(
        self, *arguments: str, check: bool = True, timeout: float = 240
    ) -> subprocess.CompletedProcess[str]:
        """Run one docker command; its standard error is part of `stdout`."""
        done = subprocess.run(
            [self.client, *arguments],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
        )
        assert not check or done.returncode == 0, done.stdout
        return done

    def build(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run build_and_push.sh, which builds and tries an image without pushing it."""
        return subprocess.run(
            [str(ROOT / "build_and_push.sh"), *arguments, "--no-push"],
            env=os.environ | {"DOCKER": self.client},
            text=True,
            capture_output=True,
        )

    def image(self, *arguments: str) -> str:
        """As `build`, for an image that must come about: its name."""
        built = self.build(*arguments)
        assert built.returncode == 0, built.stderr[-8000:]
        return built.stdout.strip()


@pytest.fixture(scope="session")
def docker() -> Iterator[Docker]:
    found = subprocess.run([str(HERE / "engine.sh")], text=True, capture_output=True)
    if found.returncode == NO_ENGINE:
        pytest.skip(found.stderr.splitlines()[-1])
    assert found.returncode == 0, found.stderr
    docker = Docker(found.stdout.strip())
    yield docker
    # Images of ours that a newer build of the same name has replaced.
    docker("image", "prune", "-f", "--filter", "label=org.opencontainers.image.title=amphora")


def stand_in(docker: Docker, kind: str) -> str:
    """The name of a base image that `bases.sh` made."""
    made = subprocess.run(
        [str(HERE / "bases.sh"), kind],
        env=os.environ | {"DOCKER": docker.client},
        text=True,
        capture_output=True,
    )
    assert made.returncode == 0, made.stderr[-8000:]
    return made.stdout.strip()


@pytest.fixture(scope="session")
def torch_base(docker: Docker) -> str:
    return stand_in(docker, "torch")


@pytest.fixture(scope="session")
def cpu_image(docker: Docker, torch_base: str) -> str:
    return docker.image("cpu", "--tag", "test-cpu", "--base-image", torch_base)


@dataclass(frozen=True)
class Job:
    """A training job's folders on this machine, mounted one by one as SageMaker mounts them."""

    docker: Docker
    image: str
    folder: Path

    def configure(self, channels: list[str], **hyperparameters: object) -> None:
        """Write what SageMaker writes under /opt/ml/input/config."""
        channel = {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated"}
        host = {"current_host": "algo-1", "hosts": ["algo-1"], "network_interface_name": "eth0"}
        config = self.folder / "input" / "config"
        config.mkdir(parents=True)
        for name, content in {
            "hyperparameters": {key: str(value) for key, value in hyperparameters.items()},
            "inputdataconfig": dict.fromkeys(channels, channel),
            "resourceconfig": host,
        }.items():
            (config / f"{name}.json").write_text(json.dumps(content))
        for name in ("model", "output"):
            (self.folder / name).mkdir()

    def data(self, channel: str) -> Path:
        """The folder of one channel, made where it is missing."""
        folder = self.folder / "input" / "data" / channel
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def mounts(self, *names: str) -> list[str]:
        """Arguments for `docker run`; inputs are read-only."""
        mode = {"input": ":ro"}
        return [
            argument
            for name in names
            for argument in ("-v", f"{self.folder / name}:/opt/ml/{name}{mode.get(name, '')}")
        ]

    def train(self, *options: str) -> subprocess.CompletedProcess[str]:
        """`docker run <image> train`, as SageMaker runs it."""
        mounts = self.mounts("input", "model", "output")
        return self.docker("run", "--rm", *options, *mounts, self.image, "train", check=False)


@pytest.fixture(scope="module")
def job(docker: Docker, cpu_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    folder = tmp_path_factory.mktemp("job")
    yield Job(docker, cpu_image, folder)
    # What the container wrote belongs to root, which need not be the one who runs the tests.
    docker("run", "--rm", "--entrypoint", "rm", "-v", f"{folder}:/job", cpu_image, "-rf",
           "/job/model", "/job/output")  # fmt: skip
