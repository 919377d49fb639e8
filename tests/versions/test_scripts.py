"""Users' scripts in the image with transformers 4, whose Trainer reports to all that it finds."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.job_tree import Tree
from tests.support.paths import ROOT
from tests.support.tracking_scripts import LIGHTNING, SETFIT, TRACKERS

pytestmark = [pytest.mark.versions, pytest.mark.timeout(500)]
PYTHON_4 = ROOT / "build/versions/4.57/bin/python"


def printed(base: Path, python: Path | str, script: str, processes: int = 1, **more: str) -> Any:
    """Return what each process of a job that runs the script prints after `found`."""
    chosen = {"sagemaker_program": "script.py", **more}
    if processes > 1:
        chosen["sagemaker_torch_distributed_enabled"] = "true"
    environ = {"PYTHONPATH": str(ROOT / "container"), "AMPHORA_NPROC_PER_NODE": str(processes)}
    tree = Tree(base, environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""})
    tree.python = str(python)
    done = tree.configure(chosen).script(script).train(timeout=400)
    assert done.returncode == 0, done.stderr
    return [json.loads(text) for text in re.findall("(?m)^found (.*)$", done.stdout)]


@pytest.mark.parametrize(
    ("python", "plain"),
    [pytest.param(PYTHON_4, ["tensorboard"], id="4"), pytest.param(sys.executable, [], id="5")],
)
def test_trackers_of_the_image_do_not_join_a_script(
    tmp_path: Path, python: Path | str, plain: list[str]
) -> None:
    """Unless it names or configures them; without a server, MLflow keeps its runs as files."""
    (actual,) = printed(tmp_path, python, TRACKERS)
    assert actual.pop("plain") == [plain, plain]
    assert actual.pop("all") == [["tensorboard"], ["tensorboard"]]
    assert actual.pop("accelerate's all") == ["tensorboard"]
    assert actual.pop("named") == [["mlflow"], ["mlflow"]]
    assert set(actual.pop("configured")) == {"mlflow", "tensorboard", "wandb"}
    runs = list((tmp_path / "output/data/mlflow").glob("*/*/meta.yaml"))
    assert len(runs) == 3, "of train, of evaluate after it, and of accelerate"


def test_lightning_trains_one_model_on_cpus(tmp_path: Path) -> None:
    """In two processes, with its own logger."""
    first, second = printed(tmp_path, PYTHON_4, LIGHTNING, processes=2)
    assert first == second and first[0] == 2


def test_setfit_trains(tmp_path: Path, tiny_model: Path) -> None:
    """By default it reports to all."""
    (actual,) = printed(tmp_path, PYTHON_4, SETFIT, model=str(tiny_model))
    assert actual[0] == ["tensorboard"]
