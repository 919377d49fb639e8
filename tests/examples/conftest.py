"""Running an example against the stand-in for AWS."""

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.preloading import preloading, run_script
from tests.support.sdk_environments import sdk_python

from .aws import Aws, serve

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NOWHERE = "http://127.0.0.1:9"
IMAGE = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/amphora:gpu"
ROLE = "arn:aws:iam::123456789012:role/SageMakerRole"
COMMON = ["--image", IMAGE, "--role", ROLE]
AWAY = {
    "PYTHONPATH": str(Path(__file__).parent / "hook"),
    "AWS_ENDPOINT_URL": NOWHERE,
    "AWS_ACCESS_KEY_ID": "id",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "eu-west-1",
    "SAGEMAKER_SUPPRESS_V2_WARNING": "1",
    "AWS_EC2_METADATA_DISABLED": "true",
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), NOWHERE),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1"),
}
"""Whatever is not AWS's address leads nowhere."""
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def aws() -> Iterator[Aws]:
    yield from serve()


@pytest.fixture
def run(aws: Aws, tmp_path: Path, boto3: Mapping[str, str]) -> Run:
    """Runs an example's file with arguments; whatever is not AWS's address leads nowhere."""
    config = tmp_path / "config.yaml"
    config.write_text(
        "SchemaVersion: '1.0'\nSageMaker:\n  PythonSDK:\n    Modules:\n      TelemetryOptOut: true\n"
    )
    environ = {
        **AWAY, "PATH": os.environ["PATH"], "HOME": str(tmp_path), "AWS_ENDPOINT_URL": aws.url,
        "SAGEMAKER_USER_CONFIG_OVERRIDE": str(config),
    }  # fmt: skip

    def start(
        script: str | Path, *arguments: str, preloaded: Mapping[str, str] = boto3
    ) -> subprocess.CompletedProcess[str]:
        return run_script(preloaded, [str(EXAMPLES / script), *arguments], environ, tmp_path)

    return start


@pytest.fixture(scope="session")
def boto3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """A process that has imported boto3."""
    imports = ["boto3", "s3transfer.manager"]
    with preloading(tmp_path_factory.mktemp("boto3"), imports=imports, **AWAY) as variables:
        yield variables


@pytest.fixture(scope="session")
def sdk2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """A process that has imported SDK v2, which takes longer than any example."""
    modules = (
        "estimator",
        "local",
        "multidatamodel",
        "predictor",
        "pytorch",
        "tuner",
        "workflow.pipeline",
    )
    yield from _sdk("sdk2", tmp_path_factory, [f"sagemaker.{name}" for name in modules])


@pytest.fixture(scope="session")
def sdk3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """A process that has imported SDK v3, which takes longer than any example."""
    modules = ("core.resources", "serve.model_builder", "train.model_trainer", "train.tuner")
    yield from _sdk("sdk3", tmp_path_factory, [f"sagemaker.{name}" for name in modules])


def _sdk(
    name: str, tmp_path_factory: pytest.TempPathFactory, imports: list[str]
) -> Iterator[Mapping[str, str]]:
    with preloading(tmp_path_factory.mktemp(name), sdk_python(name), imports, **AWAY) as variables:
        yield variables
