"""Sums of gradients between processes on CPUs: of an embedding only the rows that were touched.

Half of a small encoder's weights are its token embedding, and a step reads some hundred of its
30,000 rows. DDP would send the gradients of all of them over the network.

Each number is summed in the order of the ranks. A collective sum of three and more processes takes
another order for each place in what is summed, and after its first step DDP lays gradients out
anew: so the first step after a resume would be rounded otherwise than in a run that went on.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

_LARGE = 1 << 20
"""Numbers from which an embedding is looked at."""


def sum_touched_rows(model: nn.Module) -> None:
    """Have DDP send of large embeddings' gradients the rows that are not all zero.

    The sums are those of DDP without it. Where most rows are touched (an embedding that is the
    output's weight too), all are sent. A model that is not wrapped in DDP is left as it is.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    embeddings = {
        id(layer.weight)
        for layer in model.modules()
        if isinstance(layer, nn.Embedding) and layer.weight.numel() >= _LARGE
    }
    add = _sum if dist.get_world_size() <= 2 else _Sums().sum
    # DDP compares the annotations of what it is given, and these are strings.
    model.register_comm_hook(None, lambda _, bucket: _mean(embeddings, bucket, add))


def _mean(
    embeddings: set[int], bucket: Any, add: Callable[[Tensor], Future[Any]]
) -> Future[Tensor]:
    """DDP's communication hook: the processes' mean of `bucket`, in its place."""
    buffer: Tensor = bucket.buffer()
    processes = dist.get_world_size()
    sent: list[tuple[Tensor, Tensor | None]] = []
    for weight, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        rows = None
        if id(weight) in embeddings:
            # Rows in which any process has a number that is not 0, unless those are most of them.
            # 3 ms where ne(0).any(1) takes 11, the maximum norm 32. NaN is not 0 either.
            largest, smallest = gradient.amax(dim=1), gradient.amin(dim=1)
            touched = (largest.ne(0) | smallest.ne(0)).to(torch.uint8)
            dist.all_reduce(touched, op=dist.ReduceOp.MAX)
            rows = touched.nonzero().squeeze(1)
            if 2 * len(rows) > len(gradient):
                rows = None
        sent.append((gradient, rows))
    if all(rows is None for _, rows in sent):
        return add(buffer.div_(processes)).then(lambda done: _checked(done, buffer))
    parts = [(part if rows is None else part[rows]).flatten() for part, rows in sent]
    packed = torch.cat(parts).div_(processes)

    def unpack(done: Future[Any]) -> Tensor:
        summed = torch.split(packed, [len(part) for part in parts])
        for (gradient, rows), values in zip(sent, summed, strict=True):
            if rows is None:
                gradient.copy_(values.view_as(gradient))
            else:
                gradient[rows] = values.view(len(rows), -1)
        return _checked(done, buffer)

    return add(packed).then(unpack)


def _sum(values: Tensor) -> Future[Any]:
    """Of two processes: there is one order."""
    work: Any = dist.all_reduce(values, async_op=True)
    future: Future[Any] = work.get_future()
    return future


class _Sums:
    """Sums over all processes, each number in the order of the ranks, one after the other.

    They are made in a thread and a process group of their own, beside the backward pass, as many
    numbers being sent as in a ring: every process adds up a part, and sends its sums to all.
    """

    def __init__(self) -> None:
        self._group = dist.new_group()
        self._waiting: queue.SimpleQueue[tuple[Tensor, Future[Tensor]]] = queue.SimpleQueue()
        # One that waits for a process that is gone must not keep this one from ending.
        threading.Thread(target=self._work, name="sums of gradients", daemon=True).start()

    def sum(self, values: Tensor) -> Future[Tensor]:
        """The sums of `values`, in their place."""
        future: Future[Tensor] = Future()
        self._waiting.put((values, future))
        return future

    def _work(self) -> None:
        while True:
            values, future = self._waiting.get()
            try:
                self._sum(values)
            except Exception as error:
                reason: Any = error  # whose annotation is wrong
                future.set_exception(reason)
            else:
                future.set_result(values)

    def _sum(self, values: Tensor) -> None:
        processes = dist.get_world_size()
        part = -(-len(values) // processes)
        padded = values.new_zeros(processes * part)
        padded[: len(values)] = values
        received = torch.empty_like(padded)
        dist.all_to_all_single(received, padded, group=self._group)
        first, *others = received.view(processes, part)
        for other in others:
            first += other
        dist.all_gather_into_tensor(padded, first, group=self._group)
        values.copy_(padded[: len(values)])


def _checked(done: Future[Any], buffer: Tensor) -> Tensor:
    """`buffer`; raises what the sum failed with, as `then` would pass over it."""
    done.value()
    return buffer
