"""A Docker engine, a stand-in base, the images built from it, and a job's folders to mount."""

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.docker.material import save_data, save_tiny_model
from tests.support import http_server
from tests.support.sdk_environments import one_at_a_time, sdk_python, sdk_variables
from tests.support.until import until

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CANNOT = 3
ONE_THREAD = ("-e", "OMP_NUM_THREADS=1")
"""For `docker run`: more threads would only wait for each other, on so small a model."""


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

    def build(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run build_and_push.sh."""
        return subprocess.run(
            [str(ROOT / "build_and_push.sh"), *arguments],
            env=os.environ | environ | {"DOCKER": self.client},
            text=True,
            capture_output=True,
        )

    def image(self, *arguments: str) -> str:
        """The name of an image that build_and_push.sh builds and tries, without pushing it."""
        built = self.build(*arguments, "--no-push")
        assert built.returncode == 0, built.stderr[-8000:]
        return built.stdout.strip()


def ready(script: str, *arguments: str, **environ: str) -> str:
    """What a script that makes something ready prints; skips the test where it cannot."""
    with one_at_a_time():
        made = subprocess.run(
            [str(HERE / script), *arguments],
            env=os.environ | environ,
            text=True,
            capture_output=True,
        )
    if made.returncode == CANNOT:
        pytest.skip(made.stderr.splitlines()[-1])
    assert made.returncode == 0, made.stderr[-8000:]
    return made.stdout.strip()


@pytest.fixture(scope="session")
def docker() -> Iterator[Docker]:
    docker = Docker(ready("engine.sh"))
    yield docker
    # Images of ours whose name a newer build has taken.
    docker("image", "prune", "-f", "--filter", "label=org.opencontainers.image.title=amphora")


def stand_in(docker: Docker, kind: str) -> str:
    """The name of a base image that `bases.sh` made."""
    return ready("bases.sh", kind, DOCKER=docker.client)


@pytest.fixture(scope="session")
def torch_base(docker: Docker) -> str:
    return stand_in(docker, "torch")


@pytest.fixture(scope="session")
def cpu_image(docker: Docker, torch_base: str) -> Iterator[str]:
    image = docker.image("cpu", "--tag", "test-cpu", "--base-image", torch_base)
    yield image
    # The SDKs' local mode removes no container. Those that run are another process's.
    left = docker("ps", "-aq", "--filter", f"ancestor={image}", "--filter", "status=exited")
    if ended := left.stdout.split():
        docker("rm", *ended, check=False)


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the channels `model`, `train` and `test`."""
    folder = tmp_path_factory.mktemp("material")
    save_tiny_model(folder / "model")
    save_data(folder)
    return folder


@dataclass(frozen=True)
class Job:
    """A training job's folders on this machine, mounted as SageMaker mounts them."""

    docker: Docker
    image: str
    folder: Path

    def configure(self, **hyperparameters: object) -> None:
        """Write what SageMaker writes under /opt/ml/input/config."""
        channel = {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated"}
        host = {"current_host": "algo-1", "hosts": ["algo-1"], "network_interface_name": "eth0"}
        config = self.folder / "input" / "config"
        config.mkdir(parents=True)
        for name, content in {
            "hyperparameters": {key: str(value) for key, value in hyperparameters.items()},
            "inputdataconfig": dict.fromkeys(("train", "test", "model"), channel),
            "resourceconfig": host,
        }.items():
            (config / f"{name}.json").write_text(json.dumps(content))

    def mounts(self, *names: str) -> list[str]:
        """Arguments for `docker run`; inputs are read-only."""
        mode = {"input": ":ro"}
        return [
            argument
            for name in names
            for argument in ("-v", f"{self.folder / name}:/opt/ml/{name}{mode.get(name, '')}")
        ]

    def train(self, *options: str) -> subprocess.CompletedProcess[str]:
        """`docker run IMAGE train` with /opt/ml mounted in parts."""
        mounts = self.mounts("input", "model", "output", "checkpoints")
        return self.docker(
            "run", "--rm", *ONE_THREAD, *options, *mounts, self.image, "train", check=False
        )

    @property
    def failure(self) -> str:
        """What FailureReason would be; '' where the container wrote none."""
        path = self.folder / "output" / "failure"
        return path.read_text() if path.exists() else ""


@pytest.fixture(scope="module")
def make_job(
    docker: Docker, cpu_image: str, material: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], Job]]:
    """Makes jobs that have the tiny model and data as channels."""
    root = tmp_path_factory.mktemp("jobs")

    def make() -> Job:
        folder = root / str(len(list(root.iterdir())))
        shutil.copytree(material, folder / "input" / "data")
        for name in ("model", "output", "checkpoints"):
            (folder / name).mkdir()
        return Job(docker, cpu_image, folder)

    yield make
    # What a container wrote belongs to root, who need not be the one that runs the tests.
    remove = ["-v", f"{root}:/jobs", cpu_image, "-c", "rm -rf /jobs/*"]
    docker("run", "--rm", "--entrypoint", "sh", *remove)


