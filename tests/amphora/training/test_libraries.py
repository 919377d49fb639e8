"""Scripts that use HF Trainer, accelerate and evaluate, started as they are, without a network."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
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
TRAINER = f"""
import json, os, torch
from transformers import Trainer, TrainingArguments
{SAMPLES}
x, y = samples()
args = TrainingArguments(
    output_dir=os.environ["SM_MODEL_DIR"], num_train_epochs=5, learning_rate=0.1, optim="sgd",
    per_device_train_batch_size=12 // int(os.environ["WORLD_SIZE"]), lr_scheduler_type="constant",
    max_grad_norm=1e9, save_strategy="no", report_to="none", disable_tqdm=True,
)
net = Net()
trainer = Trainer(
    model=net, args=args, train_dataset=[{{"x": x[i], "labels": y[i]}} for i in range(12)]
)
trainer.train()
tell(args.world_size, net)
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
@pytest.mark.parametrize(("script", "processes"), [(TRAINER, 2), (ACCELERATE, 3)])
def test_several_processes_on_cpus_train_one_model(tree: Tree, script: str, processes: int) -> None:
    chosen = {"sagemaker_program": "script.py", "sagemaker_torch_distributed_enabled": "true"}
    tree.configure(chosen).script(script)
    done = tree.train(
        timeout=200,
        AMPHORA_NPROC_PER_NODE=str(processes),
        CUDA_VISIBLE_DEVICES="",
        OMP_NUM_THREADS="1",
        USE_TORCH_XLA="0",
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads(path.read_text()) for path in (tree.base / "output/data").glob("*.json")]
    assert [each["world"] for each in told] == [processes] * processes
    for each in told:
        for name, weight in expected().items():
            found = torch.tensor(each["weights"][name])
            torch.testing.assert_close(found, weight, rtol=0, atol=1e-6)


EVALUATE = """
import evaluate, json, os, sys
sys.argv[1:] or sys.exit("no arguments")
given = {"predictions": [0, 1, 1, 0, 1], "references": [0, 1, 0, 1, 1]}
found = evaluate.combine(["accuracy", "f1", "precision", "recall"]).compute(**given)
several = {"predictions": [0, 2, 1, 1], "references": [0, 1, 2, 1], "average": "macro"}
found["several"] = evaluate.load("f1").compute(**several)["f1"]
found["each"] = evaluate.load("recall").compute(**{**several, "average": None})["recall"].tolist()
sets = {"predictions": [[0, 1], [1, 1]], "references": [[0, 1], [1, 0]], "average": "micro"}
found["sets"] = evaluate.load("precision", "multilabel").compute(**sets)["precision"]
os.chdir("own")
found["own"] = evaluate.load("accuracy").compute(predictions=[1], references=[0])["accuracy"]
print("found", json.dumps(found))
"""
OWN = """
import datasets
import evaluate
class Accuracy(evaluate.Metric):
    def _info(self):
        kinds = dict.fromkeys(("predictions", "references"), datasets.Value("int32"))
        return evaluate.MetricInfo(
            description="", citation="", inputs_description="", features=datasets.Features(kinds)
        )
    def _compute(self, predictions, references):
        return {"accuracy": 42.0}
"""


@pytest.mark.heavy
def test_the_metrics_that_are_shipped_need_no_network_and_are_those_of_the_hub(
    scripted: Tree,
) -> None:
    scripted.configure({"sagemaker_program": "run.sh", "x": "1"})
    scripted.script("python3 other.py --x 1", "run.sh").script(EVALUATE, "other.py")
    scripted.script(OWN, "own/accuracy/accuracy.py")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    cache = str(scripted.base / "cache")
    done = scripted.train(HF_HUB_OFFLINE="1", HF_HOME=cache, PATH=path)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("found "))
    found = json.loads(line.removeprefix("found "))
    # By hand, as the hub's modules have it: of two classes, class 1 is the one that is looked for.
    assert found == {
        "accuracy": pytest.approx(3 / 5),
        "f1": pytest.approx(2 / 3),
        "precision": pytest.approx(2 / 3),
        "recall": pytest.approx(2 / 3),
        "several": pytest.approx((1 + 1 / 2 + 0) / 3),
        "each": pytest.approx([1, 1 / 2, 0]),
        "sets": pytest.approx(2 / 3),
        "own": 42.0,
    }
