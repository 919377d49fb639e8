"""Running an example against the stand-in for AWS."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.sdk_environments import sdk_python

from .aws import Aws, serve

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NOWHERE = "http://127.0.0.1:9"
IMAGE = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/amphora:gpu"
ROLE = "arn:aws:iam::123456789012:role/SageMakerRole"
COMMON = ["--image", IMAGE, "--role", ROLE]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def aws() -> Iterator[Aws]:
    yield from serve()


@pytest.fixture
def run(aws: Aws, tmp_path: Path) -> Run:
    """Runs an example's file with arguments; whatever is not AWS's address leads nowhere."""
    config = tmp_path / "config.yaml"
    config.write_text(
        "SchemaVersion: '1.0'\nSageMaker:\n  PythonSDK:\n    Modules:\n      TelemetryOptOut: true\n"
    )
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "AWS_ENDPOINT_URL": aws.url,
        "PYTHONPATH": str(Path(__file__).parent / "hook"),
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "eu-west-1",
        "SAGEMAKER_SUPPRESS_V2_WARNING": "1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "SAGEMAKER_USER_CONFIG_OVERRIDE": str(config),
        **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), NOWHERE),
        **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1"),
    }

    def start(
        script: str | Path, *arguments: str, python: str = sys.executable
    ) -> subprocess.CompletedProcess[str]:
        command = [python, str(EXAMPLES / script), *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environ, text=True, capture_output=True, timeout=120
        )

    return start


@pytest.fixture(scope="session")
def sdk2() -> str:
    return sdk_python("sdk2")


@pytest.fixture(scope="session")
def sdk3() -> str:
    return sdk_python("sdk3")
