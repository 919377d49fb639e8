"""Sum gradients between processes on CPUs, of large embeddings only the touched rows.

Half of a small encoder's weights are its token embedding, and a step touches some hundred of its
30,000 rows. Without this hook, DDP sends the gradients of all rows.

Each number is summed in the order of the ranks. An all-reduce of three or more processes sums in an
order that depends on the position in the buffer, and DDP rearranges its buffers after the first
step. So the first step after a resume would be rounded differently than without interruption.
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
"""Smallest number of elements of an embedding for which touched rows are searched."""


def sum_touched_rows(model: nn.Module) -> None:
    """Register a hook with DDP that sends only nonzero rows of large embeddings' gradients.

    The sums equal those of DDP. If most rows are touched (an embedding tied to the output), all
    rows are sent. A model that is not wrapped in DDP is not changed.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    embeddings = {
        id(layer.weight)
        for layer in model.modules()
        if isinstance(layer, nn.Embedding) and layer.weight.numel() >= _LARGE
    }
    add = _sum if dist.get_world_size() <= 2 else _Sums().sum
    # A lambda, since DDP checks annotations, and those of this module are strings.
    model.register_comm_hook(None, lambda _, bucket: _mean(embeddings, bucket, add))


def _mean(
    embeddings: set[int], bucket: Any, add: Callable[[Tensor], Future[Any]]
) -> Future[Tensor]:
    """Average `bucket` over the processes in place: DDP's communication hook."""
    buffer: Tensor = bucket.buffer()
    processes = dist.get_world_size()
    sent: list[tuple[Tensor, Tensor | None]] = []
    for weight, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        rows = None
        if id(weight) in embeddings:
            # Rows with a nonzero element (also NaN) on any process, unless these are most rows.
            # This takes 3 ms; ne(0).any(1) takes 11 and the maximum norm 32.
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
    """Sum over two processes, for which there is only one order."""
    work: Any = dist.all_reduce(values, async_op=True)
    future: Future[Any] = work.get_future()
    return future


class _Sums:
    """Sums tensors over all processes, each number in the order of the ranks.

    A thread with its own process group does so during the backward pass. Every process sums a part
    and sends it to all, which transfers as many numbers as a ring.
    """

    def __init__(self) -> None:
        self._group = dist.new_group()
        self._waiting: queue.SimpleQueue[tuple[Tensor, Future[Tensor]]] = queue.SimpleQueue()
        # A daemon, since it may wait for a process that has ended.
        threading.Thread(target=self._work, name="sums of gradients", daemon=True).start()

    def sum(self, values: Tensor) -> Future[Tensor]:
        """Sum `values` in place."""
        future: Future[Tensor] = Future()
        self._waiting.put((values, future))
        return future

    def _work(self) -> None:
        while True:
            values, future = self._waiting.get()
            try:
                self._sum(values)
            except Exception as error:
                reason: Any = error  # torch's annotation is wrong
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
    """Return `buffer`, or raise the error of the sum, which `then` would ignore."""
    done.value()
    return buffer
