"""masked-lm, summarization and image-classification in processes of their own: resumed, sharded, with
adapters, and from `amphora train` to an answered request."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support import texts_and_pictures
from tests.support.job_tree import Tree
from tests.support.paths import CODE
from tests.support.servers import served

Run = Callable[..., "subprocess.CompletedProcess[str]"]
TASKS = ("masked-lm", "summarization", "image-classification")
pytestmark = pytest.mark.heavy


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.long
def test_a_resumed_run_and_shards_end_with_the_same_weights(
    tmp_path: Path, train: Run, task: str
) -> None:
    kind = texts_and_pictures.make(task, tmp_path / "kind")
    arguments = [*kind.arguments, "--model_id", str(kind.model), "--bf16", "False"]
    arguments += ["--lr", "0.05", "--optim", "sgd", "--epochs", "2", "--logging_steps", "1"]
    saved = ["--batch_size", "16", "--save_strategy", "steps", "--save_steps", "3"]
    whole = train(tmp_path / "one", kind.channels, *arguments, *saved)
    assert whole.returncode == 0, whole.stderr
    weights = load_file(tmp_path / "one" / "model" / "model.safetensors")
    again = tmp_path / "again"
    # Two batches into the second epoch.
    shutil.copytree(tmp_path / "one" / "checkpoints", again / "checkpoints")
    steps = sorted((again / "checkpoints").glob("checkpoint-*"), key=lambda p: int(p.name[11:]))
    shutil.rmtree(steps[-1])
    resumed = train(again, kind.channels, *arguments, *saved)
    assert resumed.returncode == 0, resumed.stderr
    assert f"resuming from {steps[-2]}" in resumed.stdout
    for key, weight in load_file(again / "model" / "model.safetensors").items():
        assert torch.equal(weight, weights[key]), key
    more = ["--batch_size", "4", "--gradient_accumulation_steps", "2"]
    more += ["--mp_parameters", "partitions=2"]
    sharded = train(tmp_path / "two", kind.channels, *arguments, *more, processes=2)
    assert sharded.returncode == 0, sharded.stderr
    assert "sharded over 2 processes" in sharded.stdout
    for key, weight in load_file(tmp_path / "two" / "model" / "model.safetensors").items():
        torch.testing.assert_close(weight, weights[key], rtol=0, atol=2e-5, msg=key)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.long
def test_ddp_in_bfloat16_with_adapters_trains(tmp_path: Path, train: Run, task: str) -> None:
    kind = texts_and_pictures.make(task, tmp_path / "kind")
    arguments = [*kind.arguments, "--model_id", str(kind.model), "--bf16", "True"]
    arguments += ["--lr", "1e-2", "--epochs", "3", "--batch_size", "8", "--lora_r", "4"]
    arguments += ["--lora_save", "adapter", "--early_stopping_patience", "2"]
    done = train(tmp_path / "two", kind.channels, *arguments, processes=2)
    assert done.returncode == 0, done.stderr
    assert "LoRA: rank 4" in done.stdout
    model = tmp_path / "two" / "model"
    assert (model / "adapter_model.safetensors").is_file() and (model / "SHA256SUMS").is_file()
    history = [float(loss) for loss in re.findall(r"'eval_loss': ([^,}]+)", done.stdout)]
    assert history[-1] < history[0]


@pytest.mark.parametrize(
    "task",
    ["summarization", *(pytest.param(each, marks=pytest.mark.long) for each in TASKS[::2])],
)
def test_from_amphora_train_to_an_answered_request(tmp_path: Path, task: str) -> None:
    kind = texts_and_pictures.make(task, tmp_path / "kind", 320)
    tree = Tree(tmp_path / "ml")
    for name, folder in kind.channels.items():
        shutil.copytree(folder, tree.base / "input" / "data" / name)
    pairs = zip(kind.arguments[::2], kind.arguments[1::2], strict=True)
    given = {key.removeprefix("--"): value for key, value in pairs}
    given |= {"model_name_or_path": str(kind.model), "epochs": "8", "lr": "5e-3"}
    given |= {"batch_size": "16", "use_cpu": "True"}
    if task != "masked-lm":
        given["do_predict"] = "True"
    tree.configure(given)
    run = {"AMPHORA_CODE_DIR": str(CODE), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    looked = subprocess.run(
        [*tree.command()[:-1], "doctor", "--base-dir", str(tree.base)],
        env=tree.environment(**run), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert looked.returncode == 0, looked.stdout + looked.stderr
    done = tree.train(timeout=240, **run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"task: {task}" in done.stdout
    output = tree.base / "output" / "data"
    metrics = json.loads((output / "metrics.json").read_text())
    with served(tree.base, AMPHORA_DTYPE="float32") as server:
        if task == "masked-lm":
            assert metrics["eval_perplexity"] < 30
            (answer, *_) = _of(server.invoke({"inputs": "the [MASK] was good"}))
            assert set(answer) >= {"score", "token_str", "sequence"}
        elif task == "summarization":
            # What do_predict wrote with the prefix is what the served model writes by itself.
            lines = _lines(output / "predictions.jsonl")
            rows = _lines(kind.channels["test"] / "pairs.jsonl")
            assert metrics["eval_rouge1"] > 30
            parameters = {"num_beams": 1}
            texts = [row["document"] for row in rows]
            answers = _of(server.invoke({"inputs": texts, "parameters": parameters}))
            said = [answer["generated_text"] for answer in answers]
            assert said == [line["text"] for line in lines]
        else:
            assert metrics["eval_accuracy"] > 0.9
            picture = min((kind.channels["test"] / "right").glob("*.png")).read_bytes()
            reply = server.http.post(
                "/invocations", content=picture, headers={"content-type": "image/png"}
            )
            assert _of(reply)[0]["label"] == "right"
            encoded = base64.b64encode(picture).decode()
            assert _of(server.invoke({"inputs": encoded}))[0]["label"] == "right"


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _of(reply: Any) -> Any:
    assert reply.status_code == 200, reply.text
    return reply.json()
