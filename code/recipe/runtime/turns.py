"""What one process of each host does first, and its others then find done."""

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
    """Run the block in the first process of each host, then in its others; leave it when all have.

    The others ask the group's store, and wait as long as it takes. In a barrier they would fail
    after the time-out of collectives (30 minutes by default), and could not answer a signal. A
    process whose block fails lets the others go on, to their own failure, as it ends.
    All processes must call this as often as each other.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        yield
        return
    store, rank, turn = _get_default_store(), dist.get_rank(), next(_turns)
    names = [f"amphora turn {turn} of rank {each}" for each in range(dist.get_world_size())]
    first = rank - int(os.environ.get("LOCAL_RANK", rank))
    while rank != first and not store.check(names[first : first + 1]):
        time.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        store.set(names[rank], "done")
    # The next collective counts its time from here, and hosts are not equally fast.
    while not store.check(names):
        time.sleep(_POLL_SECONDS)
