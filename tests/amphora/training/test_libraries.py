"""A script that uses accelerate, of which HF Trainer is made, trains one model in several processes."""

import re

import pytest

from tests.support.job_tree import Tree


@pytest.mark.heavy
def test_several_processes_on_cpus_train_one_model(tree: Tree) -> None:
    """Ranks begin with other weights and see other rows: alone, each would end with its own model."""
    tree.configure(
        {"sagemaker_program": "script.py", "sagemaker_torch_distributed_enabled": "true"}
    ).script(
        "import os, torch\n"
        "from accelerate import Accelerator, PartialState\n"
        "PartialState()  # as many scripts have it, for main_process_first()\n"
        "accelerator = Accelerator()\n"
        "torch.manual_seed(int(os.environ['RANK']))\n"
        "model = accelerator.prepare(torch.nn.Linear(4, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(3):\n"
        "    accelerator.backward(model(torch.randn(2, 4)).square().mean())\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "weights = [weight.tolist() for weight in model.parameters()]\n"
        "print('world', accelerator.num_processes, weights)"
    )
    done = tree.train(
        AMPHORA_NPROC_PER_NODE="3", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", USE_TORCH_XLA="0"
    )
    lines = re.findall(r"^world .*", done.stdout, re.MULTILINE)
    assert len(lines) == 3 and len(set(lines)) == 1 and "world 3 " in lines[0], done.stderr
