"""task=preference in processes of its own: from `amphora train` to an answer, sharded, stopped."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.support import causal_kit, worlds
from tests.support.job_tree import trained
from tests.support.servers import served

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return causal_kit.make_model("llama", tmp_path_factory.mktemp("start"))


def talks(count: int) -> list[dict[str, object]]:
    """As UltraFeedback's: whole conversations, of which the last turn differs."""
    drawn = random.Random(0)
    rows = []
    for number in range(count):
        asked = {"role": "user", "content": f"say {drawn.choice('abc')} {number}"}
        good, bad = ({"role": "assistant", "content": each} for each in ("yes yes", "no"))
        rows.append({"chosen": [asked, good], "rejected": [asked, bad], "score": number})
    return rows


def test_from_train_to_an_answered_request(start: Path, tmp_path: Path) -> None:
    """The task is found; adapters are trained on conversations, merged and served."""
    causal_kit.write(tmp_path / "input" / "data" / "train", talks(120))
    given = {"model_name_or_path": str(start), "epochs": "4", "lr": "3e-2", "batch_size": "8",
             "lora_r": "16", "metric_for_best_model": "reward_margin",
             "early_stopping_patience": "3", "max_length": "96"}  # fmt: skip
    log = trained(tmp_path, given)
    assert "task: preference (columns chosen and rejected" in log
    assert "the prompt is what both answers begin with; not read: score" in log
    metrics = json.loads((tmp_path / "output" / "data" / "metrics.json").read_text())
    assert metrics["eval_reward_accuracy"] == 1.0
    assert metrics["eval_reward_margin"] > 0.3
    with served(tmp_path, AMPHORA_DTYPE="float32") as server:
        assert causal_kit.complete(server, "say a 7")


@pytest.mark.timeout(400)
@pytest.mark.long
def test_shards_in_bfloat16_train_what_ddp_does(start: Path, tmp_path: Path) -> None:
    """As it is by default where a device is faster with it; and their references are alike."""
    data = causal_kit.write(tmp_path / "in", talks(48))
    argv = ["--model_id", str(start), "--task", "preference", "--bf16", "True", "--lr", "0.02"]
    argv += ["--optim", "sgd", "--epochs", "1", "--batch_size", "4", "--max_length", "96"]
    sharded = ["--mp_parameters", "partitions=2"]
    ddp, fsdp = (
        worlds.Training(base=str(tmp_path / name), data=str(data), argv=argv + more, processes=2)
        for name, more in (("ddp", []), ("fsdp", sharded))
    )
    assert worlds.run(ddp, fsdp) == [[0, 0], [0, 0]], ddp.log() + fsdp.log()
    assert "sharded over 2 processes" in fsdp.log()
    found, kept = [], []
    for each in (ddp, fsdp):
        base = Path(each.base)
        metrics = json.loads((base / "output" / "data" / "metrics.json").read_text())
        found.append((metrics["eval_loss"], metrics["eval_reward_margin"]))
        (checkpoint,) = (base / "checkpoints").glob("checkpoint-*")
        kept.append(load_file(checkpoint / "references.safetensors"))
    assert kept[0].keys() == kept[1].keys()
    for name, values in kept[0].items():
        assert kept[1][name] == pytest.approx(values, rel=1e-2)
    assert found[0][0] < 0.68
    assert found[1][0] == pytest.approx(found[0][0], rel=5e-3)
    assert found[1][1] == pytest.approx(found[0][1], rel=0.05)
