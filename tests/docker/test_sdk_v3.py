"""SageMaker's SDK v3 in its local container mode, on the CPU image.

Failures and stops of what it sends are in tests/amphora/training/test_sdk_v3.py.
"""

import tarfile
from pathlib import Path

import pytest

from tests.docker.conftest import ROOT, Sdk
from tests.docker.material import LEARNS

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


def test_without_source_code_the_recipe_runs(
    sdk: Sdk, request_of: dict[str, object], tmp_path: Path
) -> None:
    outcome = sdk("train", **request_of)
    assert outcome.value == "", outcome.output
    assert {"model.safetensors", "config.json"} <= model_files(tmp_path)


def test_source_code_with_torchrun_on_two_hosts(
    sdk: Sdk, request_of: dict[str, object], tmp_path: Path
) -> None:
    # The image's recipe, brought along as a user's own code: SDK v3 then starts it its own way.
    recipe = {"source_dir": str(ROOT / "code"), "entry_script": "train.py"}
    outcome = sdk("train", hosts=2, torchrun=True, code=recipe, **request_of)
    assert outcome.value == "", outcome.output
    assert "cpu, 2 processes" in outcome.output
    assert "model.safetensors" in model_files(tmp_path)
