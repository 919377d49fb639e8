"""SageMaker's SDK v3 in its local container mode, on the CPU image."""

import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.docker.conftest import ROOT, Docker
from tests.docker.material import BAD, GOOD, LEARNS
from tests.docker.sdk import Sdk
from tests.support.ports import free_port
from tests.support.until import until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1500)]

SDK = ("sdk3", "local_v3.py")
RECIPE = {"source_dir": str(ROOT / "code"), "entry_script": "train.py"}
"""The image's recipe, brought along as a user's own code: SDK v3 then starts it its own way."""


@pytest.fixture
def request_of(cpu_image: str, material: Path) -> dict[str, object]:
    """What all jobs have in common."""
    inputs = {name: str(material / name) for name in ("train", "test", "model")}
    return {"image": cpu_image, "inputs": inputs, "hyperparameters": LEARNS}


def archive(root: Path, name: str = "model") -> tarfile.TarFile:
    return tarfile.open(root / "compressed_artifacts" / f"{name}.tar.gz")


def model_files(root: Path) -> set[str]:
    with archive(root) as tar:
        return set(tar.getnames())


def failure_of(root: Path) -> str:
    with archive(root, "output") as tar:
        member = tar.extractfile("failure")
        assert member is not None
        return member.read().decode()


def test_without_source_code_the_recipe_runs_and_its_model_is_served(
    sdk: Sdk, request_of: dict[str, object], tmp_path: Path
) -> None:
    outcome = sdk("train", **request_of)
    assert outcome.value == "", outcome.output
    model = tmp_path / "compressed_artifacts" / "model.tar.gz"
    assert {"model.safetensors", "config.json"} <= model_files(tmp_path)
    answers = sdk("deploy_and_predict", image=request_of["image"], archive=f"file://{model}",
                  port=free_port(), texts=[GOOD, BAD]).value  # fmt: skip
    assert ["1" in str(one["label"]) for one in answers] == [True, False]


def test_source_code_with_torchrun_on_two_hosts(
    sdk: Sdk, request_of: dict[str, object], tmp_path: Path
) -> None:
    outcome = sdk("train", hosts=2, torchrun=True, code=RECIPE, **request_of)
    assert outcome.value == "", outcome.output
    assert "cpu, 2 processes" in outcome.output
    assert "model.safetensors" in model_files(tmp_path)


def test_a_failing_source_code_says_why(
    sdk: Sdk, request_of: dict[str, object], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "mine.py").write_text("raise KeyError('no such colour')")
    code = {"source_dir": str(source), "entry_script": "mine.py"}
    outcome = sdk("train", code=code, **request_of)
    assert "exited with code: 1" in outcome.value
    assert failure_of(tmp_path).startswith("KeyError: 'no such colour'")


def running(docker: Docker, image: str) -> str:
    """The id of the job's container, once it prints its first metrics."""

    def printing() -> list[str]:
        containers = docker("ps", "-q", "--filter", f"ancestor={image}").stdout.split()
        return [name for name in containers if "metric step=" in docker("logs", name).stdout]

    return until(printing, 90, "no container prints metrics")[0]


def test_a_stop_leaves_a_checkpoint_and_the_root_cause(
    sdk: Sdk, request_of: dict[str, object], docker: Docker, tmp_path: Path
) -> None:
    hyperparameters = LEARNS | {"num_train_epochs": 40, "logging_steps": 5}
    request = request_of | {"hyperparameters": hyperparameters, "code": RECIPE}
    command = sdk.command("train", root=tmp_path, **request)
    with subprocess.Popen(command, env=sdk.environ, cwd=tmp_path, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as job:  # fmt: skip
        container = running(docker, str(request_of["image"]))
        docker("stop", "-t", "100", container)
        output = job.communicate(timeout=120)[0]
    assert "exited with code: 75" in output, output
    docker("cp", f"{container}:/opt/ml/checkpoints", str(tmp_path))
    assert list((tmp_path / "checkpoints").glob("checkpoint-*/model.safetensors"))
    assert failure_of(tmp_path).startswith("Stopped by SIGTERM")
