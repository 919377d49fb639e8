"""Let the first process of each host run before the others."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_POLL_SECONDS = 0.1
_turns = itertools.count()


@contextlib.contextmanager
def first_of_host() -> Iterator[None]:
    """Run the block in the first process of each host, then in the others; end when all have.

    A collective of all processes. The others poll the group's store without a time-out. A barrier
    would fail after the time-out of collectives (30 minutes by default) and would not react to
    signals. If the block fails in one process, the others continue, and fail on their own.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    store, rank, turn = _get_default_store(), dist.get_rank(), next(_turns)
    names = [f"amphora turn {turn} of rank {other}" for other in range(dist.get_world_size())]
    first = rank - int(os.environ.get("LOCAL_RANK", rank))
    while rank != first and not store.check([names[first]]):
        time.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        store.set(names[rank], "done")
    # Wait for all: the time-out of the next collective begins here, and hosts differ in speed.
    while not store.check(names):
        time.sleep(_POLL_SECONDS)
