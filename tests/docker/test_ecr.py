"""ECR and S3 as far as one machine has them: moto answers the APIs, a real registry has the layers.

The registry answers under ECR's own name, so that build_and_push.sh, the AWS CLI, docker and the SDK
are what they are everywhere. For that /etc/hosts and /etc/docker/certs.d change, and change back. In
every run test_scripts.py has the commands of a push, and tests/amphora the code from S3.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from tests.docker.conftest import ROOT, Docker, ready
from tests.docker.sdk import Sdk
from tests.support.ports import free_port
from tests.support.until import until

pytestmark = [pytest.mark.docker, pytest.mark.long, pytest.mark.timeout(1500)]

SDK = ("sdk2", "local_v2.py")
REGISTRY = "123456789012.dkr.ecr.us-east-1.amazonaws.com"
"""Of the account that moto plays."""
HTPASSWD = "AWS:$2b$04$lYu6ZsJ/MIwTT4ozE8e4te6oTzs9gpoUlh4zTUVPIP2ttIMheTo9y\n"
"""Moto's password, 123456789012-auth-token."""
HOSTS = Path("/etc/hosts")
LINE = f"127.0.0.1 {REGISTRY} # amphora's tests\n"
CERTIFICATES = Path("/etc/docker/certs.d") / REGISTRY


@contextlib.contextmanager
def named() -> Iterator[None]:
    """This machine is the registry's name."""
    HOSTS.write_text(HOSTS.read_text().replace(LINE, "") + LINE)
    try:
        yield
    finally:
        HOSTS.write_text(HOSTS.read_text().replace(LINE, ""))


@contextlib.contextmanager
def trusted(folder: Path) -> Iterator[None]:
    """A certificate for the registry in `folder`, which docker trusts."""
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    made += ["-subj", f"/CN={REGISTRY}", "-addext", f"subjectAltName=DNS:{REGISTRY}"]
    made += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(made, check=True, capture_output=True)
    CERTIFICATES.mkdir(parents=True, exist_ok=True)
    (CERTIFICATES / "ca.crt").write_bytes((folder / "cert.pem").read_bytes())
    try:
        yield
    finally:
        (CERTIFICATES / "ca.crt").unlink()
        for made_here in (CERTIFICATES, CERTIFICATES.parent):
            with contextlib.suppress(OSError):
                made_here.rmdir()


@contextlib.contextmanager
def running(command: list[str], log: Path, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=os.environ | environ, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)


def wait_for(address: str, log: Path, process: subprocess.Popen[bytes]) -> None:
    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(httpx.TransportError):
            httpx.get(address, verify=False, timeout=2)
            return True
        return False

    until(answers, 60, log.read_text)


@dataclass(frozen=True)
class Account:
    """An AWS account of which ECR, STS and S3 are there."""

    endpoint: str
    aws: Path
    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        return {
            "PATH": f"{self.aws.parent}{os.pathsep}{os.environ['PATH']}",
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "something",
            "AWS_REGION": "us-east-1",
            "DOCKER_CONFIG": str(self.folder / "docker"),
        }

    def ecr(self, *arguments: str) -> str:
        return subprocess.check_output(
            [self.aws, "ecr", *arguments, "--region", "us-east-1"],
            env=os.environ | self.environ,
            text=True,
        )


def bridge_address(docker: Docker) -> str:
    """The host's address on the engine's default network.

    The interface always has it; `docker network inspect` shows no Gateway while the engine that
    created the bridge still runs.
    """
    option = '{{index .Options "com.docker.network.bridge.name"}}'
    interface = docker("network", "inspect", "bridge", "-f", option).stdout.strip() or "docker0"
    shown = subprocess.check_output(["ip", "-json", "-4", "address", "show", "dev", interface])
    return str(json.loads(shown)[0]["addr_info"][0]["local"])