@contextlib.contextmanager
def container(docker: Docker, *arguments: str) -> Iterator[str]:
    """The id of a container in the background, which is removed at the end."""
    name = docker("run", "-d", *arguments).stdout.split()[-1]
    try:
        yield name
    finally:
        docker("rm", "-f", name)


@contextlib.contextmanager
def endpoint_of(
    docker: Docker, image: str, *options: str, seconds: float = 90
) -> Iterator[tuple[str, str]]:
    """A healthy serving container on a free port: its address, and its id."""
    with container(docker, "-p", "127.0.0.1::8080", *options, image, "serve") as name:
        port = docker("port", name, "8080").stdout.rsplit(":", 1)[1].strip()
        address = f"http://127.0.0.1:{port}"

        def is_healthy() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{address}/ping", timeout=2).status_code == 200
            return False

        until(is_healthy, seconds, lambda: docker("logs", name).stdout)
        yield address, name


@dataclass(frozen=True)
class Outcome:
    """What a program printed, and the value that it returned."""

    output: str
    value: Any


@dataclass(frozen=True)
class Sdk:
    """One of the SDKs: runs the functions of a file next to this one in its environment."""

    python: str
    programs: str
    folder: Path
    environ: dict[str, str]

    def __call__(self, function: str, **arguments: object) -> Outcome:
        given = json.dumps({"root": self.folder, **arguments}, default=str)
        done = subprocess.run(
            [self.python, str(HERE / self.programs), function, given],
            env=self.environ,
            cwd=self.folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout[-8000:]
        output, _, value = done.stdout.rpartition("RETURNED ")
        return Outcome(output, json.loads(value))


LocalMode = tuple[dict[str, str], list[str]]
"""The variables for an SDK's process, and what it sends to AWS or elsewhere."""


@pytest.fixture(scope="session")
def local_mode(docker: Docker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalMode]:
    seen: list[str] = []

    class Refuse(BaseHTTPRequestHandler):
        """Stands where AWS would, as its endpoint and as the proxy to everywhere."""

        def handle_one_request(self) -> None:
            self.raw_requestline = self.rfile.readline(65537)
            self.close_connection = True
            if self.raw_requestline:
                seen.append(self.raw_requestline.decode().strip())
                self.wfile.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")

    bin_folder = ready("compose.sh", DOCKER=docker.client)
    others = ("AWS_", "SM_", "SAGEMAKER_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    with http_server.running(Refuse) as port:
        address = f"http://127.0.0.1:{port}"
        yield {
            **kept, **sdk_variables(tmp_path_factory.mktemp("home"), address, address),
            "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "PYTHONUNBUFFERED": "1",
        }, seen  # fmt: skip


@pytest.fixture
def sdk(request: pytest.FixtureRequest, local_mode: LocalMode, tmp_path: Path) -> Iterator[Sdk]:
    """The SDK that the module names in SDK; at the end nothing may have been asked of AWS."""
    environ, seen = local_mode
    seen.clear()
    name, programs = request.module.SDK
    yield Sdk(sdk_python(name), programs, tmp_path, environ | {"TMPDIR": str(tmp_path)})
    assert seen == []
