"""SageMaker's SDK v3 in its local container mode, on the CPU image.

Failures and stops of what it sends are in tests/amphora/training/test_sdk_v3.py.
"""

import tarfile
from pathlib import Path

import pytest

from tests.docker.conftest import ROOT
from tests.docker.material import BAD, GOOD, LEARNS
from tests.docker.sdk import Sdk
from tests.support.ports import free_port

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1500)]

SDK = ("sdk3", "local_v3.py")


@pytest.fixture
def request_of(cpu_image: str, material: Path) -> dict[str, object]:
    """What all jobs have in common."""
    inputs = {name: str(material / name) for name in ("train", "test", "model")}
    return {"image": cpu_image, "inputs": inputs, "hyperparameters": LEARNS}


def model_files(root: Path) -> set[str]:
    with tarfile.open(root / "compressed_artifacts" / "model.tar.gz") as tar:
        return set(tar.getnames())


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
    # The image's recipe, brought along as a user's own code: SDK v3 then starts it its own way.
    recipe = {"source_dir": str(ROOT / "code"), "entry_script": "train.py"}
    outcome = sdk("train", hosts=2, torchrun=True, code=recipe, **request_of)
    assert outcome.value == "", outcome.output
    assert "cpu, 2 processes" in outcome.output
    assert "model.safetensors" in model_files(tmp_path)