@pytest.fixture(scope="module")
def account(docker: Docker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Account]:
    aws, registry = ready("ecr.sh").splitlines()
    folder = tmp_path_factory.mktemp("account")
    bridge = bridge_address(docker)
    endpoint = f"http://{bridge}:{free_port()}"
    (folder / "htpasswd").write_text(HTPASSWD)
    config = folder / "config.yml"
    config.write_text("version: 0.1\n")
    stored = ROOT / "build" / "docker" / "registry"
    stored.mkdir(parents=True, exist_ok=True)
    settings = {
        "REGISTRY_HTTP_ADDR": "127.0.0.1:443",
        "REGISTRY_HTTP_TLS_CERTIFICATE": str(folder / "cert.pem"),
        "REGISTRY_HTTP_TLS_KEY": str(folder / "key.pem"),
        "REGISTRY_AUTH": "htpasswd",
        "REGISTRY_AUTH_HTPASSWD_REALM": "ecr",
        "REGISTRY_AUTH_HTPASSWD_PATH": str(folder / "htpasswd"),
        "REGISTRY_STORAGE": "filesystem",
        "REGISTRY_STORAGE_FILESYSTEM_ROOTDIRECTORY": str(stored),
    }
    moto = [sys.executable, "-m", "moto.server", "-H", bridge, "-p", endpoint.rpartition(":")[2]]
    moto_log, registry_log = folder / "moto.log", folder / "registry.log"
    with (
        trusted(folder),
        named(),
        running(moto, moto_log) as api,
        running([registry, "serve", str(config)], registry_log, **settings) as layers,
    ):
        wait_for(endpoint, moto_log, api)
        wait_for("https://127.0.0.1:443/v2/", registry_log, layers)
        yield Account(endpoint, Path(aws), folder)


@pytest.fixture(scope="module")
def pushed(account: Account, docker: Docker, torch_base: str, cpu_image: str) -> str:
    """The CPU image's name in ECR, as build_and_push.sh prints it."""
    options = ["--repository", "amphora-test", "--tag", "cpu", "--base-image", torch_base]
    done = docker.build("cpu", *options, **account.environ)
    assert done.returncode == 0, done.stderr[-8000:]
    assert f"logging in to {REGISTRY}" in done.stderr
    assert "creating the repository amphora-test in us-east-1" in done.stderr
    return done.stdout.strip()


def test_a_push_makes_the_repository_and_leaves_the_image_there(
    account: Account, pushed: str
) -> None:
    assert pushed == f"{REGISTRY}/amphora-test:cpu"
    assert "amphora-test" in account.ecr("describe-repositories")
    tags = httpx.get(
        "https://127.0.0.1:443/v2/amphora-test/tags/list",
        verify=False,
        auth=("AWS", account.ecr("get-login-password").strip()),
    )
    assert tags.json() == {"name": "amphora-test", "tags": ["cpu"]}
    refused = httpx.get("https://127.0.0.1:443/v2/", verify=False, auth=("AWS", "guessed"))
    assert refused.status_code == 401


SCRIPT = """\
import os
print("channel", os.listdir(os.environ["SM_CHANNEL_TRAIN"]), "code", os.environ["SM_MODULE_DIR"])
open(os.path.join(os.environ["SM_MODEL_DIR"], "mine.txt"), "w").write("mine")
"""


def test_an_estimator_pulls_by_ecrs_name_and_its_code_comes_from_s3(
    account: Account, pushed: str, sdk: Sdk, docker: Docker, material: Path, tmp_path: Path
) -> None:
    docker("rmi", pushed)
    source = tmp_path / "source"
    source.mkdir()
    (source / "mine.py").write_text(SCRIPT)
    bridge = account.endpoint.removeprefix("http://").partition(":")[0]
    here = dict.fromkeys(("no_proxy", "NO_PROXY"), f"localhost,127.0.0.1,{bridge}")
    environ = sdk.environ | here | {"AWS_ENDPOINT_URL": account.endpoint}
    outcome = replace(sdk, environ=environ)(
        "fit_from_s3",
        image=pushed,
        endpoint=account.endpoint,
        train=material / "train",
        source=source,
    )
    assert "channel ['train.csv'] code s3://a-bucket/" in outcome.output
    assert outcome.value.startswith("s3://a-bucket/")
    assert docker("image", "inspect", pushed, check=False).returncode == 0
    docker("rmi", "-f", pushed)  # containers of the SDK may be left
