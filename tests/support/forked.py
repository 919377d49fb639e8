"""Processes of a test that have imported torch: forks of one process that did."""

import multiprocessing
from collections.abc import Callable
from typing import Any


def run_processes(function: Callable[..., None], arguments: tuple[Any, ...], count: int) -> None:
    """Run `function(rank, *arguments)` in so many processes; raise what one of them raises."""
    from torch.multiprocessing.spawn import start_processes

    multiprocessing.set_forkserver_preload(
        ["pytest", "torch.distributed", "torch._dynamo", function.__module__]
    )
    start_processes(function, arguments, count, start_method="forkserver")
