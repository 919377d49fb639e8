"""Hosts with rows of their own (ShardedByS3Key): unequal parts, a part of one label, none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.causal_kit import make_model
from tests.support.paths import CODE
from tests.support.words import reviews

# What a launcher on each of three hosts does, in three processes of one.
HOSTS = """
import os, runpy, sys
rank = os.environ["RANK"]
os.environ["SM_CURRENT_HOST"] = f"algo-{int(rank) + 1}"
for channel in ("train", "test"):
    os.environ[f"SM_CHANNEL_{channel.upper()}"] = os.path.join(os.environ["SHARDS"], channel, rank)
sys.argv[0] = sys.argv[1]
del sys.argv[1]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SHARDED = {"S3DistributionType": "ShardedByS3Key"}


def write(folder: Path, rows: Sequence[tuple[str, str]]) -> None:
    """A file of the rows, if there are any."""
    folder.mkdir(parents=True)
    if rows:
        lines = (f'"{text}",{label}' for text, label in rows)
        (folder / "part.csv").write_text("\n".join(["text,label", *lines]) + "\n")


def start(
    base: Path, *arguments: str, processes: int, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a training of as many hosts, each with its folder of the shards."""
    command = [sys.executable, str(CODE / "train.py")]
    if processes > 1:
        (base / "hosts.py").write_text(HOSTS)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node"]
        command += [str(processes), "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
        command += [str(base / "hosts.py"), str(CODE / "train.py")]
    return subprocess.run(
        [*command, *arguments],
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("SM_")},
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=240,
    )


def run(base: Path, *arguments: str, processes: int, **variables: str) -> str:
    """Return stdout of a training that succeeds."""
    done = start(base, *arguments, processes=processes, **variables)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.heavy
@pytest.mark.parametrize(
    "processes",
    [2, pytest.param(3, marks=pytest.mark.long)],
    ids=["two", "one-has-no-rows"],
)
def test_hosts_train_on_their_own_rows_and_are_judged_on_all(
    tmp_path: Path,
    tiny_model: Path,
    processes: int,
) -> None:
    rows = [(text, label) for text, label in reviews(90)]
    # The first host knows no label but one; the third has nothing at all.
    train = [[row for row in rows[:60] if row[1] == "pos"], rows[40:58], []]
    test = [rows[60:65], rows[65:90], []]
    for rank in range(processes):
        write(tmp_path / "shards" / "train" / str(rank), train[rank])
        write(tmp_path / "shards" / "test" / str(rank), test[rank])
    out = run(
        tmp_path,
        *("--model_id", str(tiny_model), "--epochs", "2", "--batch_size", "4"),
        processes=processes,
        SAGEMAKER_BASE_DIR=str(tmp_path / "ml"),
        SHARDS=str(tmp_path / "shards"),
        SM_INPUT_DATA_CONFIG=json.dumps({"train": SHARDED, "test": SHARDED}),
    )
    hosts = ["algo-1 30", "algo-2 18", "algo-3 0"][:processes]
    assert f"training rows of each host: {', '.join(hosts)}" in out
    assert "2 labels: neg (9 rows), pos (39 rows)" in out
    # 30 rows of the first host, 4 at a time.
    trained = json.loads((tmp_path / "ml" / "checkpoints").glob("*/trainer_state.json").__next__()
                         .read_text())  # fmt: skip
    assert trained["max_steps"] == 2 * 8
    metrics = json.loads((tmp_path / "ml/output/data/metrics.json").read_text())
    write(tmp_path / "whole", [row for part in test for row in part])
    run(
        tmp_path,
        *("--model_id", str(tmp_path / "ml" / "model"), "--do_train", "False", "--do_eval", "True"),
        processes=1,
        SAGEMAKER_BASE_DIR=str(tmp_path / "one"),
        SM_CHANNEL_TEST=str(tmp_path / "whole"),
    )
    whole = json.loads((tmp_path / "one/output/data/metrics.json").read_text())
    timed = ("_second", "_runtime")
    judged = {
        name: value
        for name, value in whole.items()
        if name.startswith("eval_") and not name.endswith(timed)
    }
    assert judged.keys() >= {"eval_loss", "eval_accuracy"}
    assert {name: metrics[name] for name in judged} == pytest.approx(judged, abs=2e-4)


@pytest.mark.heavy
@pytest.mark.long
def test_documents_of_their_own_hosts_and_a_resume_that_ends_with_the_same_weights(
    tmp_path: Path,
) -> None:
    tiny_decoder = make_model("llama", tmp_path / "decoder")
    rows = [
        json.dumps({"prompt": f"{n} plus {n % 7} is ", "completion": f"{n + n % 7}"})
        for n in range(50)
    ]
    for rank, part in enumerate((rows[:30], rows[30:], [])):
        folder = tmp_path / "shards" / "train" / str(rank)
        folder.mkdir(parents=True)
        (tmp_path / "shards" / "test" / str(rank)).mkdir(parents=True)
        if part:
            (folder / "part.jsonl").write_text("\n".join(part))
    # Two tasks take prompt_column; only hosts with data can detect which one is meant.
    arguments = ("--model_id", str(tiny_decoder), "--epochs", "2", "--batch_size", "4",
                 "--prompt_column", "prompt")  # fmt: skip
    variables = {
        "SAGEMAKER_BASE_DIR": str(tmp_path / "ml"),
        "SHARDS": str(tmp_path / "shards"),
        "SM_INPUT_DATA_CONFIG": json.dumps({"train": SHARDED, "test": SHARDED}),
    }
    run(tmp_path, *arguments, processes=3, **variables)
    weights = (tmp_path / "ml/model/model.safetensors").read_bytes()
    # A tenth of each host's documents is held out.
    shutil.rmtree(tmp_path / "ml/checkpoints/checkpoint-14")
    (tmp_path / "ml/model/model.safetensors").unlink()
    out = run(tmp_path, *arguments, processes=3, **variables)
    assert "training documents of each host: algo-1 27, algo-2 18, algo-3 0" in out
    assert "resuming from" in out and "checkpoint-7" in out
    assert (tmp_path / "ml/model/model.safetensors").read_bytes() == weights


@pytest.mark.heavy
@pytest.mark.parametrize("rows", [40, 48], ids=["as-many-rows", "more-rows"])
@pytest.mark.long
def test_different_data_is_refused_before_a_step(
    tmp_path: Path, tiny_model: Path, rows: int
) -> None:
    """A channel that SageMaker did not shard, with another file on one of the hosts."""
    written = reviews(40 + rows)
    for rank, part in enumerate((written[:40], written[40:])):
        write(tmp_path / "shards" / "train" / str(rank), part)
        (tmp_path / "shards" / "test" / str(rank)).mkdir(parents=True)
    done = start(
        tmp_path, "--model_id", str(tiny_model), "--epochs", "1", "--batch_size", "4",
        processes=2, SAGEMAKER_BASE_DIR=str(tmp_path / "ml"), SHARDS=str(tmp_path / "shards"),
    )  # fmt: skip
    assert done.returncode != 0
    assert (
        "DistributedError: The processes have read different data: rank 0 on algo-1" in done.stderr
    )
    assert "rank 1 on algo-2" in done.stderr and "FullyReplicated" in done.stderr
    assert "metric step" not in done.stdout
