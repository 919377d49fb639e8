"""What is ranked, trained by several processes, sharded, stopped and resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.job_tree import trained
from tests.support.paths import CODE
from tests.support.ranking_jobs import lists, rows_of, triplets, write
from tests.support.servers import served

pytestmark = pytest.mark.heavy
Run = Callable[..., "subprocess.CompletedProcess[str]"]
LEARNING = ("--lr", "1e-3", "--epochs", "1", "--use_cpu", "True", "--max_length", "40")
_GRADIENTS = """
import sys, torch, torch.distributed as dist
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses
from recipe.models import ranking_losses
dist.init_process_group("gloo")
rank, rows = dist.get_rank(), 4
def model():
    made = SentenceTransformer(sys.argv[1], device="cpu")
    for module in made.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return made
def features(encoder):
    at = range(0, 4 * rows, 2)[rank * rows : (rank + 1) * rows]
    texts = [[f"film number {n}" for n in at], [f"the film was number {n}" for n in at],
             [f"the bad film was {n + 1}" for n in at]]
    return [{k: v for k, v in encoder.tokenize(each).items() if k != "modality"} for each in texts]
def gradients(encoder, loss):
    loss.backward()
    for name, weight in encoder.named_parameters():
        if weight.grad is not None:
            dist.all_reduce(weight.grad)
            yield name, weight.grad / dist.get_world_size()
theirs = model()
loss = losses.MultipleNegativesRankingLoss(theirs, gather_across_devices=True)
wanted = dict(gradients(theirs, loss(features(theirs), None)))
ours = model()
vectors = torch.stack([ours(dict(each))["sentence_embedding"] for each in features(ours)], dim=1)
texts = torch.arange(1, 3 * rows + 1).reshape(rows, 3) + rank * 3 * rows
# One place of the batch is empty.
vectors = torch.cat([vectors, torch.randn(1, *vectors.shape[1:])])
texts = torch.cat([texts, torch.zeros(1, 3, dtype=torch.int64)])
each = ranking_losses.multiple_negatives(vectors, texts, 20.0)[:rows]
found = dict(gradients(ours, each.mean()))
assert found.keys() == wanted.keys() and len(found) > 10
assert max(float(each.abs().max()) for each in wanted.values()) > 1e-2
for name, value in wanted.items():
    torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)
print("the same", len(found))
"""


def metrics_of(base: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads((base / "output" / "data" / "metrics.json").read_text())
    return found


def test_gathered_negatives_have_the_librarys_gradients(tiny_model: Path, tmp_path: Path) -> None:

    script = tmp_path / "gradients.py"
    script.write_text(_GRADIENTS)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    launcher += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    done = subprocess.run(
        [*launcher, str(script), str(tiny_model)],
        env={**os.environ, "PYTHONPATH": str(CODE), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the same") == 2


@pytest.mark.parametrize(
    "task", ["sentence-embedding", pytest.param("reranking", marks=pytest.mark.long)]
)
def test_from_amphora_train_to_an_answered_request(
    task: str, tiny_model: Path, tmp_path: Path
) -> None:
    """What is served says what the library says of the saved model. Pairs are recognised; labelled
    rows, which may be anything's, are named."""
    from sentence_transformers import CrossEncoder, SentenceTransformer

    rows = triplets(45) if task == "sentence-embedding" else rows_of(lists(40))
    write(tmp_path / "input" / "data" / "train", rows)
    given = {"model_name_or_path": str(tiny_model), "epochs": "1", "lr": "1e-3", "max_length": "40"}
    given |= {"task": task} if task == "reranking" else {}
    log = trained(tmp_path, given)
    assert f"task: {task} (" in log
    assert "eval_ndcg_at_10" in metrics_of(tmp_path)
    folder = str(tmp_path / "model")
    texts = ["the great film was number 7", "number 3 , truly", "bad"]
    with served(tmp_path) as server:
        if task == "sentence-embedding":
            answer = server.invoke({"inputs": texts}).raise_for_status().json()
            vectors = SentenceTransformer(folder, device="cpu").encode(texts)
            torch.testing.assert_close(
                torch.tensor(answer), torch.tensor(vectors), rtol=0, atol=0.03
            )
        else:
            body = {"inputs": {"query": "film number 7", "texts": texts}}
            answer = server.invoke(body).raise_for_status().json()
            scores = {each["index"]: each["score"] for each in answer}
            wanted = CrossEncoder(folder, device="cpu").predict(
                [("film number 7", t) for t in texts]
            )
            assert [scores[at] for at in range(3)] == pytest.approx(wanted.tolist(), abs=0.03)


@pytest.mark.parametrize("task", ["pairs", "lists"])
@pytest.mark.long
def test_two_processes_learn_what_one_does(
    task: str, tiny_model: Path, train: Run, tmp_path: Path
) -> None:
    """Without dropout, the same losses and scores: the batch is that of both."""
    from transformers import AutoModel, AutoTokenizer

    model: Any = AutoModel.from_pretrained(
        tiny_model, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "model")
    rows = {"pairs": triplets(45), "lists": lists(30)}[task]
    data = {"train": write(tmp_path / "data", rows)}
    argv = ["--task", "reranking" if task == "lists" else "sentence-embedding", *LEARNING]
    argv += ["--model_id", str(tmp_path / "model"), "--bf16", "False", "--save_strategy", "no"]
    argv += ["--listwise", "True"] if task == "lists" else []
    found = []
    for processes in (1, 2):
        base = tmp_path / str(processes)
        size = str(8 // processes)
        done = train(base, data, *argv, "--batch_size", size, processes=processes)
        assert done.returncode == 0, done.stderr
        found.append(metrics_of(base))
    for name in ("train_loss", *(each for each in found[0] if each.startswith("eval_"))):
        if not name.endswith(("runtime", "per_second")):
            assert found[1][name] == pytest.approx(found[0][name], rel=2e-3), name


@pytest.mark.long
def test_a_stopped_training_ends_with_the_same_weights(
    tiny_model: Path, train: Run, tmp_path: Path
) -> None:
    data = {"train": write(tmp_path / "data", triplets(45))}
    argv = ["--task", "sentence-embedding", *LEARNING, "--model_id", str(tiny_model)]
    argv += ["--batch_size", "8", "--mini_batch_size", "4", "--eval_strategy", "no"]
    argv += ["--save_strategy", "steps", "--save_steps", "3", "--save_total_limit", "9"]
    whole = train(tmp_path / "whole", data, *argv)
    assert whole.returncode == 0, whole.stderr
    checkpoints = tmp_path / "again" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (tmp_path / "whole" / "checkpoints" / "checkpoint-3").rename(checkpoints / "checkpoint-3")
    again = train(tmp_path / "again", data, *argv)
    assert "resuming from" in again.stdout, again.stderr
    weights = [
        (tmp_path / name / "model" / "model.safetensors").read_bytes()
        for name in ("whole", "again")
    ]
    assert weights[0] == weights[1]
