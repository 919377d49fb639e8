"""A script that uses accelerate trains one model in several processes."""

import json
from typing import Any

import pytest
import torch

from tests.support.job_tree import Tree

SAMPLES = """
def samples():
    numbers = torch.Generator().manual_seed(7)
    x = torch.randn(12, 4, generator=numbers)
    return x, x.sum(1, keepdim=True) + torch.randn(12, 1, generator=numbers)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(int(os.environ.get("RANK", 0)))  # a joined training starts from rank 0's
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.mse_loss(self.layer(x), labels)}


def tell(world, net):
    weights = {name: value.tolist() for name, value in net.state_dict().items()}
    told = {"world": world, "weights": weights}
    path = os.path.join(os.environ["SM_OUTPUT_DATA_DIR"], os.environ.get("RANK", "0") + ".json")
    open(path, "w").write(json.dumps(told))
"""
ACCELERATE = f"""
import json, os, torch
from accelerate import Accelerator, PartialState
{SAMPLES}
state = PartialState()  # as many scripts have it, for main_process_first()
accelerator = Accelerator()
data = torch.utils.data.TensorDataset(*samples())
net = Net()
model, optimizer, loader = accelerator.prepare(
    net,
    torch.optim.SGD(net.parameters(), lr=0.1),
    torch.utils.data.DataLoader(data, batch_size=12 // state.num_processes),
)
for epoch in range(5):
    for x, y in loader:
        accelerator.backward(model(x, y)["loss"])
        optimizer.step()
        optimizer.zero_grad()
tell(accelerator.num_processes, net)
"""


def expected() -> dict[str, torch.Tensor]:
    """The weights of one process that sees all samples in each step."""
    scope: dict[str, Any] = {}
    exec(f"import json, os, torch\n{SAMPLES}", scope)
    x, y = scope["samples"]()
    net = scope["Net"]()
    for _ in range(5):
        net.zero_grad()
        net(x, y)["loss"].backward()
        with torch.no_grad():
            for weight in net.parameters():
                weight -= 0.1 * weight.grad
    return dict(net.state_dict())


@pytest.mark.heavy
def test_several_processes_on_cpus_train_one_model(tree: Tree) -> None:
    """By accelerate, of which HF Trainer is made."""
    processes = 3
    chosen = {"sagemaker_program": "script.py", "sagemaker_torch_distributed_enabled": "true"}
    tree.configure(chosen).script(ACCELERATE)
    done = tree.train(
        timeout=200,
        AMPHORA_NPROC_PER_NODE=str(processes),
        CUDA_VISIBLE_DEVICES="",
        OMP_NUM_THREADS="1",
        USE_TORCH_XLA="0",
    )
    assert done.returncode == 0, done.stderr
    reported = [json.loads(path.read_text()) for path in (tree.base / "output/data").glob("*.json")]
    assert [entry["world"] for entry in reported] == [processes] * processes
    for entry in reported:
        for name, weight in expected().items():
            actual = torch.tensor(entry["weights"][name])
            torch.testing.assert_close(actual, weight, rtol=0, atol=1e-6)
