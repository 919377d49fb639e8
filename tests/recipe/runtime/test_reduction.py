"""Processes of a job: gradients as DDP sums them, with fewer numbers sent; waiting for a host's
first process, beside a collective's time-out."""

import contextlib
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.nn.parallel import DistributedDataParallel

from recipe.runtime import ddp_hook
from recipe.runtime.device import first_of_host
from tests.support.forked import run_processes

ROWS, WIDTH = 20_000, 64


class Model(nn.Module):
    """A large embedding, maybe the output's weight too, and products: several buckets of gradients."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH * (1 + n % 2), 2 * WIDTH) for n in range(6))
        self.tied = tied

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden[..., : layer.in_features]).tanh()
        return hidden[..., :WIDTH] @ self.embedding.weight.T if self.tied else hidden


def process(rank: int, folder: str, world: int, tied: bool, accumulate: int) -> None:
    """Save the gradients of two steps as DDP sums them, of two by rows, and the numbers sent for these."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    sent, summed, results = [0], dist.all_reduce, []

    def counted(values: torch.Tensor, **options: Any) -> Any:
        sent[0] += values.numel()
        return summed(values, **options)

    for by_rows in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(Model(tied), bucket_cap_mb=1)
        if by_rows:
            ddp_hook.sum_touched_rows(model)
            dist.all_reduce = counted
        for _ in range(2):  # DDP lays its buckets out anew between the two
            model.zero_grad(set_to_none=True)
            for number in range(accumulate):
                with model.no_sync() if number < accumulate - 1 else contextlib.nullcontext():
                    ids = torch.arange(100) * (rank + 2) + number
                    model(ids).square().mean().backward()
            results.append([weight.grad.clone() for weight in model.parameters()])  # type: ignore[union-attr]
    dist.all_reduce = summed
    torch.save((results, sent[0]), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("tied", "accumulate"),
    [(False, 3), pytest.param(True, 1, marks=pytest.mark.heavy)],
)
def test_the_sums_are_ddps_own(tmp_path: Path, tied: bool, accumulate: int) -> None:
    run_processes(process, (str(tmp_path), 2, tied, accumulate), 2)
    for rank in range(2):
        (*expected, first, second), sent = torch.load(tmp_path / f"{rank}.pt")
        for theirs, ours in zip(expected, (first, second), strict=True):
            assert all(map(torch.equal, theirs, ours))
        whole = 2 * sum(weight.numel() for weight in first)
        assert sent > whole if tied else sent < whole / 10


@pytest.mark.heavy
@pytest.mark.long
def test_three_processes_sum_a_first_step_as_every_other(tmp_path: Path) -> None:
    run_processes(process, (str(tmp_path), 3, False, 1), 3)
    ranks = [torch.load(tmp_path / f"{rank}.pt")[0] for rank in range(3)]
    ddps, ddps_next, first, second = ranks[0]
    for one, other in ((first, second), (first, ranks[1][2]), (first, ranks[2][3])):
        assert all(map(torch.equal, one, other))
    for one, other in zip(ddps, first, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-9)
    # What it is for: DDP's own sums are not those of its first step.
    assert not all(map(torch.equal, ddps, ddps_next))


def failing_process(rank: int, folder: str, tied: bool) -> None:
    def fails(values: torch.Tensor) -> Any:
        future: Any = torch.futures.Future()
        future.set_exception(RuntimeError("a peer is gone"))
        return future

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=1)
    model = DistributedDataParallel(Model(tied))
    ddp_hook._sum = fails
    ddp_hook.sum_touched_rows(model)
    with pytest.raises(RuntimeError, match="a peer is gone"):
        model(torch.arange(100)).square().mean().backward()
    (Path(folder) / "raised").touch()
    # Right after a sum, the group's destructor may wait for a thread that waits for the GIL.
    os._exit(0)


@pytest.mark.parametrize("tied", [False, True])
def test_a_sum_that_fails_ends_the_step(tmp_path: Path, tied: bool) -> None:
    run_processes(failing_process, (str(tmp_path), tied), 1)
    assert (tmp_path / "raised").exists()


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


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fails", [True, pytest.param(False, marks=pytest.mark.heavy)])
def test_the_others_wait_longer_than_a_collective_would_unless_the_first_fails(
    fails: bool, tmp_path: Path
) -> None:
    words = r"no such column|AssertionError"
    ends = pytest.raises(ProcessRaisedException, match=words) if fails else contextlib.nullcontext()
    with ends:
        run_processes(work, (str(tmp_path), fails), WORLD)
    assert len(list(tmp_path.glob("done-*"))) == (0 if fails else WORLD)
    with first_of_host():
        pass  # one process has nobody to wait for
