"""SageMaker's SDK v2 in local mode, on the CPU image: what a user writes, in containers."""

import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.docker.conftest import ROOT, Sdk
from tests.docker.material import BAD, GOOD, LEARNS
from tests.support.ports import free_port

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1500)]

SDK = ("sdk2", "local_v2.py")


@pytest.fixture(scope="module")
def inputs(material: Path) -> dict[str, str]:
    return {name: str(material / name) for name in ("train", "test", "model")}


def members(archive: str) -> set[str]:
    with tarfile.open(archive.removeprefix("file://")) as tar:
        return set(tar.getnames())


def test_a_generic_estimator_runs_the_recipe_whose_model_is_deployed_and_transforms(
    sdk: Sdk, cpu_image: str, inputs: dict[str, str], tmp_path: Path
) -> None:
    # As README tells to take them.
    metrics = [sys.executable, str(ROOT / "code" / "recipe" / "metrics.py")]
    definitions = json.loads(subprocess.check_output(metrics))
    fitted = sdk("fit", kind="generic", image_uri=cpu_image, instance_count=1, inputs=inputs,
                 hyperparameters=LEARNS, metric_definitions=definitions)  # fmt: skip
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= members(fitted.value)
    results = {one["Name"]: re.findall(one["Regex"], fitted.output) for one in definitions}
    assert [float(value) for value in results["eval_accuracy"]][-1] == 1
    for name in ("loss", "learning_rate", "eval_loss", "train_samples_per_second"):
        assert results[name], f"{name} matches nothing"
        assert all(float(value) >= 0 for value in results[name])

    answers = sdk("deploy_and_predict", image=cpu_image, archive=fitted.value,
                  port=free_port(), texts=[GOOD, BAD]).value  # fmt: skip
    assert ["1" in str(one["label"]) for one in answers] == [True, False]

    lines = tmp_path / "lines"
    lines.mkdir()
    texts = [GOOD, BAD, GOOD]
    (lines / "a.jsonl").write_text("".join(json.dumps({"inputs": text}) + "\n" for text in texts))
    answers = sdk("transform", image=cpu_image, archive=fitted.value, port=free_port(),
                  lines=lines, output=tmp_path / "out").value  # fmt: skip
    outcome = [json.loads(line) for line in answers if line]
    assert ["1" in json.dumps(one["label"]) for one in outcome] == [True, False, True]


def test_two_hosts_train_one_model(sdk: Sdk, cpu_image: str, inputs: dict[str, str]) -> None:
    outcome = sdk("fit", kind="generic", image_uri=cpu_image, instance_count=2, inputs=inputs,
               hyperparameters=LEARNS)  # fmt: skip
    assert {"model.safetensors", "config.json"} <= members(outcome.value)
    assert "algo-1" in outcome.output and "algo-2" in outcome.output
    assert "cpu, 2 processes" in outcome.output


def test_huggingface_with_torch_distributed_on_two_hosts(
    sdk: Sdk, cpu_image: str, inputs: dict[str, str], tmp_path: Path
) -> None:
    def source(folder: Path, script: str) -> str:
        folder = folder / "source"
        folder.mkdir()
        (folder / "mine.py").write_text(script)
        return str(folder)

    ranks = """\
import argparse, os, torch, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--learning_rate", type=float)
parser.add_argument("--flag")
print("arguments", parser.parse_args())
print("channel", sorted(os.listdir(os.environ["SM_CHANNEL_TRAIN"])))
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print("world", dist.get_world_size(), "total", total.item())
open(os.path.join(os.environ["SM_MODEL_DIR"], "mine.txt"), "w").write("mine")
dist.barrier()
dist.destroy_process_group()
"""
    outcome = sdk("fit", kind="huggingface", image_uri=cpu_image, instance_count=2, py_version="py311",
               inputs={"train": inputs["train"]}, source_dir=source(tmp_path, ranks),
               entry_point="mine.py", hyperparameters={"learning_rate": 0.5, "flag": False},
               distribution={"torch_distributed": {"enabled": True}})  # fmt: skip
    assert outcome.output.count("world 2 total 3.0") == 2
    assert "arguments Namespace(learning_rate=0.5, flag='False')" in outcome.output
    assert "channel ['train.csv']" in outcome.output
    assert "mine.txt" in members(outcome.value)
