"""Processes of torch-xla that do not reduce are refused before they train.

torch-xla's CPU device has no collectives: each of two processes is a world of one. That DDP trains on
several XLA devices as on one was not run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.paths import CODE
from tests.support.xla_job import Job

pytestmark = [pytest.mark.xla, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def test_processes_that_would_train_apart_do_not_start(
    tmp_path: Path, tiny_model: Path, write_data: Callable[..., Path]
) -> None:
    job = Job(tmp_path, tiny_model, write_data(20), epochs=1)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    done = subprocess.run(
        [*command, str(CODE / "train.py"), *job.argv],
        env={**os.environ, **job.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode != 0
    assert "WORLD_SIZE is 2, but a sum over all processes has 1 term(s)" in done.stderr
    assert not (tmp_path / "model").exists()
