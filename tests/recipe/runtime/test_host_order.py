"""Waiting for a host's first process, beside a collective's time-out."""

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessRaisedException

from recipe.runtime.host_order import first_of_host
from tests.support.forked import run_processes

TIMEOUT = 3.0
"""Of collectives, in seconds; what the first process does takes longer."""
WORLD = 4
A_HOST = 2


def work(rank: int, folder: str, fails: bool) -> None:
    os.environ["LOCAL_RANK"] = str(rank % A_HOST)
    # They take seconds to start, not all the same; to connect they have the time-out, too.
    (Path(folder) / f"started-{rank}").touch()
    while len(list(Path(folder).glob("started-*"))) < WORLD:
        time.sleep(0.02)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD,
        timeout=timedelta(seconds=TIMEOUT),
    )  # fmt: skip
    host = Path(folder) / str(rank // A_HOST)
    for name in ("tokens", "model"):
        with first_of_host():
            is_first = not (host / name).exists()
            assert is_first == (rank % A_HOST == 0), rank
            if is_first:
                # Hosts are not equally fast, and both are slower than a collective may be.
                time.sleep(TIMEOUT * (1.2 if rank else 2.4) * (name == "tokens"))
                host.mkdir(exist_ok=True)
                if fails and rank == A_HOST:
                    raise ValueError("no such column")
                (host / name).touch()
    number = torch.ones(1)
    dist.all_reduce(number)
    assert number.item() == WORLD
    (Path(folder) / f"done-{rank}").touch()
    dist.destroy_process_group()


@pytest.mark.heavy
def test_the_others_wait_longer_than_a_collective_would(tmp_path: Path) -> None:
    run_processes(work, (str(tmp_path), False), WORLD)
    assert len(list(tmp_path.glob("done-*"))) == WORLD


@pytest.mark.timeout(120)
def test_a_first_process_that_fails_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(ProcessRaisedException, match=r"no such column|AssertionError"):
        run_processes(work, (str(tmp_path), True), WORLD)
    assert not list(tmp_path.glob("done-*"))


def test_one_process_has_nobody_to_wait_for() -> None:
    with first_of_host():
        pass
