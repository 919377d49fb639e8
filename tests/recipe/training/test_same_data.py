"""Hosts that hold different data: a ShardedByS3Key channel, or another file on one of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.paths import CODE

# What a launcher on each of two hosts does, in two processes of one.
HOSTS = """
import os, runpy, sys
rank = os.environ["RANK"]
os.environ["SM_CURRENT_HOST"] = f"algo-{int(rank) + 1}"
os.environ["SM_CHANNEL_TRAIN"] = os.path.join(os.environ["SHARDS"], rank)
sys.argv[0] = sys.argv[1]
del sys.argv[1]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.heavy
@pytest.mark.parametrize("rows", [(40, 40), (40, 48)], ids=["as-many-rows", "more-rows"])
@pytest.mark.long
def test_different_data_is_refused_before_a_step(
    tmp_path: Path,
    tiny_model: Path,
    reviews: Callable[[int], list[tuple[str, str]]],
    rows: tuple[int, int],
) -> None:
    written = reviews(sum(rows))
    for rank, shard in enumerate((written[: rows[0]], written[rows[0] :])):
        folder = tmp_path / "shards" / str(rank)
        folder.mkdir(parents=True)
        lines = (f'"{text}",{label}' for text, label in shard)
        (folder / "part.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    (tmp_path / "hosts.py").write_text(HOSTS)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    command += [str(tmp_path / "hosts.py"), str(CODE / "train.py")]
    done = subprocess.run(
        [*command, "--model_id", str(tiny_model), "--epochs", "1", "--batch_size", "4"],
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "SAGEMAKER_BASE_DIR": str(tmp_path / "ml"),
            "SHARDS": str(tmp_path / "shards"),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert (
        "DistributedError: The processes have read different data: rank 0 on algo-1" in done.stderr
    )
    assert "rank 1 on algo-2" in done.stderr and "FullyReplicated" in done.stderr
    assert "metric step" not in done.stdout
