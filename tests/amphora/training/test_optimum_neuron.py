"""A script with NeuronTrainer, as optimum-neuron's tutorial of the emotion data has it.

The package needs AWS's own torch-neuronx, so a stand-in of it is imported: it reads of the
environment what optimum-neuron 0.4.5 reads (utils/torch_xla_and_neuronx_initialization.py,
utils/cache_utils.py, utils/system.py, trainers/transformers.py), computes nothing and writes down
what it read. That cores are found and programs kept by the real one is not tested.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.job_tree import Tree
from tests.support.neuron_devices import printing, trn1

STAND_IN = '''
import json, os, pathlib, re
from dataclasses import dataclass


def cache_path():
    """As get_neuron_cache_path: of the compiler's options alone."""
    found = re.search(r"--cache_dir=([\\w\\/-]+)", os.environ.get("NEURON_CC_FLAGS", ""))
    return pathlib.Path(found[1] if found else "/var/tmp/neuron-compile-cache")


@dataclass
class NeuronTrainingArguments:
    output_dir: str
    num_train_epochs: int
    per_device_train_batch_size: int
    bf16: bool = False


class NeuronTrainer:
    def __init__(self, model, args):
        self.args = args
        # As init_process_group: without torchrun each process is a world of one.
        self.is_distributed = bool(os.environ.get("TORCHELASTIC_RUN_ID"))

    def train(self):
        # As synchronize_hub_cache after a training, where the user may write to a cache repository.
        if not cache_path().is_dir():
            raise ValueError(f"The {cache_path()} directory does not exist, cannot synchronize.")
        told = {
            "arguments": vars(self.args),
            "distributed": self.is_distributed,
            "world": int(os.environ.get("WORLD_SIZE", "1")),
            "cache": str(cache_path()),
            "environ": dict(os.environ),
        }
        rank = os.environ["LOCAL_RANK"]
        pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"], f"{rank}.json").write_text(json.dumps(told))
'''
SCRIPT = """
import argparse
from optimum.neuron import NeuronTrainer, NeuronTrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--model_id", required=True)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--bf16", type=lambda text: text == "True", default=False)
parser.add_argument("--output_dir", default="/opt/ml/model")
asked = parser.parse_args()
NeuronTrainer(
    asked.model_id,
    NeuronTrainingArguments(asked.output_dir, asked.epochs, asked.batch_size, asked.bf16),
).train()
"""
HYPERPARAMETERS = {
    "sagemaker_program": "script.py",
    "sagemaker_torch_distributed_enabled": "true",
    "model_id": "bert-base-uncased",
    "epochs": "3",
    "bf16": "true",
}


@pytest.mark.parametrize(
    "flags", ["--model-type=transformer -O1", pytest.param("", marks=pytest.mark.heavy)]
)
def test_the_emotion_tutorials_script_finds_cores_and_cache(
    scripted: Tree, tmp_path: Path, flags: str
) -> None:
    scripted.script(STAND_IN, "optimum/neuron/__init__.py").script(SCRIPT)
    scripted.configure(
        {**HYPERPARAMETERS, "sagemaker_submit_directory": str(scripted.base / "code")}
    )
    printing(tmp_path, trn1(1))
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "AMPHORA_NEURON_STACK": "xla"}
    done = scripted.train(**environ, **({"NEURON_CC_FLAGS": flags} if flags else {}))
    assert done.returncode == 0, done.stderr
    output = scripted.base / "output" / "data"
    ranks = [json.loads((output / f"{rank}.json").read_text()) for rank in range(2)]
    cache = scripted.base / "checkpoints" / "neuron-compile-cache"
    for told in ranks:
        assert (told["distributed"], told["world"]) == (True, 2)
        assert told["cache"] == told["environ"]["NEURON_COMPILE_CACHE_URL"] == str(cache)
        assert told["arguments"]["num_train_epochs"] == 3 and told["arguments"]["bf16"] is True
        # libneuronxla gives each LOCAL_RANK its core; accelerate must not take the CPU.
        assert not {"NEURON_RT_VISIBLE_CORES", "ACCELERATE_USE_CPU", "USE_TORCH_XLA"} & set(
            told["environ"]
        )
