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


@pytest.mark.versions
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("python", "plain"),
    [pytest.param(PYTHON_4, ["tensorboard"], id="4"), pytest.param(sys.executable, [], id="5")],
)
def test_trackers_of_the_image_do_not_join_a_script(
    tmp_path: Path, python: Path | str, plain: list[str]
) -> None:
    """Unless it names or configures them; without a server, MLflow keeps its runs as files."""
    trackers = """
import json, os, mlflow, torch
from accelerate import Accelerator
from transformers import Trainer, TrainingArguments


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.mse_loss(self.layer(x), labels)}


def arguments(**options):
    return TrainingArguments("out", max_steps=1, use_cpu=True, disable_tqdm=True, **options)


def train(**options):
    args, rows = arguments(**options), [{"x": torch.ones(4), "labels": torch.ones(1)}] * 4
    trainer = Trainer(model=Net(), args=args, train_dataset=rows)
    trainer.train()
    trainer.evaluate(rows)
    return args.report_to


def accelerated(name):
    accelerator = Accelerator(log_with=name, project_dir="out", cpu=True)
    accelerator.init_trackers("project", config={"a": 1})
    accelerator.log({"loss": 1.0}, step=1)
    accelerator.end_training()
    return [tracker.name for tracker in accelerator.trackers]


# As in a cross-validation: MLflow refuses other arguments in one run.
found = {
    "plain": [train(), train(learning_rate=0.1)],
    "all": [train(report_to="all"), train(report_to="all", learning_rate=0.1)],
    "accelerate's all": accelerated("all"),
    "named": [train(report_to="mlflow"), accelerated("mlflow")],
}
os.environ["WANDB_MODE"] = "offline"
mlflow.set_tracking_uri("file:///tmp/elsewhere")
found["configured"] = arguments(report_to="all").report_to
print("found", json.dumps(found))
"""
    (actual,) = printed(tmp_path, python, trackers)
    assert actual.pop("plain") == [plain, plain]
    assert actual.pop("all") == [["tensorboard"], ["tensorboard"]]
    assert actual.pop("accelerate's all") == ["tensorboard"]
    assert actual.pop("named") == [["mlflow"], ["mlflow"]]
    assert set(actual.pop("configured")) == {"mlflow", "tensorboard", "wandb"}
    runs = list((tmp_path / "output/data/mlflow").glob("*/*/meta.yaml"))
    assert len(runs) == 3, "of train, of evaluate after it, and of accelerate"


@pytest.mark.versions
@pytest.mark.timeout(500)
def test_lightning_trains_one_model_on_cpus(tmp_path: Path) -> None:
    """In two processes, with its own logger."""
    lightning = """
import json, os, torch, lightning


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(int(os.environ["RANK"]))  # a joined training starts from rank 0's
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


x = torch.randn(12, 4, generator=torch.Generator().manual_seed(7))
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
trainer, net = lightning.Trainer(max_epochs=2, enable_progress_bar=False), Net()
trainer.fit(net, torch.utils.data.DataLoader(data, batch_size=6))
print("found", json.dumps([trainer.world_size, net.layer.weight.tolist()]))
"""
    first, second = printed(tmp_path, PYTHON_4, lightning, processes=2)
    assert first == second and first[0] == 2


@pytest.mark.versions
@pytest.mark.timeout(500)
def test_setfit_trains(tmp_path: Path, tiny_model: Path) -> None:
    """By default it reports to all."""
    setfit = """
import json, sys
from datasets import Dataset
from sentence_transformers import SentenceTransformer, models
from setfit import SetFitModel, Trainer, TrainingArguments
from sklearn.linear_model import LogisticRegression

words = models.Transformer(sys.argv[-1])
body = SentenceTransformer(modules=[words, models.Pooling(32)], device="cpu")
model = SetFitModel(model_body=body, model_head=LogisticRegression(), labels=["good", "bad"])
data = Dataset.from_dict({"text": ["good film", "bad film"] * 2, "label": [0, 1] * 2})
args = TrainingArguments(num_epochs=1, num_iterations=1, output_dir="out")
Trainer(model=model, args=args, train_dataset=data).train()
print("found", json.dumps([args.report_to, model.predict(["good film"])]))
"""
    (actual,) = printed(tmp_path, PYTHON_4, setfit, model=str(tiny_model))
    assert actual[0] == ["tensorboard"]
