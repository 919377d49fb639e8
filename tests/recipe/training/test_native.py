"""The recipe under TorchNeuron's rules, by what stock torch can play of it on a CPU.

Of the product this exercises code/train.py whole: its packed batches and their one shape, the
forward pass of training and of evaluation as torch.compile sees it (dynamic=False; fullgraph in one
process, under DDP without); DDP and the recipe's own check of the world through a process group of
the name that accelerate chooses on the device. Not exercised: torch-neuronx, its eager operations and
its compiler, collectives between cores, bfloat16 there, and accelerate's own start of the group. No
Trainium device was here.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from recipe import paths
from recipe.hyperparameters import Hyperparameters
from recipe.models import pretrained
from recipe.training import preparation
from recipe.training import run as training_run
from tests.support.paths import ROOT
from tests.support.preloading import run_script
from tests.support.tasks import CASES, make
from tests.support.words import reviews

WATCHED = ("text-classification", "ranks of lists")  # the others take minutes in all
COMPILED = ("--compile", "--torch_compile_backend", "neuron")


def run(
    folder: Path, rows: list[tuple[str, str]], preloaded: Mapping[str, str], *arguments: str,
    processes: int = 1, **more: str,
) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:  # fmt: skip
    """A training under the rules, and what each process saw."""
    data = folder / "in"
    data.mkdir(parents=True)
    lines = [json.dumps({"text": text, "label": label}) for text, label in rows]
    (data / "train.jsonl").write_text("\n".join(lines))
    environ = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("SM_", "SAGEMAKER_"))},
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "SAGEMAKER_BASE_DIR": str(folder),
        "SM_CHANNEL_TRAIN": str(data),
        **more,
    }
    argv = [str(ROOT / "tests/support/neuron_rules.py"), str(folder), "--bf16", "False", *arguments]
    if processes == 1:
        done = run_script(preloaded, argv, environ, folder)
    else:
        launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        done = subprocess.run(
            [sys.executable, "-m", *launcher, *argv], env=environ, capture_output=True, text=True, timeout=240
        )  # fmt: skip
    return done, [json.loads(path.read_text()) for path in sorted(folder.glob("[0-9].json"))]


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name",
    [case if case in WATCHED else pytest.param(case, marks=pytest.mark.long) for case in CASES],
)
def test_nothing_is_computed_in_float64(
    name: str, tmp_path: Path, preloaded: Mapping[str, str]
) -> None:
    """TorchNeuron would silently compute it in float32."""
    OPERATORS = ROOT / "tests" / "support" / "neuron_operators.txt"
    data, arguments = make(name, tmp_path)
    more = ("--max_steps", "3", "--batch_size", "4")
    done, (seen,) = run(
        tmp_path / "run", [], preloaded, *arguments, *more, SM_CHANNEL_TRAIN=str(data), WATCH="1"
    )
    assert done.returncode == 0, done.stderr
    # Forward and backward were watched: frozen embeddings, and those of images, have no gradient.
    backward = [name for name in seen["operators"] if "backward" in name]
    assert backward and len(seen["operators"]) > 2 * len(backward)
    assert [name for name, is_double in seen["operators"].items() if is_double] == []
    lines = OPERATORS.read_text().splitlines()
    listed = {name for line in lines if not line.startswith("#") for name in line.split()}
    called = {name.split(".")[1] for name in seen["operators"] if name.startswith("aten.")}
    assert called <= listed, "check whether TorchNeuron computes these, and add them"


def test_the_process_group_is_started_before_anything_is_seeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeding may start the runtime of a Neuron device, which assigns cores."""

    class Stopped(Exception):
        """Raised in place of seeding."""

    calls = []

    def find(*_: object) -> None:
        raise Stopped

    monkeypatch.setattr(training_run.device, "join", lambda kind, _: calls.append(kind))
    monkeypatch.setattr(preparation, "set_seed", lambda seed: calls.append("seed"))
    monkeypatch.setattr(pretrained, "find", find)
    monkeypatch.setattr(training_run.tracking, "set_default_folders", lambda _: None)
    folders = paths.from_environment({"SAGEMAKER_BASE_DIR": str(tmp_path)})
    with pytest.raises(Stopped):
        training_run.run(Hyperparameters(), folders, {})
    assert calls == ["cpu"]


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name",
    [
        case if case == "text-classification" else pytest.param(case, marks=pytest.mark.long)
        for case in CASES
    ],
)
def test_every_task_keeps_the_rules(
    name: str, tmp_path: Path, preloaded: Mapping[str, str]
) -> None:
    """No break, no symbolic shape, and few graphs."""
    # Training has a graph for each length of sources and targets, and evaluation one. In the second
    # epoch of embeddings, a step needs one block more than those of the first.
    graphs_per_epochs = {"summarization": [3, 3], "summarization, LoRA": [3, 3],
                         "translation": [4, 4], "text2text-generation": [4, 4],
                         "sentence-embedding": [2, 3]}  # fmt: skip
    data, arguments = make(name, tmp_path)
    graphs = []
    for epochs in ("1", "2"):
        more = ("--epochs", epochs, "--batch_size", "4", *COMPILED)
        done, (seen,) = run(
            tmp_path / epochs, [], preloaded, *arguments, *more, SM_CHANNEL_TRAIN=str(data)
        )
        assert done.returncode == 0, done.stderr
        assert seen["breaks"] == 0
        graphs.append(seen["graphs"])
    assert graphs == graphs_per_epochs.get(name, [2, 2])


@pytest.mark.heavy
@pytest.mark.long
def test_two_processes_agree_through_a_group_called_neuron(
    tmp_path: Path, still_model: Path, preloaded: Mapping[str, str]
) -> None:
    arguments = ("--model_id", str(still_model), "--epochs", "2", "--lr", "5e-3")
    weights = []
    for processes, size in ((1, "8"), (2, "4")):
        folder = tmp_path / str(processes)
        argv = (*arguments, *COMPILED, "--batch_size", size)
        done, seen = run(folder, reviews(40), preloaded, *argv, processes=processes)
        assert done.returncode == 0, done.stderr
        assert [case["graphs"] for case in seen] == [2] * processes, seen
        weights.append(load_file(folder / "model" / "model.safetensors"))
    alone, together = weights
    for name, weight in alone.items():
        torch.testing.assert_close(together[name], weight, atol=1e-4, rtol=0)


@pytest.mark.heavy
@pytest.mark.long
def test_processes_that_do_not_reduce_are_refused_before_they_train(
    tmp_path: Path, tiny_model: Path, preloaded: Mapping[str, str]
) -> None:
    arguments = ("--model_id", str(tiny_model), "--epochs", "1")
    done, _ = run(tmp_path / "a", reviews(20), preloaded, *arguments, processes=2, LONELY="1")
    assert done.returncode != 0
    assert "WORLD_SIZE is 2, but a sum over all processes has 1 term(s)" in done.stderr
    assert not (tmp_path / "a" / "model").exists()
