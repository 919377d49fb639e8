"""Running an example against the stand-in for AWS."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.preloading import preloading, run_script
from tests.support.sdk_environments import sdk_python, sdk_variables

from .aws import Aws, serve

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
IMAGE = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/amphora:gpu"
ROLE = "arn:aws:iam::123456789012:role/SageMakerRole"
HOOK = str(Path(__file__).parent / "hook")
COMMON = ["--image", IMAGE, "--role", ROLE]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def aws() -> Iterator[Aws]:
    for stand_in in serve():
        yield stand_in
        assert stand_in.refused == [], "caller.json does not allow these"


@pytest.fixture
def run(aws: Aws, tmp_path: Path, boto3: Mapping[str, str]) -> Run:
    """Runs an example's file with arguments; whatever is not AWS's address leads nowhere."""
    environ = {**sdk_variables(tmp_path, aws.url), "PYTHONPATH": HOOK, "PATH": os.environ["PATH"]}

    def start(
        script: str | Path, *arguments: str, preloaded: Mapping[str, str] = boto3
    ) -> subprocess.CompletedProcess[str]:
        return run_script(preloaded, [str(EXAMPLES / script), *arguments], environ, tmp_path)

    return start


def _imported(python: str, folder: Path, imports: list[str]) -> Iterator[Mapping[str, str]]:
    """A process that has imported an SDK, which takes longer than any example."""
    away = {**sdk_variables(folder, "http://127.0.0.1:9"), "PYTHONPATH": HOOK}
    with preloading(folder, python, imports, **away) as variables:
        yield variables


@pytest.fixture(scope="session")
def boto3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    folder = tmp_path_factory.mktemp("boto3")
    yield from _imported(sys.executable, folder, ["boto3", "s3transfer.manager"])


@pytest.fixture(scope="session")
def sdk2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    names = ("estimator", "local", "multidatamodel", "predictor", "pytorch", "tuner")
    imports = [*(f"sagemaker.{name}" for name in names), "sagemaker.workflow.pipeline"]
    yield from _imported(sdk_python("sdk2"), tmp_path_factory.mktemp("sdk2"), imports)


@pytest.fixture(scope="session")
def sdk3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    names = ("core.resources", "serve.model_builder", "train.model_trainer", "train.tuner")
    imports = [f"sagemaker.{name}" for name in names]
    yield from _imported(sdk_python("sdk3"), tmp_path_factory.mktemp("sdk3"), imports)
